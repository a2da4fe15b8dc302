"""A tiny model with a tokenizer, an engine for it, and what it must answer."""

import functools
import sysconfig
from pathlib import Path

import pytest
from flax import nnx

from decode.complete import ask, complete
from decode.engine import Engine
from laneformer_jax import Laneformer
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.checkpoint.load import Loaded
from laneformer_jax.presets import preset
from laneformer_jax.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [folder.joinpath(name).read_text(encoding="utf-8") for name in ("ast.py", "abc.py")]
    tokenizer = train_tokenizer(texts, 400, tmp_path_factory.mktemp("tokenizer"))
    model = Laneformer(
        preset(
            "tiny",
            vocab_size=400,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=64,
            sliding_window=16,
            swa_layers=(0,),
            initializer_range=0.5,
        ),
        rngs=nnx.Rngs(3),
    )
    return Loaded(model, tokenizer, ChatTemplate())


@pytest.fixture(scope="session")
def engine(loaded):
    return Engine(loaded.model, burst=4)


@pytest.fixture(scope="session")
def expected(loaded):
    """What a prompt's answer must be, from an engine that nobody else uses."""
    engine = Engine(loaded.model, burst=4)

    @functools.cache
    def continuation(ids, max_new_tokens):
        asked = ask(loaded, engine, ids, max_new_tokens)
        pieces = [p for step in complete(engine, loaded.tokenizer, asked) for p in step.pieces]
        return "".join(piece.text for piece in pieces)

    def answer(prompt, max_new_tokens):
        return continuation(tuple(loaded.prompt_ids(prompt)), max_new_tokens)

    return answer


@pytest.fixture(scope="session")
def checkpoint(loaded, tmp_path_factory):
    """The same model as a folder."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save(folder)
    return folder

"""Shared by the evaluation tests: benchmark data, a sandbox, and a tiny checkpoint."""

import sys

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["*"]

FENCE = "```"


@pytest.fixture(scope="session")
def evaldata(shared):
    return shared / "evaldata"


@pytest.fixture(scope="session")
def sandbox():
    from eval.sandbox.probe import open_sandbox

    return open_sandbox()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A Hugging Face folder with random weights and a tokenizer."""
    from flax import nnx

    from laneformer_jax import Laneformer, LaneformerConfig
    from laneformer_jax.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer(
        ["def f(x):\n    return x + 1\n", "import math\nprint(math.pi)\n"] * 50, 300, folder
    )
    config = LaneformerConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_lanes=4,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    Laneformer(config, rngs=nnx.Rngs(0)).save_pretrained(folder / "model")
    tokenizer.save(folder / "model")
    return folder / "model"

"""A small corpus with its tokenizer."""

import json
import random
from pathlib import Path

import pytest

from laneformer_jax.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with `texts/*.txt`, `rows.jsonl` and `tokenizer.model` of 280 entries."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [f"word{i}" for i in range(60)]
    (folder / "texts").mkdir()
    texts = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(40)]
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    rows = [json.dumps({"text": " ".join(rng.choices(words, k=30))}) for _ in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    train_tokenizer(texts, 280, folder / "tokenizer.model")
    return folder

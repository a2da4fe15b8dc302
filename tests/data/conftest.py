"""A small tokenizer and small corpora for the data tests."""

import os
import random
import tempfile
from pathlib import Path

# Before `datasets` is imported: no network, and nothing in the user's caches.
os.environ["HF_HUB_OFFLINE"] = "1"
_HOME = tempfile.TemporaryDirectory(prefix="laneformer-tests-")
os.environ["HF_HOME"] = os.environ["XDG_CACHE_HOME"] = _HOME.name

import pytest
from batch_rows import write_jsonl

from laneformer_jax.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    words = [
        "def add(a, b):\n    return a + b\n",
        "class Point:\n    x = 1\n",
        "alpha beta gamma\n",
    ]
    return train_tokenizer(words * 5, 300, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> Path:
    """`code/*.py` 40 files, `text.jsonl` 150 rows, `pairs.jsonl` 60, `chat.jsonl` 30.

    Every document begins with its own name, such as `text7.`
    """
    root = tmp_path_factory.mktemp("corpora")
    rng = random.Random(0)

    def body(low: int, high: int) -> str:
        return " ".join(
            rng.choice(["alpha", "beta", "x = 1", "\n"]) for _ in range(rng.randint(low, high))
        )

    (root / "code" / "sub").mkdir(parents=True)
    for i in range(40):
        folder = root / "code" / ("sub" if i % 2 else "")
        (folder / f"f{i:02d}.py").write_text(f"code{i}. {body(1, 60)}")
    write_jsonl(root / "text.jsonl", [{"text": f"text{i}. {body(0, 40)}"} for i in range(150)])
    write_jsonl(
        root / "pairs.jsonl",
        [
            {"prompt": f"pair{i}. {body(0, 15)}", "response": f"answer{i} {body(0, 5)}"}
            for i in range(60)
        ],
    )
    write_jsonl(
        root / "chat.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": f"chat{i}. {body(0, 6)}"},
                    {"role": "assistant", "content": f"first{i}"},
                    {"role": "user", "content": body(0, 6)},
                    {"role": "assistant", "content": f"second{i} {body(0, 4)}"},
                ]
            }
            for i in range(30)
        ],
    )
    return root


@pytest.fixture(scope="session")
def mixed(corpora):
    """Three sources of different kinds."""
    return {
        "code": {"kind": "text", "path": str(corpora / "code"), "pattern": "*.py", "weight": 0.5},
        "text": {"kind": "jsonl", "path": str(corpora / "text.jsonl"), "weight": 0.3},
        "chat": {
            "kind": "jsonl",
            "path": str(corpora / "chat.jsonl"),
            "format": "messages",
            "weight": 0.2,
        },
    }


@pytest.fixture(scope="session")
def held(mixed):
    return {name: {**source, "heldout": 0.3} for name, source in mixed.items()}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder laid out as Hub datasets, the working directory: `acme/docs` with 3 + 1 files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "acme" / "docs" / "data"
    folder.mkdir(parents=True)
    for shard, rows in enumerate((7, 5, 9)):
        table = pa.table({"text": [f"text{shard}{i}. alpha beta" for i in range(rows)]})
        pq.write_table(table, folder / f"train-{shard:05d}-of-00003.parquet", row_group_size=3)
    pq.write_table(pa.table({"text": ["text999. x"]}), folder / "test-00000-of-00001.parquet")
    return tmp_path

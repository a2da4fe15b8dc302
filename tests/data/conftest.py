"""A small tokenizer and small corpora for the data tests."""

import json
import random
from pathlib import Path

import pytest

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


def write_jsonl(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

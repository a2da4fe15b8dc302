"""Perplexity and bits per byte of held-out text, every token scored once with a long context."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laneformer_jax.errors import UserError

_TEXT_FIELDS = ("text", "content")


@dataclass(frozen=True)
class Perplexity:
    """A score of held-out text.

    Args:
        nll: sum of −log p over scored tokens, nats.
        tokens: scored tokens (all but the begin token of each document; the end token counts).
        text_bytes: UTF-8 bytes of the documents.
        documents: how many.
    """

    nll: float
    tokens: int
    text_bytes: int
    documents: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token; depends on the tokenizer."""
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; comparable between tokenizers."""
        return self.nll / math.log(2) / self.text_bytes


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut the `length` − 1 predictions of a document into windows.

    Yields (start, end, first): tokens start … end−1 are the window's input and positions
    first … end−1 are scored, each position predicting the token behind it. Every prediction is
    scored once, and behind the first window with at least `context` − `stride` tokens before it.
    """
    scored = 0
    while scored < length - 1:
        end = min(length - 1, context if scored == 0 else scored + stride)
        yield max(0, end - context), end, scored
        scored = end


def perplexity(
    model: Any,
    tokenizer: Any,
    documents: Iterable[str],
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """Score documents, each on its own.

    Args:
        model: a `Laneformer`.
        tokenizer: its `Tokenizer`; documents get its begin and end token.
        context: tokens a window holds; the model's longest by default.
        stride: new tokens per window; half the context by default.
        batch_size: windows per call.

    Raises:
        UserError: no text, or context and stride that do not fit the model.
    """
    import jax
    from flax import nnx

    from laneformer_jax.loss import token_losses

    most = int(model.config.max_position_embeddings)
    context = most if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= context <= most:
        raise UserError(f"context = {context}: must be 1 … {most}, the model's longest")
    if not 1 <= stride <= context:
        raise UserError(f"stride = {stride}: must be 1 … {context}, the context")

    @nnx.jit
    def losses(model: Any, inputs_BS: Any, targets_BS: Any) -> jax.Array:
        return token_losses(model(inputs_BS), targets_BS)

    nll, tokens, size, count = 0.0, 0, 0, 0

    def run(batch: list[tuple[np.ndarray, np.ndarray, int]]) -> float:
        inputs_BS = np.zeros((batch_size, context), np.int32)
        targets_BS = np.zeros((batch_size, context), np.int32)
        for row, (ids, targets, _) in enumerate(batch):
            # Padding stands behind the text, where a causal model cannot see it.
            inputs_BS[row, : len(ids)], targets_BS[row, : len(targets)] = ids, targets
        found_BS = np.asarray(losses(model, inputs_BS, targets_BS), np.float64)
        return sum(
            float(found_BS[row, first : len(ids)].sum())
            for row, (ids, _, first) in enumerate(batch)
        )

    batch: list[tuple[np.ndarray, np.ndarray, int]] = []
    for document in documents:
        ids = np.asarray(tokenizer.encode(document, bos=True, eos=True), np.int32)
        size, count, tokens = size + len(document.encode()), count + 1, tokens + len(ids) - 1
        for start, end, first in windows(len(ids), context, stride):
            batch.append((ids[start:end], ids[start + 1 : end + 1], first - start))
            if len(batch) == batch_size:
                nll += run(batch)
                batch = []
    if batch:
        nll += run(batch)
    if size == 0:
        raise UserError("the held-out data holds no text")
    return Perplexity(nll, tokens, size, count)


def documents(path: str | Path) -> Iterator[str]:
    """Texts of a file or folder.

    `.jsonl` and `.jsonl.gz` hold one document per line in a field `text` or `content`; any other
    file is one document; of a folder every file is read, in order of path.

    Raises:
        UserError: no such path, or a file that is not UTF-8 or lacks the field.
    """
    path = Path(path)
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            yield from documents(file)
        return
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    try:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text(json.loads(line), f"{path}:{number}")
        else:
            yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON lines ({error})") from None


def _text(record: Any, where: str) -> str:
    for field in _TEXT_FIELDS:
        if isinstance(record, dict) and isinstance(record.get(field), str):
            return str(record[field])
    raise UserError(f"{where}: no field {' or '.join(_TEXT_FIELDS)} with text")

"""Training a byte-pair tokenizer with sentencepiece."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece as spm

from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file
from laneformer_jax.tokenizer.face import MODEL_NAME, Tokenizer

# Role markers of the chat template; every turn ends with the end-of-sequence token.
CHAT_CONTROL_SYMBOLS = ("<|system|>", "<|user|>", "<|assistant|>")

_LINES_PER_SENTENCE = 8
_TRAINER_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "split_by_whitespace": True,
    "split_by_unicode_script": True,
    "split_by_number": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "max_sentencepiece_length": 16,
    "character_coverage": 0.99995,
    "max_sentence_length": 1 << 16,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "minloglevel": 2,
}


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    out_path: str | os.PathLike[str],
    control_symbols: Sequence[str] = CHAT_CONTROL_SYMBOLS,
) -> Tokenizer:
    """Train a byte-pair tokenizer that round-trips any text, and write it to `out_path`.

    Identity normalisation, no space put in front, bytes for what the vocabulary lacks. The trainer
    sees pieces of eight lines with their newlines, so that a newline with its indentation can
    become one token. The same texts in the same order give the same file.

    Args:
        texts: training documents.
        vocab_size: entries in all: 3 + control symbols + 256 bytes + learnt pieces.
        out_path: the `.model` file, or a folder to put `tokenizer.model` in.
        control_symbols: markers that only ids can produce, never text.

    Raises:
        UserError: there is no text, too little text for `vocab_size`, or it is too small.
    """
    smallest = 3 + len(control_symbols) + 256 + 1
    if vocab_size < smallest:
        raise UserError(
            f"vocab_size = {vocab_size}: must be at least {smallest}: 3 special tokens,"
            f" {len(control_symbols)} control symbols, 256 bytes and one piece"
        )
    target = Path(out_path)
    if target.suffix != ".model":
        target = target / MODEL_NAME
    sentences = _sentences(texts)
    first = next(sentences, None)
    if first is None:
        raise UserError("tokenizer training: the sources hold no text")
    model = _ModelWriter()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_chain(first, sentences),
            model_writer=model,
            vocab_size=vocab_size,
            control_symbols=list(control_symbols),
            num_threads=os.cpu_count() or 1,
            **_TRAINER_OPTIONS,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error)
        if largest := re.search(r"value <= (\d+)", reason):
            told = f"the text is too small for it; at most {largest[1]}, or more text"
        elif fewest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
            told = f"the characters of this text alone take {fewest[1]}"
        else:
            raise
        raise UserError(f"vocab_size = {vocab_size}: {told}") from None
    with atomic_file(target, "wb") as file:
        file.write(model.data)
    return Tokenizer.load(target)


class _ModelWriter:
    data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        # A control character would end the trainer's line or make it drop the line.
        lines = text.replace("\0", "").split("\n")
        for start in range(0, len(lines), _LINES_PER_SENTENCE):
            sentence = "\n".join(lines[start : start + _LINES_PER_SENTENCE])
            if sentence.strip():
                yield sentence


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest

"""A Hugging Face `tokenizer.json` behind the face of `laneformer_jax.tokenizer.Tokenizer`."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from laneformer_jax.errors import UserError
from laneformer_jax.files import read_json

SPACE_MARK = "\u2581"

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_WINDOW, _OVERLAP = 64, 4  # tokens
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>", "<|endoftext|>")
_EOS_NAMES = ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>")


class JsonBackend:
    """Reads `tokenizer.json`, and the names of its begin and end tokens from the
    `tokenizer_config.json` beside it, or else from the usual spellings.

    Raises:
        UserError: not a tokenizer, or no begin or end token can be told.
    """

    file_name = "tokenizer.json"

    def __init__(self, data: bytes, path: Path, names: dict[str, str] | None = None):
        self.data, self._path = data, path
        try:
            self._tokenizer = _loaded(data)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path}: is not a tokenizer.json: {error}") from None
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.control_ids = {token.content: i for i, token in added.items() if token.special}
        self._names = _special_names(path) if names is None else names
        self.bos_id = self._special("bos_token", _BOS_NAMES)
        self.eos_id = self._special("eos_token", _EOS_NAMES)

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonBackend, (self.data, self._path, self._names)

    def _special(self, name: str, usual: tuple[str, ...]) -> int:
        given = self._names.get(name)
        for candidate in (given,) if given else usual:
            token_id = self._tokenizer.token_to_id(candidate)
            if token_id is not None:
                return int(token_id)
        raise UserError(
            f"{self._path}: no {name} found; name it in a tokenizer_config.json beside it"
        )

    def encode(self, text: str, continues: bool) -> np.ndarray:
        tokenizer = self._inside if continues else self._tokenizer
        if self._mark_ids is None or SPACE_MARK not in text:
            return _encoded(tokenizer, text)
        first, *rest = text.split(SPACE_MARK)
        parts = [_encoded(tokenizer, first)] if first else []
        for part in rest:
            parts += [self._mark_ids, _encoded(self._inside, part)]
        return np.concatenate(parts)

    @functools.cached_property
    def _mark_ids(self) -> np.ndarray | None:
        """U+2581 in bytes, as in the sentencepiece backend; None where the vocabulary has none,
        as in byte-level tokenizers, which need no such care."""
        ids = [self._tokenizer.token_to_id(f"<0x{b:02X}>") for b in SPACE_MARK.encode()]
        return None if None in ids else np.asarray(ids, np.int32)

    @functools.cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        """The same tokenizer for text that continues a sequence: it puts no space in front."""
        model = json.loads(self.data)
        for stage in ("normalizer", "pre_tokenizer"):
            model[stage] = _without_prefix(model.get(stage))
        return _loaded(json.dumps(model).encode())

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        return str(self._tokenizer.id_to_token(token_id) or "")

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if b'"ByteLevel"' in self.data:
            known = _byte_characters()
            if token_id not in self._added and all(c in known for c in piece):
                return bytes(known[c] for c in piece)
            return piece.encode()
        if _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE_MARK, " ").encode()

    def stream(self) -> _JsonStream:
        return _JsonStream(self)


@functools.cache
def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable ones of Latin-1 for
    themselves, the others numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _loaded(data: bytes) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    # Special tokens spelt in a text are text; only ids make them.
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> np.ndarray:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _without_prefix(stage: Any) -> Any:
    """A normalizer or pre-tokenizer without what puts a space in front of a text."""
    if not isinstance(stage, dict) or stage.get("type") == "Prepend":
        return None
    if stage["type"] == "Sequence":
        key = "normalizers" if "normalizers" in stage else "pretokenizers"
        kept = [part for part in map(_without_prefix, stage[key]) if part is not None]
        return {**stage, key: kept}
    if stage["type"] == "Metaspace":
        return {**stage, "prepend_scheme": "never"}
    return {**stage, "add_prefix_space": False} if "add_prefix_space" in stage else stage


def _special_names(path: Path) -> dict[str, str]:
    file = path.parent / "tokenizer_config.json"
    if not file.exists():
        return {}
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: must hold a JSON object, holds {type(config).__name__}")
    names = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names


class _JsonStream:
    """Decodes a window of the last ids again for each new one.

    The decoder of such a file may be anything, so text is given out only once nothing that follows
    can change it: not while it ends in U+FFFD, which may still become a character, nor inside a run
    of byte pieces, which a byte-fallback decoder replaces as a whole when one of them is invalid.
    """

    def __init__(self, backend: JsonBackend):
        self._backend = backend
        self._byte_runs = b'"ByteFallback"' in backend.data
        self._control = frozenset(backend.control_ids.values())
        self._ids: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, token_id: int) -> str:
        if token_id in self._control:
            return ""  # left out before decoding: the bytes around it are one run
        self._ids.append(token_id)
        if self._byte_runs and _BYTE_PIECE.fullmatch(self._backend.piece(token_id)):
            return ""
        text = self._backend.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._given = text[self._given :], len(text)
        if len(self._ids) > _WINDOW:
            self._ids = self._ids[-_OVERLAP:]
            self._given = len(self._backend.decode(self._ids))
        return new

    def flush(self) -> str:
        rest = self._backend.decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        return rest

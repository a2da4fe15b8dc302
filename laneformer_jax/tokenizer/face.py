"""The face that every tokenizer has, whatever file it comes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"


class StreamDecoder(Protocol):
    """Decodes one sequence token by token; the parts joined equal `Tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; "" while a character is incomplete."""

    def flush(self) -> str:
        """The text still held back, and a fresh start for the next sequence."""


class Backend(Protocol):
    """What a kind of tokenizer file brings."""

    vocab_size: int
    bos_id: int
    eos_id: int
    control_ids: dict[str, int]
    data: bytes
    file_name: str

    def encode(self, text: str, continues: bool) -> np.ndarray: ...
    def decode(self, ids: list[int]) -> str: ...
    def piece(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def stream(self) -> StreamDecoder: ...


class Tokenizer:
    """A loaded tokenizer. Pickles by value, so worker processes need no file.

    Attributes:
        vocab_size: ids are 0 … vocab_size-1.
        bos_id, eos_id: ids of the begin and end of a document.
        control_ids: text of every control token (`<s>`, `<|user|>`, …) and its id.
        sha256: hex digest of the tokenizer file; recorded wherever ids are stored.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self.vocab_size = backend.vocab_size
        self.bos_id, self.eos_id = backend.bos_id, backend.eos_id
        self.control_ids = dict(backend.control_ids)
        self.sha256 = hashlib.sha256(backend.data).hexdigest()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a `tokenizer.model` or `tokenizer.json` file, or a folder that holds one.

        A folder with both is read from `tokenizer.model`.

        Raises:
            UserError: no such file, or a file that is not a usable tokenizer.
        """
        file = Path(path)
        if file.is_dir():
            found = [file / name for name in (MODEL_NAME, JSON_NAME) if (file / name).is_file()]
            if not found:
                raise UserError(f"{file}: holds neither {MODEL_NAME} nor {JSON_NAME}")
            file = found[0]
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{file}: no such tokenizer file") from None
        except OSError as error:
            raise UserError(f"{file}: cannot be read: {error}") from None
        if file.suffix == ".json":
            from laneformer_jax.tokenizer.huggingface import JsonBackend

            return cls(JsonBackend(data, file))
        from laneformer_jax.tokenizer.sentencepiece import SentencePieceBackend

        return cls(SentencePieceBackend(data, str(file)))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the tokenizer file, byte for byte as it was loaded, into `folder`; its path."""
        path = Path(folder) / self._backend.file_name
        with atomic_file(path, "wb") as file:
            file.write(self._backend.data)
        return path

    def encode_array(self, text: str, continues: bool = False) -> np.ndarray:
        """int32 [n]: the ids of `text`, without begin or end.

        Args:
            text: any text.
            continues: it follows other tokens. Only matters to tokenizers that put a space in front
                of a text, such as Llama-2's; ours does not.

        Raises:
            UserError: `text` holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            return self._backend.encode(text, continues)
        except (RuntimeError, UnicodeEncodeError, TypeError):
            place = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if place is None:
                raise
            raise UserError(
                f"text: character {place} is the lone surrogate U+{ord(text[place]):04X}, which"
                " UTF-8 cannot hold; decode the input with errors='replace' or skip it"
            ) from None

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """The ids of `text`, between the begin and end tokens when asked. Raises UserError."""
        ids: list[int] = self.encode_array(text).tolist()
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens have none. Invalid UTF-8 becomes U+FFFD.

        Raises:
            UserError: an id outside 0 … vocab_size-1.
        """
        known = [self._checked(i) for i in ids]
        return self._backend.decode(known)

    def stream(self) -> StreamDecoder:
        """A decoder for one sequence that is still growing."""
        return _Stream(self)

    def piece(self, token_id: int) -> str:
        """The vocabulary entry of an id, as the tokenizer file spells it (`▁def`, `<0x0A>`)."""
        return self._backend.piece(self._checked(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8; part of a character for some. A control token's name."""
        return self._backend.token_bytes(self._checked(token_id))

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether every id stands for the same piece in both, whatever their files."""
        if self.sha256 == other.sha256:
            return True
        if (self.vocab_size, self.bos_id, self.eos_id) != (
            other.vocab_size,
            other.bos_id,
            other.eos_id,
        ):
            return False
        return all(self.piece(i) == other.piece(i) for i in range(self.vocab_size))

    def _checked(self, token_id: int) -> int:
        token_id = int(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise UserError(
                f"token id {token_id}: outside the tokenizer's vocabulary, 0 to"
                f" {self.vocab_size - 1}"
            )
        return token_id

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, sha256={self.sha256[:12]})"


class _Stream:
    """Checks ids, then leaves the work to the backend's decoder."""

    def __init__(self, tokenizer: Tokenizer):
        self._check = tokenizer._checked
        self._inner = tokenizer._backend.stream()

    def push(self, token_id: int) -> str:
        return self._inner.push(self._check(token_id))

    def flush(self) -> str:
        return self._inner.flush()

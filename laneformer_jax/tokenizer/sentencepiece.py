"""A sentencepiece model behind the face of `laneformer_jax.tokenizer.Tokenizer`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import sentencepiece as spm

from laneformer_jax.errors import UserError
from laneformer_jax.tokenizer.face import MODEL_NAME, StreamDecoder
from laneformer_jax.tokenizer.streaming import SentencePieceStream
from laneformer_jax.tokenizer.words import WordEncoder, first_word

# sentencepiece writes a space as U+2581 inside its pieces and so reads a literal U+2581 back as a
# space. Its three UTF-8 bytes as byte pieces are taken literally by every decoder.
_LITERAL_SPACE_MARK = "\u2581"
_SHORT = 256  # characters: what is shorter is encoded as fast in one go


class SentencePieceBackend:
    """A sentencepiece model; raises UserError for one that cannot encode every text."""

    file_name = MODEL_NAME

    def __init__(self, data: bytes, source: str = MODEL_NAME):
        self.data = data
        self._sp = _processor(data, source)
        self.vocab_size = self._sp.get_piece_size()
        self.bos_id, self.eos_id = self._sp.bos_id(), self._sp.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise UserError(f"{source}: has no begin or no end token; a language model needs both")
        self.control_ids = {
            self._sp.id_to_piece(i): i for i in range(self.vocab_size) if self._sp.is_control(i)
        }
        mark = [self._sp.piece_to_id(f"<0x{b:02X}>") for b in _LITERAL_SPACE_MARK.encode()]
        self._mark_ids = np.asarray(mark, np.int32)
        if not all(self._sp.is_byte(i) for i in mark):
            raise UserError(
                f"{source}: was trained without byte fallback and cannot encode every text"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceBackend, (self.data,)

    def encode(self, text: str, continues: bool) -> np.ndarray:
        if _LITERAL_SPACE_MARK not in text:
            return self._encode(text, continues)
        first, *rest = text.split(_LITERAL_SPACE_MARK)
        parts = [self._encode(first, continues)] if first else []
        for part in rest:
            parts += [self._mark_ids, self._encode(part, True)]
        return np.concatenate(parts)

    def _encode(self, text: str, continues: bool) -> np.ndarray:
        """The ids of `text` without U+2581."""
        if self._words is None or len(text) < _SHORT:
            return _ids(self._inside if continues else self._sp, text)
        if continues or self._inside is self._sp:
            return self._words(text)
        first = first_word(text)
        return np.concatenate([_ids(self._sp, first), self._words(text[len(first) :])])

    @functools.cached_property
    def _words(self) -> WordEncoder | None:
        sp = self._sp
        pieces = [
            sp.id_to_piece(i).replace(_LITERAL_SPACE_MARK, " ")
            for i in range(self.vocab_size)
            if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))
        ]
        return WordEncoder.of(pieces, functools.partial(self._inside.encode, num_threads=1))

    @functools.cached_property
    def _inside(self) -> spm.SentencePieceProcessor:
        """The same model for text that continues a sequence: it puts no space in front."""
        from sentencepiece import sentencepiece_model_pb2

        model: Any = vars(sentencepiece_model_pb2)["ModelProto"]()
        model.ParseFromString(self.data)
        if not model.normalizer_spec.add_dummy_prefix:
            return self._sp
        model.normalizer_spec.add_dummy_prefix = False
        return _processor(model.SerializeToString(), MODEL_NAME)

    def decode(self, ids: list[int]) -> str:
        return str(self._sp.decode(ids)) if ids else ""

    def piece(self, token_id: int) -> str:
        return str(self._sp.id_to_piece(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        if self._sp.is_byte(token_id):
            return bytes.fromhex(self.piece(token_id)[3:5])
        return self.piece(token_id).replace(_LITERAL_SPACE_MARK, " ").encode()

    def stream(self) -> StreamDecoder:
        return SentencePieceStream(self._sp)


def _ids(sp: spm.SentencePieceProcessor, text: str) -> np.ndarray:
    return np.asarray(sp.encode(text), np.int32)


def _processor(data: bytes, source: str) -> spm.SentencePieceProcessor:
    if not data:  # which sentencepiece takes for a model that is yet to come
        raise UserError(f"{source}: is empty, not a sentencepiece model")
    try:
        return spm.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError, ValueError):
        raise UserError(f"{source}: is not a sentencepiece model") from None

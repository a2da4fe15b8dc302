"""Text to token ids and back, exactly, for any text.

`Tokenizer.encode` never produces a control token from text: markers such as `<s>` or `<|user|>` in
a document or a chat message are encoded as ordinary characters. Control tokens enter a sequence by
id only (`bos_id`, `eos_id`, `control_ids`).

Two file formats are read: a sentencepiece `tokenizer.model` (ours, Llama-2's) and a Hugging Face
`tokenizer.json`. `train_tokenizer` writes the first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece as spm

from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file

# Role markers of the chat template; every turn ends with the end-of-sequence token.
CHAT_CONTROL_SYMBOLS = ("<|system|>", "<|user|>", "<|assistant|>")

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"

# sentencepiece writes a space as U+2581 inside its pieces and so reads a literal U+2581 back as a
# space. Its three UTF-8 bytes as byte pieces are taken literally by every decoder.
_LITERAL_SPACE_MARK = "\u2581"

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
_LINES_PER_SENTENCE = 8
_WORDS_KNOWN = 1 << 17  # words remembered, some 30 MB
_WHOLE_BELOW = 16  # characters: shorter texts are not worth cutting


class StreamDecoder(Protocol):
    """Decodes one sequence token by token; the parts joined equal `Tokenizer.decode` of all ids."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; "" while a character is incomplete."""

    def flush(self) -> str:
        """The text still held back, and a fresh start for the next sequence."""


class _Backend(Protocol):
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

    def __init__(self, backend: _Backend):
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
            from laneformer_jax.tokenizer_json import JsonBackend

            return cls(JsonBackend(data, file))
        return cls(_SentencePiece(data, str(file)))

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


class _SentencePiece:
    """A sentencepiece model behind the `_Backend` face."""

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
        self._mark_ids = mark
        if not all(self._sp.is_byte(i) for i in mark):
            raise UserError(
                f"{source}: was trained without byte fallback and cannot encode every text"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _SentencePiece, (self.data,)

    def encode(self, text: str, continues: bool) -> np.ndarray:
        if _LITERAL_SPACE_MARK not in text:
            return np.asarray(self._encode(text, continues), np.int32)
        first, *rest = text.split(_LITERAL_SPACE_MARK)
        ids = self._encode(first, continues) if first else []
        for part in rest:
            ids += self._mark_ids
            ids += self._encode(part, True)
        return np.asarray(ids, np.int32)

    def _encode(self, text: str, continues: bool) -> list[int]:
        """The ids of `text` without U+2581, word by word where the vocabulary allows that.

        Where no piece reaches over a boundary, what stands on either side is encoded by itself, and
        words come again and again: remembering them is several times as fast as encoding the text.
        """
        pattern = self._ascii_words if text.isascii() else self._words
        if pattern is None or len(text) < _WHOLE_BELOW:
            return list((self._inside if continues else self._sp).encode(text))
        ids: list[int] = []
        known, inside = self._known, self._inside
        words = pattern.findall(text)
        if not continues:
            ids += self._sp.encode(words[0])
            del words[0]
        for word in words:
            found = known.get(word)
            if found is None:
                found = tuple(inside.encode(word))
                if len(known) < _WORDS_KNOWN:
                    known[word] = found
            ids += found
        return ids

    @functools.cached_property
    def _known(self) -> dict[str, tuple[int, ...]]:
        return {}

    @functools.cached_property
    def _words(self) -> re.Pattern[str] | None:
        """Cuts any text before runs of spaces; None if a piece reaches over such a place."""
        whole = not any(re.search(r"[^ ] ", piece) for piece in self._pieces)
        return re.compile(r" *[^ ]+| +") if whole else None

    @functools.cached_property
    def _ascii_words(self) -> re.Pattern[str] | None:
        """Cuts ASCII text also between letters and what is none; else as `_words`."""
        over = re.compile(r"[A-Za-z][^A-Za-z ]|[^A-Za-z ][A-Za-z]")
        if self._words is None or any(p.isascii() and over.search(p) for p in self._pieces):
            return self._words
        return re.compile(r" *(?:[A-Za-z]+|[^A-Za-z ]+)| +")

    @functools.cached_property
    def _pieces(self) -> list[str]:
        """The learnt pieces, with spaces for their marks."""
        sp = self._sp
        return [
            sp.id_to_piece(i).replace(_LITERAL_SPACE_MARK, " ")
            for i in range(self.vocab_size)
            if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))
        ]

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
        return _SentencePieceStream(self._sp)


def _processor(data: bytes, source: str) -> spm.SentencePieceProcessor:
    if not data:  # which sentencepiece takes for a model that is yet to come
        raise UserError(f"{source}: is empty, not a sentencepiece model")
    try:
        return spm.SentencePieceProcessor(model_proto=data)
    except (RuntimeError, OSError, ValueError):
        raise UserError(f"{source}: is not a sentencepiece model") from None


class _SentencePieceStream:
    """Byte pieces are held back until they form a character or cannot any more.

    sentencepiece reads a run of byte pieces from the left: a valid character, or U+FFFD for one
    byte. So what a prefix of the run decodes to is settled once its first character is complete.
    """

    def __init__(self, sp: spm.SentencePieceProcessor):
        self._sp = sp
        self._bytes: list[int] = []  # ids of the undecided tail of a run of byte pieces
        self._begun = False

    def push(self, token_id: int) -> str:
        if self._sp.is_byte(token_id):
            self._bytes.append(token_id)
            return self._settled(final=False)
        if self._sp.is_control(token_id):
            # No text, but it ends a run of byte pieces.
            return self._settled(final=True)
        text = self._settled(final=True)
        if self._begun:
            # Decoded after a byte, so that a leading space is kept as inside a sequence.
            piece = self._sp.decode([self._space_guard, token_id])[1:]
        else:
            piece = self._sp.decode([token_id])
            self._begun = True
        return text + str(piece)

    def flush(self) -> str:
        text = self._settled(final=True)
        self._begun = False
        return text

    @functools.cached_property
    def _space_guard(self) -> int:
        return int(self._sp.piece_to_id("<0x41>"))

    def _settled(self, final: bool) -> str:
        out = []
        while self._bytes:
            size = _utf8_length(self._byte(self._bytes[0]))
            if len(self._bytes) < size and not final:
                break
            self._begun = True
            head = self._bytes[:size]
            try:
                out.append(bytes(map(self._byte, head)).decode("utf-8"))
            except UnicodeDecodeError:
                out.append("\ufffd")
                size = 1
            del self._bytes[:size]
        return "".join(out)

    def _byte(self, token_id: int) -> int:
        return int(self._sp.id_to_piece(token_id)[3:5], 16)


def _utf8_length(lead: int) -> int:
    """How many bytes a UTF-8 character has that starts with `lead`; 1 for what starts none."""
    if lead >= 0xF0:
        return 4 if lead <= 0xF4 else 1
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC2 else 1


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

"""Decoding a sequence of sentencepiece ids while it grows."""

from __future__ import annotations

import functools

import sentencepiece as spm


class SentencePieceStream:
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

"""Bytes between files and memory that is used over and over.

A conversion goes through far more bytes than it holds at a time. Memory fresh from the system costs more than
the copying into it: each page is cleared, and on a virtual machine perhaps fetched from its host first.
"""

import os
from collections.abc import Iterator
from io import FileIO
from typing import Any

import numpy as np

# Bytes at a time, as `cp` takes them: they stay in the processor's cache, and the system's cache of a file
# grows by small pieces of memory. Large ones often come from a virtual machine's host, four times slower.
PIECE = 1 << 18
_ALIGNED = 64  # bytes, for vector instructions


class Scratch:
    """Room for the arrays of one group; `clear` gives it to the next.

    nbytes: the room. Arrays beyond it get memory of their own.
    """

    def __init__(self, nbytes: int):
        self._block = np.empty(nbytes, np.uint8)
        self._used = 0

    def clear(self) -> None:
        """Use the room again; the arrays handed out before lose their values."""
        self._used = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array of undefined values."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        begin = self._used
        if begin + nbytes > len(self._block):
            return np.empty(shape, dtype)
        self._used = begin + -(-nbytes // _ALIGNED) * _ALIGNED
        return self._block[begin : begin + nbytes].view(dtype).reshape(shape)


def read_into(file: FileIO, offset: int, value: np.ndarray) -> None:
    """Fill a contiguous array with the bytes at `offset`. Raises OSError, also where the file ends early."""
    rest = memoryview(value.reshape(-1).view(np.uint8).data)
    while rest:  # one call reads 2 GiB at most
        count = os.preadv(file.fileno(), [rest], offset)
        if count == 0:
            raise OSError(f"the file ends {len(rest)} bytes early")
        rest, offset = rest[count:], offset + count


def pieces(value: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array, `PIECE` at a time."""
    data = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return (data[begin : begin + PIECE] for begin in range(0, len(data), PIECE))


def write_piece(file: FileIO, piece: memoryview) -> None:
    """Write all of it. Raises OSError."""
    while piece:
        piece = piece[file.write(piece) :]

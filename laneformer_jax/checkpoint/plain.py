"""Arrays of a native checkpoint as plain files: their bytes in one piece, uncompressed.

That is the zarr layout of orbax's own files with one chunk per array, so orbax reads them as it reads any.
Writing and reading them here takes no more than one copy each. Other items, a training run's, are for orbax.
"""

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from laneformer_jax.checkpoint.manifest import Measured
from laneformer_jax.checkpoint.memory import PIECE, Scratch, pieces, read_into, write_piece
from laneformer_jax.checkpoint.tensorfile import DTYPES, TensorSpec
from laneformer_jax.errors import UserError

_HEADER = ".zarray"
_BY_NAME = {"bfloat16": DTYPES["BF16"], "<f4": DTYPES["F32"], "<f2": DTYPES["F16"]}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
_WRITERS = 4  # threads; half of them wait for the disk


class PlainFiles(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, except that it writes plain files.

    Orbax's own copies each array before it writes it, in case it changes meanwhile, and its files have to be
    read again for their checksums.

    Attributes:
        written: size and checksum of each file, by its path in the item.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, Measured] = {}

    async def serialize(
        self, values: Sequence[np.ndarray], infos: Any, args: Any = None
    ) -> list[Any]:
        """Write the arrays."""
        del args
        folders = []
        for info in infos:
            await info.await_path_creation()
            folders.append(Path(info.parent_dir) / info.name)
        with ThreadPoolExecutor(_WRITERS) as pool:
            for folder, written in zip(folders, pool.map(_write, folders, values), strict=True):
                self.written |= {f"{folder.name}/{file}": found for file, found in written.items()}
        return []


def _write(folder: Path, value: np.ndarray) -> dict[str, Measured]:
    folder.mkdir()
    header = {
        "chunks": value.shape,
        "compressor": None,
        "dimension_separator": ".",
        "dtype": _NAMES[value.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": value.shape,
        "zarr_format": 2,
    }
    text = np.frombuffer(json.dumps(header, separators=(",", ":")).encode(), np.uint8)
    contents = {_HEADER: text, _chunk(value.shape): value}
    return {name: _write_file(folder / name, content) for name, content in contents.items()}


def _write_file(path: Path, value: np.ndarray) -> Measured:
    crc = 0
    with FileIO(path, "x") as file:
        for piece in pieces(value):
            crc = zlib.crc32(piece, crc)
            write_piece(file, piece)
        if value.nbytes > PIECE:  # the disk starts early; small files are synced with the folder
            os.fdatasync(file.fileno())
    return Measured(value.nbytes, crc)


def _chunk(shape: Sequence[int]) -> str:
    """The file of the only chunk of an array."""
    return ".".join("0" * len(shape)) or "0"


class PlainArray(NamedTuple):
    """An array's file, shape and dtype."""

    file: Path
    spec: TensorSpec

    def read(self, memory: Scratch | None = None) -> np.ndarray:
        """The array, in `memory` or its own. Raises UserError when it cannot be read."""
        value = np.empty(*self.spec) if memory is None else memory.array(*self.spec)
        try:
            with FileIO(self.file) as file:
                read_into(file, 0, value)
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read ({error.strerror or error})") from None
        return value


def plain_arrays(item: Path, paths: Iterable[str]) -> dict[str, PlainArray] | None:
    """The arrays `paths` of an orbax item; None unless all of them are plain files."""
    found = {}
    for path in paths:
        array = _plain(item / path)
        if array is None:
            return None
        found[path] = array
    return found


def _plain(folder: Path) -> PlainArray | None:
    try:
        header: dict[str, Any] = json.loads((folder / _HEADER).read_text())
    except OSError:  # another of orbax's formats
        return None
    shape, dtype = tuple(header["shape"]), _BY_NAME.get(header["dtype"])
    whole = header["zarr_format"] == 2 and header["chunks"] == header["shape"]
    as_is = header["compressor"] is None and not header["filters"] and header["order"] == "C"
    if dtype is None or not (whole and as_is):
        return None
    return PlainArray(folder / _chunk(shape), TensorSpec(shape, dtype))

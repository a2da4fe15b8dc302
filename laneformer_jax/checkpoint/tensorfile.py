"""Folders of safetensors files, one tensor in memory at a time, both ways.

The checks of a file are left to the safetensors library. Its tensors are then read from where its header puts
them, into memory of the caller's choice. Writing is ours, because the library wants all tensors of a file at
once: the header is laid down first, in the library's own order, and each tensor then goes to its place.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from laneformer_jax.checkpoint.memory import Scratch, pieces, read_into, write_piece
from laneformer_jax.errors import UserError
from laneformer_jax.files import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Safetensors' name of a dtype -> NumPy's, in the order in which the library lays tensors out.
DTYPES = {"F32": np.dtype("f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2")}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_SCANNED = 1 << 17  # elements at a time
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class TensorFolder:
    """The tensors of a folder: `model.safetensors`, or shards with an index.

    Attributes:
        folder: where they are.
        specs: shape and dtype by tensor name.
        files: the file by tensor name.
        index: the index file's bytes; None without one.

    Raises:
        UserError: no weights, a missing shard, an index that is not one or leads out of the folder, or a file
            that is not a whole safetensors file. Pickled weights are refused and never opened.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: bytes | None = None
        self.specs: dict[str, TensorSpec] = {}
        self.files: dict[str, Path] = {}
        self._offsets: dict[str, int] = {}
        weight_map: dict[str, Path] | None = None
        if (folder / INDEX).exists():
            try:
                self.index = (folder / INDEX).read_bytes()
            except OSError as error:
                raise UserError(f"{folder / INDEX}: cannot be read ({error.strerror})") from None
            weight_map = self._weight_map(self.index)
            paths = sorted(set(weight_map.values()))
        else:
            paths = [self._single()]
        for path in paths:
            self._open(path)
        for name, path in (weight_map or {}).items():
            if self.files.get(name) != path:
                raise UserError(f"{path}: lacks tensor {name}, which {INDEX} puts in it")

    def read(self, name: str, memory: Scratch | None = None) -> np.ndarray:
        """One tensor, in `memory` or its own. Raises UserError when its bytes cannot be read."""
        spec = self.specs[name]
        value = np.empty(*spec) if memory is None else memory.array(*spec)
        try:
            with FileIO(self.files[name]) as file:
                read_into(file, self._offsets[name], value)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"{self.files[name]}: tensor {name} cannot be read ({reason})"
            ) from None
        return value

    def _single(self) -> Path:
        path = self.folder / SINGLE
        if not path.exists():
            pickled = sorted(p.name for p in self.folder.iterdir() if p.suffix in PICKLES)
            hint = (
                f"; {pickled[0]} is a pickle, which is never loaded: convert it to safetensors"
                if pickled
                else ""
            )
            raise UserError(f"{self.folder}: holds no {SINGLE} or {INDEX}{hint}")
        return path

    def _weight_map(self, index: bytes) -> dict[str, Path]:
        where = self.folder / INDEX
        try:
            named: dict[str, str] = dict(parse_json(index, INDEX)["weight_map"])
        except (ValueError, KeyError, TypeError):
            named = {}
        if not named or not all(isinstance(file, str) for file in named.values()):
            raise UserError(f"{where}: not a JSON index with a `weight_map` of tensors to files")
        for name, file in named.items():
            if Path(file).name != file or file in ("", ".", ".."):
                raise UserError(f"{where}: tensor {name} is put in {file!r}, outside this folder")
            if Path(file).suffix != ".safetensors":
                raise UserError(
                    f"{where}: tensor {name} is put in {file!r}; only .safetensors files are loaded"
                )
            if not (self.folder / file).exists():
                raise UserError(
                    f"{self.folder / file}: shard is missing; {INDEX} puts tensor {name} in it"
                )
        return {name: self.folder / file for name, file in named.items()}

    def _open(self, path: Path) -> None:
        try:
            # pread, not mmap: mapped pages would count as this process's memory.
            checked = safe_open(path, framework="np", backend="pread")
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
        except (SafetensorError, OSError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise UserError(f"{path}: not a whole safetensors file ({reason})") from None
        for name in checked.offset_keys():
            if name in self.files:
                raise UserError(f"{path}: tensor {name} is also in {self.files[name].name}")
            entry = header[name]
            code = entry["dtype"]
            if code not in DTYPES:
                raise UserError(f"{path}: tensor {name} is {code}; must be one of {_listed()}")
            self.files[name] = path
            self.specs[name] = TensorSpec(tuple(entry["shape"]), DTYPES[code])
            self._offsets[name] = 8 + length + entry["data_offsets"][0]


class TensorWriter:
    """Writes a known set of tensors to a folder, each in any order, as shards with an index or one file.

    Args:
        folder: an existing folder.
        specs: what will be written, in the order in which shards fill up.
        shard_bytes: most tensor bytes in a file.
        weight_map: file by tensor; overrides `shard_bytes`.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        shard_bytes: int = SHARD_BYTES,
        weight_map: Mapping[str, str] | None = None,
    ):
        self._specs = dict(specs)
        self._weight_map = dict(weight_map or shard(specs, shard_bytes))
        self._places: dict[str, tuple[FileIO, int]] = {}
        self._folder = folder
        self._pending = set(specs)
        self._files: list[FileIO] = []
        # The disk starts early: a file that is synced as it grows has little left to sync at its end.
        self._disk = ThreadPoolExecutor(1)
        self._syncing: Future[None] | None = None
        for file in sorted(set(self._weight_map.values())):
            self._begin(file, [n for n in specs if self._weight_map[n] == file])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._disk.shutdown()
        for file in self._files:
            file.close()
        if kind is None:
            if self._syncing is not None:
                self._syncing.result()
            assert not self._pending, f"never written: {sorted(self._pending)}"
            if set(self._weight_map.values()) != {SINGLE}:
                total = sum(spec.nbytes for spec in self._specs.values())
                index = {"metadata": {"total_size": total}, "weight_map": self._weight_map}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (self._folder / INDEX).write_text(text, encoding="utf-8")

    def write(self, name: str, value: np.ndarray) -> None:
        """Put one tensor in its place; shape and dtype are as announced."""
        assert TensorSpec(value.shape, value.dtype) == self._specs[name], name
        file, offset = self._places[name]
        file.seek(offset)
        for piece in pieces(value):
            write_piece(file, piece)
        self._pending.remove(name)
        if self._syncing is None or self._syncing.done():
            if self._syncing is not None:
                self._syncing.result()
            self._syncing = self._disk.submit(os.fdatasync, file.fileno())

    def _begin(self, file: str, names: Iterable[str]) -> None:
        order = list(DTYPES.values())
        names = sorted(names, key=lambda n: (order.index(self._specs[n].dtype), n))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec = self._specs[name]
            begin, end = end, end + spec.nbytes
            header[name] = {
                "dtype": _CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        # Unbuffered: a tensor goes from its array to the file without a copy.
        handle = FileIO(self._folder / file, "x")
        self._files.append(handle)
        handle.write(struct.pack("<Q", len(text)) + text)
        os.truncate(handle.fileno(), 8 + len(text) + end)
        for name in names:
            begin = header[name]["data_offsets"][0]
            self._places[name] = handle, 8 + len(text) + begin


def shard(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, str]:
    """File by tensor: filled in order, a new one whenever the next tensor would exceed `shard_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    if len(shards) == 1:
        return dict.fromkeys(specs, SINGLE)
    return {
        name: f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        for i, names in enumerate(shards, 1)
        for name in names
    }


def count_nonfinite(value: np.ndarray) -> int:
    """How many elements are NaN or infinite."""
    bits, exponent_full = {
        "bfloat16": (16, 0xFF << 7),
        "float16": (16, 0x1F << 10),
        "float32": (32, 0xFF << 23),
    }[value.dtype.name]
    sign = 1 << (bits - 1)
    flat = np.ascontiguousarray(value).reshape(-1)
    signed, unsigned = flat.view(f"i{bits // 8}"), flat.view(f"u{bits // 8}")
    count = 0
    for begin in range(0, flat.size, _SCANNED):
        part = slice(begin, begin + _SCANNED)
        # Without its sign a finite number lies below the full exponent. Positive numbers are the largest as
        # signed integers, negative ones as unsigned: two quick passes in the processor's cache.
        if signed[part].max() >= exponent_full or unsigned[part].max() >= sign | exponent_full:
            count += int(np.count_nonzero((unsigned[part] & (sign - 1)) >= exponent_full))
    return count


def _listed() -> str:
    return ", ".join(DTYPES)

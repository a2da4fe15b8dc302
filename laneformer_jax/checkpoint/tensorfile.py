"""Folders of safetensors files, one tensor in memory at a time, both ways.

Reading leaves the parsing and the checks of a file to the safetensors library. Writing is ours, because
the library wants all tensors of a file at once: the header is laid down first, in the library's own order,
and each tensor then goes to its place.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from laneformer_jax.errors import UserError
from laneformer_jax.files import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
# Safetensors' name of a dtype -> NumPy's, in the order in which the library lays tensors out.
DTYPES = {"F32": np.dtype("f4"), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("f2")}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
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
        self._handles: dict[Path, Any] = {}
        weight_map: dict[str, Path] | None = None
        if (folder / INDEX).exists():
            self.index = (folder / INDEX).read_bytes()
            weight_map = self._weight_map(self.index)
            paths = sorted(set(weight_map.values()))
        else:
            paths = [self._single()]
        for path in paths:
            self._open(path)
        for name, path in (weight_map or {}).items():
            if self.files.get(name) != path:
                raise UserError(f"{path}: lacks tensor {name}, which {INDEX} puts in it")

    def read(self, name: str) -> np.ndarray:
        """One tensor. Raises UserError when its bytes cannot be read."""
        path = self.files[name]
        try:
            value: np.ndarray = self._handles[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: tensor {name} cannot be read ({error})") from None
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
            handle = safe_open(path, framework="np", backend="pread")
        except (SafetensorError, OSError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise UserError(f"{path}: not a whole safetensors file ({reason})") from None
        self._handles[path] = handle
        for name in handle.offset_keys():
            if name in self.files:
                raise UserError(f"{path}: tensor {name} is also in {self.files[name].name}")
            part = handle.get_slice(name)
            code = part.get_dtype()
            if code not in DTYPES:
                raise UserError(f"{path}: tensor {name} is {code}; must be one of {_listed()}")
            self.files[name] = path
            self.specs[name] = TensorSpec(tuple(part.get_shape()), DTYPES[code])


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
        for file in self._files:
            file.close()
        if kind is None:
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
        rest = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.seek(offset)
        while rest:  # one call writes 2 GiB at most
            rest = rest[file.write(rest) :]
        self._pending.remove(name)

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
    bits = {2: np.uint16, 4: np.uint32}[value.dtype.itemsize]
    exponent_full = {
        "bfloat16": 0xFF << 8,
        "float16": 0x1F << 11,
        "float32": 0xFF << 24,
    }[value.dtype.name]
    # Without its sign a finite number lies below the full exponent; the maximum is one quick pass.
    unsigned = np.ascontiguousarray(value).view(bits) << 1
    if not value.size or int(unsigned.max()) < exponent_full:
        return 0
    return int(np.count_nonzero(unsigned >= exponent_full))


def _listed() -> str:
    return ", ".join(DTYPES)

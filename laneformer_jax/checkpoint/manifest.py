"""MANIFEST.json: the size and CRC-32 of every file of a native checkpoint, which prove it whole."""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from laneformer_jax.checkpoint.memory import PIECE
from laneformer_jax.files import parse_json

MANIFEST = "MANIFEST.json"
_ORBAX_STAMPS = ("_CHECKPOINT_METADATA", "commit_success.txt")  # touched at the commit itself


class Measured(NamedTuple):
    """A file's bytes and their CRC-32."""

    size: int
    crc32: int


def json_bytes(value: Any) -> bytes:
    """As every JSON file of a checkpoint is written."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def write_side_files(
    folder: Path, files: Mapping[str, bytes], written: Mapping[str, Measured] | None = None
) -> None:
    """The files beside the arrays, then the manifest of all.

    written: what is known of files already, by path; the others are read.
    """
    known = dict(written or {})
    for name, content in files.items():
        _write_synced(folder / name, content)
    names = sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and p.name not in _ORBAX_STAMPS
    )
    known |= measure(folder, [name for name in names if name not in known])
    _write_synced(folder / MANIFEST, json_bytes({"files": {n: known[n]._asdict() for n in names}}))


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def measure(folder: Path, names: list[str]) -> dict[str, Measured]:
    """Read files of a folder, by name."""
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda n: _measure(folder / n), names), strict=True))


def _measure(path: Path) -> Measured:
    size = crc = 0
    piece = memoryview(bytearray(PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc = zlib.crc32(piece[:count], crc)
            size += count
    return Measured(size, crc)


def problems(folder: str | Path) -> list[str]:
    """What keeps the checkpoint at `folder` from being complete; empty when it is whole."""
    folder = Path(folder)
    try:
        manifest = parse_json((folder / MANIFEST).read_bytes(), MANIFEST)["files"]
        expected = {
            name: Measured(entry["size"], entry["crc32"]) for name, entry in manifest.items()
        }
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    missing = [name for name in expected if not (folder / name).is_file()]
    found = [f"{name} is missing" for name in missing]
    for name, actual in measure(folder, [n for n in expected if n not in missing]).items():
        if actual.size != expected[name].size:
            found.append(f"{name} has {actual.size} bytes, should have {expected[name].size}")
        elif actual != expected[name]:
            found.append(f"{name} is corrupt (its checksum differs)")
    return found

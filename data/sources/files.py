"""Text files and source trees: every file is one document."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from data.config import SourceConfig
from data.sources import BadDocument, Record
from data.sources.names import hash_names
from laneformer_jax.errors import UserError

_SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv"})


class TextFiles:
    """Files below one or more roots, in the order of their paths.

    Args:
        roots: folders; a document's name is its path below its root.
        files: `(index of root, path below it)` of every document.
    """

    def __init__(self, roots: Sequence[str], files: Sequence[tuple[int, str]]):
        self._roots, self._files = list(roots), list(files)

    @classmethod
    def find(cls, name: str, config: SourceConfig) -> TextFiles:
        """List what `config` names. Raises UserError when a path matches nothing."""
        roots, files = [], []
        for given in config.paths:
            for root, names in expand(name, given, config.pattern):
                roots.append(root)
                files += [(len(roots) - 1, n) for n in names]
        return cls(roots, files)

    def __len__(self) -> int:
        return len(self._files)

    def where(self, index: int) -> str:
        root, name = self._files[index]
        return os.path.join(self._roots[root], name)

    def __getitem__(self, index: int) -> Record:
        path = self.where(index)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise BadDocument(path, "unreadable", f"cannot be read: {error.strerror}") from None
        return {"text": utf8(data, path)}

    def name_hashes(self) -> np.ndarray:
        return hash_names([name for _, name in self._files])

    def revision(self) -> dict[str, Any]:
        names = "\n".join(name for _, name in self._files)
        return {
            "roots": self._roots,
            "files": len(self._files),
            "names": hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest(),
        }

    def first_of_each(self, indices: np.ndarray) -> np.ndarray:
        """`indices` without files that repeat an earlier one; only those of one size are read."""
        sizes = np.asarray([os.stat(self.where(i)).st_size for i in indices], np.int64)
        unique, counts = np.unique(sizes, return_counts=True)
        alike = np.isin(sizes, unique[counts > 1])
        seen: set[bytes] = set()
        keep = np.ones(len(indices), bool)
        for place in np.flatnonzero(alike):
            try:
                digest = _digest(self.where(int(indices[place])), int(sizes[place]))
            except OSError:
                continue  # told when it is read
            keep[place] = digest not in seen
            seen.add(digest)
        return indices[keep]


def _digest(path: str, size: int) -> bytes:
    """16 bytes of a file's content. Without a file object, which costs more than a small file."""
    digest = hashlib.blake2b(digest_size=16)
    handle = os.open(path, os.O_RDONLY)
    try:
        while block := os.read(handle, min(size, 1 << 20) + 1):
            digest.update(block)
    finally:
        os.close(handle)
    return digest.digest()


def utf8(data: bytes, where: str) -> str:
    """`data` as text with its newlines as they are; raises BadDocument when it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(where, "undecodable", f"byte {error.start}: not UTF-8 text") from None


def file_revision(files: Sequence[str]) -> list[list[Any]]:
    """Path, size and time of change of every file."""
    return [[f, (stat := os.stat(f)).st_size, stat.st_mtime_ns] for f in files]


def expand(source: str, path: str, pattern: str = "*") -> list[tuple[str, list[str]]]:
    """The files that a file, folder or glob stands for, as `(root, sorted paths below it)`.

    Raises:
        UserError: there are none.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        names = sorted(n for n in walk(path) if fnmatch.fnmatch(os.path.basename(n), pattern))
        if not names:
            raise UserError(f"source {source!r}: no file in {path} matches {pattern!r}")
        return [(path, names)]
    matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    files = [m for m in matches if os.path.isfile(m)]
    if not files:
        raise UserError(f"source {source!r}: {path}: no such file, folder or match")
    root = os.path.dirname(path) if path == files[0] else _fixed_part(path)
    return [(root, [os.path.relpath(f, root or ".") for f in files])]


def walk(root: str, left_out: Collection[str] = ()) -> Iterator[str]:
    """Paths of the files below `root`, relative to it.

    Left out are folders called as in `left_out`, those of version control, and links to folders.
    """
    skipped = _SKIPPED_FOLDERS.union(left_out)
    folders = [""]
    while folders:
        below = folders.pop()
        with os.scandir(os.path.join(root, below)) as entries:
            for entry in entries:
                name = os.path.join(below, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in skipped:
                        folders.append(name)
                elif entry.is_file():
                    yield name


def _fixed_part(pattern: str) -> str:
    parts = pattern.split(os.sep)
    wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.sep.join(parts[:wild])

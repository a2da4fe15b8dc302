"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from laneformer_jax.errors import UserError

_SYNCS = 16


def read_json(path: str | os.PathLike[str]) -> Any:
    """Plain data of a JSON file. Raises UserError when it cannot be read or is not JSON."""
    try:
        return parse_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def parse_json(text: str | bytes, source: str) -> Any:
    """Plain data of JSON text, UTF-8 if bytes. Raises UserError naming `source`."""
    try:
        # Not bytes to json.loads, which guesses at other encodings.
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise UserError(f"{source}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise UserError(f"{source}: not valid JSON ({error})") from None


@contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary sibling of `path` for writing; on success it replaces `path` in one step.

    Missing parent folders are made. Text is UTF-8 with newlines as given. When the block raises,
    the temporary file is removed and an existing `path` stays as it was.

    Args:
        path: the file to write.
        mode: `"w"` for text, `"wb"` for bytes.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode must be 'w' or 'wb', not {mode!r}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        # "x" rather than mkstemp: the file gets the permissions of the user's umask.
        with open(temporary, mode.replace("w", "x"), **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


@contextmanager
def atomic_dir(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Give an empty temporary folder to fill; on success it is renamed to `path`.

    Missing parent folders are made. When the block raises, the temporary folder is removed and an
    existing `path` stays as it was.

    Args:
        path: the folder to make; may exist when it is empty.
        overwrite: replace a folder that is not empty. A crash between the two renames can leave
            the old folder under a name starting with `.`, never a mixture.

    Raises:
        UserError: `path` is a file, or a folder that is not empty and `overwrite` is false.
    """
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; a folder is to be written here")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target}: exists and is not empty; name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _replace_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)


def _sibling(target: Path) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"


def _replace_folder(source: Path, target: Path) -> None:
    if not (target.is_dir() and any(target.iterdir())):
        os.replace(source, target)
        return
    # rename(2) cannot replace a folder that is not empty: move the old one aside first.
    aside = _sibling(target)
    os.replace(target, aside)
    try:
        os.replace(source, target)
    except BaseException:
        os.replace(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    paths = [folder, *folder.rglob("*")]
    # At once: the file system commits those that wait together.
    with ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Folders that one process at a time works in: a run's, and the temporary ones of a conversion."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder for the block; the system drops it with the process.

    Raises:
        BlockingIOError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sweep(target: str | Path) -> None:
    """Remove the temporary folders (`files.atomic_dir`) of `target` whose process is gone."""
    target = Path(target)
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        try:
            with claim(leftover):
                shutil.rmtree(leftover)
        except OSError:
            continue  # claimed by a conversion that is still running

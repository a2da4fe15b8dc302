"""Temporary folders that outlive a killed conversion no longer than the next one."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a lock on a temporary folder for the block; the system drops it with the process."""
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

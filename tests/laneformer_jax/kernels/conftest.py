"""The kernels in the interpreter, with blocks small enough for small shapes."""

import pytest

from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.tuning import Keys, Programs, Rows, Tuning


@pytest.fixture(scope="session")
def interpreter() -> Backend:
    return Backend(interpret=True)


@pytest.fixture(scope="session")
def small() -> Tuning:
    """Several blocks of everything at the sizes of these tests, and fewer than four tiles a row only in
    some: both ways through a matrix row are taken."""
    return of_blocks(Rows(rows=8, columns=16))


@pytest.fixture(scope="session")
def quick() -> Tuning:
    """A whole row at once, which compiles in half the time."""
    return of_blocks(Rows(rows=16, columns=64))


def of_blocks(rows: Rows) -> Tuning:
    return Tuning(
        qkv=rows,
        attention=Keys(splits=4, keys=16),
        out=rows,
        gate_up=rows,
        down=rows,
        norm=rows,
        head=rows,
        layer=Programs(count=1),
    )

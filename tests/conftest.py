"""Shared set-up: JAX on the CPU with eight virtual devices, and the reference material."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# Before the first device is looked at. By config and not by environment: subprocesses that tests
# start choose their own number of devices.
jax.config.update("jax_num_cpu_devices", 8)
# Tests compile far more than they compute: a third of the compile time for slower code.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material beside the repository."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        reason = f"no reference material at {folder}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder

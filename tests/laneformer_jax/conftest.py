"""Set-up of the library's own tests."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compile():
    """Half the compile time, slower code: for tests that run a compiled function once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

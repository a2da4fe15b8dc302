"""The JAX that is installed is one that the package supports."""

import pytest

from laneformer_jax.compat import JAX_VERSION


@pytest.mark.smoke
def test_jax_is_in_range():
    assert (0, 10, 2) <= JAX_VERSION < (0, 13)

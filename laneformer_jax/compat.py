"""The one place that looks at JAX's version (supported: 0.10.2 up to, not including, 0.13)."""

from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])


def coordination_client() -> Any:
    """The client of the service that joins the processes of `jax.distributed`; JAX exports none."""
    from jax._src import distributed

    return distributed.global_state.client

"""The one place that looks at JAX's version (supported: 0.10.2 up to, not including, 0.13)."""

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])

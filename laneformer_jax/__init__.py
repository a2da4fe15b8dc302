"""Laneformer in JAX: eight residual lanes, delayed tensor parallelism.

Importing this package is cheap; jax and flax load when `Laneformer` is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laneformer_jax.config import LaneformerConfig
    from laneformer_jax.model import Laneformer

__version__ = "0.1.0"
__all__ = ["Laneformer", "LaneformerConfig", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Laneformer":
        from laneformer_jax.model import Laneformer

        return Laneformer
    if name == "LaneformerConfig":
        from laneformer_jax.config import LaneformerConfig

        return LaneformerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

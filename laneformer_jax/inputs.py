"""What a model is called with, checked before anything runs: XLA clamps ids and broadcasts shapes in silence.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.sharding import DATA, FSDP


class Inputs(NamedTuple):
    """Arrays [B,S] of one call."""

    input_ids: Any
    attention_mask: Any
    positions: Any
    segment_ids: Any


def checked(
    config: LaneformerConfig,
    mesh: Mesh | None,
    input_ids: Any,
    attention_mask: Any = None,
    positions: Any = None,
    segment_ids: Any = None,
) -> Inputs:
    """The arguments as arrays.

    Ids are compared with the vocabulary where their values are at hand: not under `jax.jit`.

    Raises:
        UserError: a shape, dtype or id that the model cannot take, or too many tokens.
    """
    ids = as_array("input_ids", input_ids)
    if ids.ndim != 2 or ids.size == 0:
        raise UserError(f"input_ids: shape {ids.shape} must be [batch, length], neither of them 0")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise UserError(f"input_ids: dtype {ids.dtype} must be an integer type")
    if ids.shape[1] > config.max_position_embeddings:
        raise UserError(
            f"input_ids: {ids.shape[1]} tokens exceed max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    if mesh is not None and ids.shape[0] % (mesh.shape[DATA] * mesh.shape[FSDP]):
        raise UserError(
            f"input_ids: batch {ids.shape[0]} must be divisible by the mesh's data axis "
            f"{mesh.shape[DATA]} × fsdp axis {mesh.shape[FSDP]}"
        )
    _check_range(ids, config.vocab_size)
    return Inputs(
        ids,
        _beside("attention_mask", attention_mask, ids.shape, bool_too=True),
        _beside("positions", positions, ids.shape),
        _beside("segment_ids", segment_ids, ids.shape),
    )


def as_array(name: str, value: Any) -> Any:
    """A JAX array as it is, anything else as a NumPy array of numbers. Raises UserError."""
    if isinstance(value, jax.Array):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        raise UserError(
            f"{name}: rows differ in length; pad them to one, [batch, length]"
        ) from None
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name}: {type(value).__name__} must be an integer array [batch, length]")
    return array


def _check_range(ids: Any, vocab: int) -> None:
    if isinstance(ids, jax.core.Tracer) or (
        isinstance(ids, jax.Array) and not ids.is_fully_addressable
    ):
        return
    values = np.asarray(ids)
    if values.min() < 0 or values.max() >= vocab:
        raise UserError(f"input_ids: ids {values.min()}…{values.max()} must lie in 0…{vocab - 1}")


def _beside(name: str, value: Any, shape: tuple[int, ...], bool_too: bool = False) -> Any:
    if value is None:
        return None
    array = as_array(name, value)
    if array.shape != shape:
        raise UserError(f"{name}: shape {array.shape} must be that of input_ids {shape}")
    if not (jnp.issubdtype(array.dtype, jnp.integer) or (bool_too and array.dtype == bool)):
        allowed = "bool or an integer type, 0 = padding" if bool_too else "an integer type"
        raise UserError(f"{name}: dtype {array.dtype} must be {allowed}")
    return array

"""RMSNorm and the two input matrices of the MLP: silu(w1 x) · w3 x.

Shapes: L lanes of this device, D hidden, F feed-forward neurons of a lane, R rows of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from laneformer_jax.kernels import plain
from laneformer_jax.kernels.backend import Backend, Ref, program
from laneformer_jax.kernels.rows import Normed, Vector, products
from laneformer_jax.kernels.tuning import Rows, block
from laneformer_jax.precision import rounded


class Weights(NamedTuple):
    """In the model's layout."""

    norm: jax.Array  # [D], or [L,D] with a scale per lane
    w1_LFD: jax.Array
    w3_LFD: jax.Array


def reference(x_LD: jax.Array, weights: Weights, eps: float) -> jax.Array:
    """[L,F]. The gate's silu is float32, rounded before the product, as in `blocks.MLP`."""
    h_LD = plain.normed(x_LD, weights.norm, eps)
    gate_LF = jax.nn.silu(plain.matmul(h_LD, weights.w1_LFD).astype(jnp.float32))
    return plain.times(rounded(gate_LF, x_LD.dtype), plain.matmul(h_LD, weights.w3_LFD))


def gate_up(b: Backend, x_LD: jax.Array, weights: Weights, eps: float, blocks: Rows) -> jax.Array:
    """As `reference`, in one launch."""
    lanes, _ = x_LD.shape
    neurons = weights.w1_LFD.shape[1]
    rows = block(neurons, blocks.rows)

    def kernel(x_ref: Ref, norm_ref: Ref, w1_ref: Ref, w3_ref: Ref, out_ref: Ref) -> None:
        lane = program(1)
        source = Normed(Vector(x_ref, lane), norm_ref, eps)
        refs = Refs(w1_ref, w3_ref, out_ref)
        tile(b, refs, source, lane, program(0) * rows, rows, blocks.columns)

    [out_LF] = b.launch(
        kernel,
        "norm_gate_up",
        (neurons // rows, lanes),
        [x_LD, *weights],
        [jax.ShapeDtypeStruct((lanes, neurons), x_LD.dtype)],
        blocks.launch,
    )
    return out_LF


class Refs(NamedTuple):
    """What `tile` reads and writes."""

    w1: Ref
    w3: Ref
    out: Ref


def tile(
    b: Backend, refs: Refs, source: Normed, lane: Any, row: Any, rows: int, columns: int
) -> None:
    """Neurons `row` … of one lane."""
    dtype = source.vector.ref.dtype
    index = (lane, row + jnp.arange(rows))
    weights = [(refs.w1, index), (refs.w3, index)]
    gate_R, up_R = products(b, weights, source, refs.w1.shape[2], columns)
    gate_R = b.rounded(gate_R, dtype)
    gate_R = b.rounded(gate_R / (1.0 + jnp.exp(-gate_R)), dtype)
    b.store(refs.out, *index, value=gate_R * b.rounded(up_R, dtype))

"""A model's weights as the decode loop reads them: laid out once, when it is loaded.

Lane matrices stay [L, O, I], an array of their own in every layer: from a stacked array XLA would copy a
layer's part before it multiplies, and this is the order in which its matrix-vector products on a CPU are
fastest. They are the model's own arrays, not copies. The head becomes rows of the vocabulary, a part
for each lane device.

Shapes: L lanes of this device, B batch, S tokens, O and I a linear's output and input, D hidden,
V vocabulary, v this device's part of it, X what a row of the head multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from decode.shards import Shards
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.exchange import Lanes
from laneformer_jax.model import Laneformer
from laneformer_jax.sharding import LANE, named, parameter_spec

Precision = Literal["native", "int8"]
PARTS = 8  # of a head's rows
PIECE_BYTES = 2 * 2**20  # of int8 weights made wide at a time: what a core's cache holds
MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")  # of a layer


class Head(NamedTuple):
    """The head's rows; with int8 the scale of each."""

    rows: jax.Array  # [V,X], or with a vocab_parallel head [lanes, V/lanes, D]
    scale: jax.Array | None = None  # float32, rows' shape without the last


class Arrays(NamedTuple):
    """What goes to the device with every call."""

    trunk: tuple[jax.Array, ...]
    head: Head


@dataclass(frozen=True, eq=False)
class Layout:
    """How to make a model of `Arrays` again; what a program is compiled for.

    Equal ones are the same object (`_layout`): JAX compares them at every call, and graphs take their time.
    """

    config: LaneformerConfig
    mesh: Mesh | None
    graph: Any  # of nnx, without a head
    tree: Any
    specs: Arrays
    vocab: int  # ids that may be drawn: the first so many
    device: Any = None  # of the weights, without a mesh

    @property
    def first_device(self) -> Any:
        return self.device if self.mesh is None else self.mesh.devices.flat[0]

    @property
    def axis(self) -> str | None:
        return None if self.mesh is None else LANE

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.config.num_lanes, self.axis)

    @property
    def shards(self) -> Shards:
        return Shards(self.config.vocab_size, self.axis)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary on all devices, those beyond its end included."""
        parts = 1 if self.mesh is None else self.mesh.shape[LANE]
        return -(-self.config.vocab_size // parts) * parts

    def model(self, arrays: Arrays) -> Laneformer:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays.trunk))


def lay_out(
    model: Laneformer, precision: Precision = "native", vocab: int | None = None
) -> tuple[Layout, Arrays]:
    """The layout of a model, and its arrays on their devices. vocab: ids that may be drawn; None: all."""
    config, mesh = model.config, model.mesh
    vocab = config.vocab_size if vocab is None else vocab
    trunk = nnx.merge(*nnx.split(model))  # the same arrays in modules of its own
    trunk.lm_head = None
    head = _head(model)
    if precision == "int8":
        for layer in trunk.layers:
            for module in (layer.attention, layer.feed_forward):
                for name in MATRICES:
                    if hasattr(module, name):
                        setattr(module, name, Int8Linear(getattr(module, name).weight[...]))
        head = Head(*quantised(head.rows))
    graph, state = nnx.split(trunk)
    trunk_specs: Any = tuple(_spec(path, config) for path, _ in nnx.to_flat_state(state))
    leaves, tree = jax.tree.flatten(state)
    specs = Arrays(trunk_specs, jax.tree.map(lambda _: P(LANE), head))
    if mesh is None:
        (device,) = model.tok_embeddings.weight[...].devices()
        layout = _layout(config, mesh, graph, tree, specs, vocab, device)
        return layout, jax.device_put(Arrays(tuple(leaves), head), device)
    layout = _layout(config, mesh, graph, tree, specs, vocab)
    if config.lm_head_type != "vocab_parallel":  # whose lanes have equal parts as they are
        beyond = layout.rows - config.vocab_size
        head = jax.tree.map(lambda a: jnp.pad(a, [(0, beyond)] + [(0, 0)] * (a.ndim - 1)), head)
    shardings = jax.tree.map(lambda spec: named(mesh, spec), specs)
    return layout, jax.device_put(Arrays(tuple(leaves), head), shardings)


_layout = lru_cache(maxsize=64)(Layout)


def _head(model: Laneformer) -> Head:
    config = model.config
    if config.tie_word_embeddings:
        return Head(model.tok_embeddings.weight[...])
    if config.lm_head_type == "lane":
        return Head(model.lm_head.linear.weight[...])
    return Head(model.lm_head.weight[...])


def _spec(path: tuple[Any, ...], config: LaneformerConfig) -> P:
    if path[-1] == "scale" and str(path[-2]).startswith("w"):
        return P(LANE)  # of an Int8Linear
    return parameter_spec(".".join(map(str, path)), config)


def local_logits(layout: Layout, model: Laneformer, head: Head, x_LBSD: jax.Array) -> jax.Array:
    """Final norm, lane aggregation and this device's rows of the head: [L,B,S,D] -> float32 [B,S,v].

    -inf for ids that may not be drawn, those beyond the vocabulary on the last device too.
    """
    config, lanes, shards = layout.config, layout.lanes, layout.shards
    x, (rows, scale) = model.final(x_LBSD, lanes), head
    if config.lm_head_type == "lane":  # a row multiplies the streams of all lanes, lane by lane
        x = lanes.concatenate(jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1))
    if config.lm_head_type != "vocab_parallel":
        # As if lanes had parts of it: a plain product would have XLA transpose all rows in every burst.
        parts = math.gcd(len(rows), PARTS)
        x = jnp.broadcast_to(x, (parts, *x.shape))
        rows = rows.reshape(parts, -1, rows.shape[-1])
        scale = None if scale is None else scale.reshape(parts, -1)
    if scale is None:
        logits_LBSv = jnp.einsum("lbsx,lvx->lbsv", x, rows)
    else:
        logits_LBSv = int8_product(x, rows).astype(jnp.float32) * scale[:, None, None]
    logits_BSv = jnp.moveaxis(logits_LBSv, 0, 2).reshape(*x.shape[1:3], -1)
    logits_BSv = lanes.enter(logits_BSv.astype(jnp.float32))
    if layout.rows == layout.vocab:
        return logits_BSv
    return jnp.where(shards.ids() < layout.vocab, logits_BSv, -jnp.inf)


# int8 ------------------------------------------------------------------------------------------


def quantised(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [..., O, I] and float32 scales [..., O] whose product is the weight, each row to its largest."""
    exact = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(exact), axis=-1) / 127
    steps = jnp.round(exact / jnp.where(scale > 0, scale, 1)[..., None])
    return steps.astype(jnp.int8), scale


def dequantised(model: Laneformer) -> Laneformer:
    """A model with the weights that int8 stands for, in the model's dtype: int8 is checked against it."""
    exact = nnx.merge(*nnx.split(model))
    heads = [exact.lm_head] if exact.lm_head is not None else []
    for module in [m for layer in exact.layers for m in (layer.attention, layer.feed_forward)]:
        heads += [getattr(module, name) for name in MATRICES if hasattr(module, name)]
    for module in heads:
        weight = module.linear.weight if hasattr(module, "linear") else module.weight
        steps, scale = quantised(weight[...])
        weight[...] = (steps * scale[..., None]).astype(weight.dtype)
    return exact


class Int8Linear(nnx.Module):
    """A LaneLinear of int8 weights [L,O,I] and float32 scales [L,O]."""

    def __init__(self, weight_LOI: jax.Array):
        weight, scale = quantised(weight_LOI)
        self.weight, self.scale = nnx.Param(weight), nnx.Param(scale)

    def __call__(self, x_LBSI: jax.Array) -> jax.Array:
        """[L,B,S,I] -> [L,B,S,O]."""
        out_LBSO = int8_product(x_LBSI, self.weight[...])
        scale_L11O = self.scale[...][:, None, None]
        return (out_LBSO.astype(jnp.float32) * scale_L11O).astype(x_LBSI.dtype)


def int8_product(x_LBSI: jax.Array, weight_LOI: jax.Array) -> jax.Array:
    """[L,B,S,I] × int8 [L,O,I] -> [L,B,S,O], with the weight in x's dtype only a few rows at a time.

    XLA would rather widen all weights once, before the token loop, and keep them: the memory that int8
    is to save. So where a piece begins depends on x, by a number that is 0 unless x is none.
    """
    lanes, out, in_ = weight_LOI.shape
    size = max(1, min(-(-out // 2), PIECE_BYTES // (lanes * in_ * x_LBSI.dtype.itemsize)))
    first = x_LBSI[0, 0, 0, 0]
    nothing = (first != first).astype(jnp.int32)
    parts = []
    for start in range(0, out, size):
        shape = (lanes, min(size, out - start), in_)
        piece_LOI = jax.lax.dynamic_slice(weight_LOI, (0, start + nothing, 0), shape)
        parts.append(jnp.einsum("lbsi,loi->lbso", x_LBSI, piece_LOI.astype(x_LBSI.dtype)))
    return jnp.concatenate(parts, axis=-1)

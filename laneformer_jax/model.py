"""The model: embedding, lanes, head; the same code for training, prefill and one-token decode.

Shapes: L lanes of this device, B batch, S sequence, T keys, D hidden, V vocabulary, N layers.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from laneformer_jax import rope
from laneformer_jax.attention import visibility
from laneformer_jax.blocks import Context, DecoderLayer, make_norm
from laneformer_jax.cache import KVCache
from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig
from laneformer_jax.exchange import LaneExchange, Lanes
from laneformer_jax.heads import make_head
from laneformer_jax.inputs import checked
from laneformer_jax.norms import RMSNorm
from laneformer_jax.precision import rounded
from laneformer_jax.sharding import DATA, LANE, check_mesh, parameter_spec


class Embedding(nnx.Module):
    """`weight` [V, D]. The row of a padding token starts at zero and gets no gradient."""

    def __init__(self, config: LaneformerConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.hidden_size)
        weight = config.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32)
        if config.pad_token_id is not None:
            weight = weight.at[config.pad_token_id].set(0)
        self.weight = nnx.Param(weight.astype(dtype))
        self.pad_token_id = config.pad_token_id

    def __call__(self, ids_BS: jax.Array) -> jax.Array:
        """[B,S] -> [B,S,D]."""
        x_BSD = jnp.take(self.weight[...], ids_BS, axis=0)
        if self.pad_token_id is None:
            return x_BSD
        is_pad_BS1 = (ids_BS == self.pad_token_id)[..., None]
        return jnp.where(is_pad_BS1, jax.lax.stop_gradient(x_BSD), x_BSD)


class Output(NamedTuple):
    """What one pass over the layers leaves behind."""

    x_LBSD: jax.Array  # residual streams after the last layer
    cache: KVCache | None
    hidden_NBSLD: jax.Array | None  # streams after every layer


class Laneformer(nnx.Module):
    """Laneformer (Kog AI, 2026): `num_lanes` residual streams that hear each other δ layers late.

    Parameter paths follow the Hugging Face names. Arithmetic runs in the dtype of the parameters, with
    norms, softmax, RoPE and sums across lanes in float32. With a `mesh` (axes data × lane) parameters and
    calls are spread over its devices; without one everything runs on one device.
    """

    def __init__(
        self,
        config: LaneformerConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        mesh: Mesh | None = None,
    ):
        if mesh is not None:
            check_mesh(mesh, config)
        dtype = jnp.dtype(dtype)
        self.config = config
        self.mesh = mesh
        self.tok_embeddings = Embedding(config, dtype, rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, dtype, rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = (
            RMSNorm(config.hidden_size, config.norm_eps, dtype)
            if config.pre_norm_lane_agg
            else make_norm(config, dtype)
        )
        self.lm_head: Any = make_head(config, dtype, rngs)  # the kinds take different arguments

    # Inside a device ------------------------------------------------------------------------

    def trunk(
        self,
        input_ids_BS: jax.Array,
        lanes: Lanes,
        *,
        attention_mask_BS: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
        segment_ids_BS: jax.Array | None = None,
        cache: KVCache | None = None,
        remat: bool = False,
        return_hidden: bool = False,
    ) -> Output:
        """Embedding and all layers on this device's lanes; inside a shard_map when `lanes.axis` is set.

        attention_mask: False or 0 marks padding. positions default to the slot numbers. segment_ids:
        tokens see only their own document's. remat: recompute modules in the backward pass (sums
        across lanes are not).
        """
        cfg = self.config
        batch, seq = input_ids_BS.shape
        start = jnp.zeros((), jnp.int32) if cache is None else cache.length
        query_index_S = start + jnp.arange(seq, dtype=jnp.int32)
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(query_index_S, (batch, seq))

        key_valid_BT = None if attention_mask_BS is None else attention_mask_BS.astype(bool)
        key_index_T = query_index_S
        if cache is not None:
            fresh_BS = jnp.ones((batch, seq), bool) if key_valid_BT is None else key_valid_BT
            key_valid_BT = jax.lax.dynamic_update_slice(cache.valid_BT, fresh_BS, (0, start))
            key_index_T = jnp.arange(key_valid_BT.shape[1], dtype=jnp.int32)
        masks = {
            window: visibility(
                query_index_S,
                key_index_T,
                window,
                key_valid_BT,
                query_segment_BS=segment_ids_BS,
                key_segment_BT=segment_ids_BS,
            )
            for window in {cfg.window(i) for i in range(cfg.num_hidden_layers)}
        }
        cos_BSh, sin_BSh = rope.angles(positions_BS, cfg)

        x_BSD = lanes.enter(self.tok_embeddings(input_ids_BS))
        local_lanes = self.layers[0].attention.wq.weight.shape[0]
        x_LBSD = jnp.broadcast_to(x_BSD, (local_lanes, *x_BSD.shape))
        exchange = LaneExchange(cfg, lanes)
        keys, values, hidden = [], [], []
        run_attention, run_mlp = _attention_module, _mlp_module
        if remat:
            # Modules only: a recomputed module needs no sum across lanes.
            run_attention, run_mlp = nnx.remat(run_attention), nnx.remat(run_mlp)
        for i, layer in enumerate(self.layers):
            context = Context(cos_BSh, sin_BSh, masks[cfg.window(i)])
            past = None if cache is None else (cache.keys[i], cache.values[i], start)
            y_LBSD, updated = run_attention(layer, x_LBSD, context, past)
            x_LBSD = exchange.add(i, ATTENTION, x_LBSD, y_LBSD)
            x_LBSD = exchange.add(i, MLP, x_LBSD, run_mlp(layer, x_LBSD))
            if updated is not None:
                keys.append(updated[0])
                values.append(updated[1])
            if return_hidden:
                hidden.append(jnp.moveaxis(x_LBSD, 0, 2))
        if cache is not None:
            assert key_valid_BT is not None
            cache = KVCache(tuple(keys), tuple(values), key_valid_BT, start + seq)
        return Output(x_LBSD, cache, jnp.stack(hidden) if return_hidden else None)

    def logits(self, x_LBSD: jax.Array, lanes: Lanes) -> jax.Array:
        """Final norm, lane aggregation and head: [L,B,S,D] -> [B,S,V].

        With a vocab_parallel head inside a shard_map V is this device's part of the vocabulary.
        """
        cfg = self.config
        if cfg.pre_norm_lane_agg:
            x_BSD = self.norm(rounded(lanes.total(x_LBSD), x_LBSD.dtype))
        else:
            x_LBSD = self.norm(x_LBSD)
            if cfg.lm_head_type != "replicate":
                return self.lm_head(x_LBSD, lanes)
            x_BSD = rounded(lanes.total(x_LBSD) / cfg.num_lanes, x_LBSD.dtype)
        if cfg.tie_word_embeddings:
            return jnp.einsum("bsd,vd->bsv", x_BSD, self.tok_embeddings.weight[...])
        return self.lm_head(x_BSD)

    # Across devices -------------------------------------------------------------------------

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        return_hidden: bool = False,
    ) -> Any:
        """Logits [B,S,V] in the parameters' dtype; with return_hidden also the streams [N,B,S,L,D].

        input_ids, positions, segment_ids: int [B,S]; attention_mask: bool or int [B,S], 0 = padding.
        With a mesh, B must be divisible by its data axis.

        Raises:
            UserError: a shape or dtype other than these, ids outside the vocabulary (not seen under
                `jax.jit`), more tokens than `max_position_embeddings`.
        """
        inputs = checked(self.config, self.mesh, input_ids, attention_mask, positions, segment_ids)
        graphdef, params = nnx.split(self)
        return _call(graphdef, params, inputs, self.mesh, return_hidden)

    def local_lanes(self) -> Lanes:
        """The Lanes of a call outside any shard_map: all on one device."""
        return Lanes(self.config.num_lanes)

    # Files ----------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | Path, dtype: Any = None, mesh: Mesh | None = None
    ) -> "Laneformer":
        """Load a Hugging Face folder (or Hub repository) of safetensors.

        dtype: of the parameters; None keeps the file's. Raises UserError naming every missing, extra or
        mis-shaped tensor.
        """
        from laneformer_jax.checkpoint import hf

        return hf.load(path_or_repo, dtype=dtype, mesh=mesh)

    def save_pretrained(self, path: str | Path) -> None:
        """Write config.json and safetensors under the Hugging Face names; complete or not at all."""
        from laneformer_jax.checkpoint import hf

        hf.save(self, path)


def _attention_module(
    layer: DecoderLayer, x_LBSD: jax.Array, context: Context, past: Any
) -> tuple[jax.Array, Any]:
    return layer.attention(layer.attention_norm(x_LBSD), context, past)


def _mlp_module(layer: DecoderLayer, x_LBSD: jax.Array) -> jax.Array:
    return layer.feed_forward(layer.ffn_norm(x_LBSD))


def parameter_paths(params: nnx.State) -> dict[str, nnx.Param]:
    """Dotted path -> variable, as in `layers.0.attention.wq.weight`; in a stable order."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}


def parameter_specs(params: nnx.State, config: LaneformerConfig) -> nnx.State:
    """A tree like `params` that holds each parameter's PartitionSpec."""
    flat = nnx.to_flat_state(params)
    specs = [
        (path, leaf.replace(parameter_spec(".".join(map(str, path)), config)))
        for path, leaf in flat
    ]
    return nnx.from_flat_state(specs)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _call(
    graphdef: nnx.GraphDef, params: nnx.State, inputs: Any, mesh: Mesh | None, return_hidden: bool
) -> Any:
    def run(params: nnx.State, inputs: Any) -> Any:
        model = nnx.merge(graphdef, params)
        lanes = Lanes(model.config.num_lanes, LANE if mesh is not None else None)
        ids, mask, positions, segments = inputs
        out = model.trunk(
            ids,
            lanes,
            attention_mask_BS=mask,
            positions_BS=positions,
            segment_ids_BS=segments,
            return_hidden=return_hidden,
        )
        logits = model.logits(out.x_LBSD, lanes)
        return (logits, out.hidden_NBSLD) if return_hidden else logits

    if mesh is None:
        return run(params, inputs)
    config = nnx.merge(graphdef, params).config
    logits_spec = P(DATA, None, LANE if config.lm_head_type == "vocab_parallel" else None)
    out_specs = (logits_spec, P(None, DATA, None, LANE)) if return_hidden else logits_spec
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(parameter_specs(params, config), P(DATA)),
        out_specs=out_specs,
    )(params, inputs)

"""The model: embedding, lanes, head. Training and full forward passes run here; decoding against a cache
(`decode.step`) uses the same modules and the same exchange.

Shapes: L lanes of this device, B batch, S sequence, T keys, D hidden, V vocabulary, N layers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from laneformer_jax import rope
from laneformer_jax.attention_paths import Sight, choose, device_kind
from laneformer_jax.blocks import Context, DecoderLayer, Kind, make_norm, normed
from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig
from laneformer_jax.exchange import LaneExchange, Lanes, drift, drift_sample
from laneformer_jax.heads import make_head
from laneformer_jax.inputs import checked
from laneformer_jax.norms import RMSNorm
from laneformer_jax.precision import rounded
from laneformer_jax.remat import Remat, rematerialised
from laneformer_jax.sharding import LANE, ROWS, check_mesh, parameter_spec

Fetch = Callable[
    [str, jax.Array], jax.Array
]  # dotted path, what is stored -> what is computed with


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
    hidden_NBSLD: jax.Array | None  # streams after every layer
    drift_N: jax.Array | None = None  # of the lanes, after every layer


class Laneformer(nnx.Module):
    """Laneformer (Kog AI, 2026): `num_lanes` residual streams that hear each other δ layers late.

    Parameter paths follow the Hugging Face names. Arithmetic runs in the dtype of the parameters, with
    norms, softmax, RoPE and sums across lanes in float32. With a `mesh` (`sharding.make_mesh`) parameters and
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
        remat: Remat = "none",
        fetch: Fetch | None = None,
        return_hidden: bool = False,
        return_drift: bool = False,
    ) -> Output:
        """Embedding and all layers on this device's lanes; inside a shard_map when `lanes.axis` is set.

        Args:
            attention_mask_BS: False or 0 marks padding.
            positions_BS: the slot numbers unless given.
            segment_ids_BS: tokens see only their own document's.
            remat: what the backward pass computes again.
            fetch: makes a layer's weights whole just before they are used, again under `remat`; the
                embedding and the head are the caller's.
            return_drift: how far the lanes have drifted apart after each layer (`exchange.drift`).
        """
        cfg = self.config
        batch, seq = input_ids_BS.shape
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))

        key_valid_BS = None if attention_mask_BS is None else attention_mask_BS.astype(bool)
        sight = Sight(key_valid_BS, segment_ids_BS)
        whole = key_valid_BS is None and segment_ids_BS is None
        dtype = self.tok_embeddings.weight.dtype
        path = choose(batch, seq, cfg.head_size, dtype, whole, device_kind())
        masked = path == "plain" or (path == "cudnn" and not whole)
        # Not a set, which every process would go through in an order, and a program, of its own.
        windows = dict.fromkeys(cfg.window(i) for i in range(cfg.num_hidden_layers))
        masks = {w: sight.mask(seq, w) if masked else None for w in windows}
        cos_BSh, sin_BSh = rope.angles(positions_BS, cfg)

        x_BSD = lanes.enter(self.tok_embeddings(input_ids_BS))
        local_lanes = self.layers[0].attention.wq.weight.shape[0]
        every = (local_lanes, *x_BSD.shape)
        # Lanes that are still equal stand there once, [1,B,S,D], up to the first that adds its own.
        x_LBSD = x_BSD[None]
        exchange = LaneExchange(cfg, lanes)
        hidden, samples = [], []
        for i, layer in enumerate(self.layers):
            window = cfg.window(i)
            context = Context(cos_BSh, sin_BSh, masks[window], sight)
            fetch_i = None if fetch is None else partial(_fetch_under, fetch, f"layers.{i}.")
            run_attention = partial(_attention_module, Kind(path, window))
            attention = dict(attention_norm=layer.attention_norm, attention=layer.attention)
            y_LBSD = _run(run_attention, attention, fetch_i, remat, x_LBSD, context)
            x_LBSD = exchange.add(i, ATTENTION, x_LBSD, y_LBSD)
            mlp = dict(ffn_norm=layer.ffn_norm, feed_forward=layer.feed_forward)
            x_LBSD = exchange.add(i, MLP, x_LBSD, _run(_mlp_module, mlp, fetch_i, remat, x_LBSD))
            if return_hidden:
                hidden.append(jnp.moveaxis(jnp.broadcast_to(x_LBSD, every), 0, 2))
            if return_drift:
                samples.append(drift_sample(jnp.broadcast_to(x_LBSD, every)))
        return Output(
            jnp.broadcast_to(x_LBSD, every),
            jnp.stack(hidden) if return_hidden else None,
            drift(jnp.stack(samples), lanes) if return_drift else None,
        )

    def final(self, x_LBSD: jax.Array, lanes: Lanes) -> jax.Array:
        """What the head reads: [B,S,D] after norm and sum across lanes, or with a head that reads every
        lane's own stream [L,B,S,D] after the norm."""
        cfg = self.config
        if cfg.pre_norm_lane_agg:
            return self.norm(rounded(lanes.total(x_LBSD), x_LBSD.dtype))
        x_LBSD = self.norm(x_LBSD)
        if cfg.lm_head_type != "replicate":
            return x_LBSD
        return rounded(lanes.total(x_LBSD) / cfg.num_lanes, x_LBSD.dtype)

    def head(self, x: jax.Array, lanes: Lanes) -> jax.Array:
        """What `final` gave -> [B,S,V], V rows of the head's weight of this device."""
        cfg = self.config
        if cfg.lm_head_type != "replicate":
            return self.lm_head(x, lanes)
        if cfg.tie_word_embeddings:
            return jnp.einsum("bsd,vd->bsv", x, self.tok_embeddings.weight[...])
        return self.lm_head(x)

    def logits(self, x_LBSD: jax.Array, lanes: Lanes) -> jax.Array:
        """Final norm, lane aggregation and head: [L,B,S,D] -> [B,S,V].

        With a vocab_parallel head inside a shard_map V is this device's part of the vocabulary.
        """
        return self.head(self.final(x_LBSD, lanes), lanes)

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
        With a mesh, B must be divisible by its data × fsdp axes.

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


def _run(
    body: Callable[..., Any],
    modules: Mapping[str, nnx.Module],
    fetch: Fetch | None,
    remat: Remat,
    *args: Any,
) -> Any:
    """body(modules, *args) with the modules' weights fetched, and `remat` for what happens inside."""
    if fetch is None and remat == "none":
        return body(modules, *args)
    graph, weights = nnx.split(modules)

    def pure(weights: nnx.State, *args: Any) -> Any:
        if fetch is not None:
            weights = nnx.from_flat_state(
                (path, leaf.replace(fetch(".".join(map(str, path)), leaf[...])))
                for path, leaf in nnx.to_flat_state(weights)
            )
        return body(nnx.merge(graph, weights), *args)

    return rematerialised(pure, remat)(weights, *args)


def _fetch_under(fetch: Fetch, prefix: str, path: str, weight: jax.Array) -> jax.Array:
    return fetch(prefix + path, weight)


def _attention_module(
    kind: Kind, modules: dict[str, Any], x_LBSD: jax.Array, context: Context
) -> jax.Array:
    return modules["attention"](normed(modules["attention_norm"], x_LBSD), context, kind)


def _mlp_module(modules: dict[str, Any], x_LBSD: jax.Array) -> jax.Array:
    return modules["feed_forward"](normed(modules["ffn_norm"], x_LBSD))


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
    logits_spec = P(ROWS, None, LANE if config.lm_head_type == "vocab_parallel" else None)
    out_specs = (logits_spec, P(None, ROWS, None, LANE)) if return_hidden else logits_spec
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(parameter_specs(params, config), P(ROWS)),
        out_specs=out_specs,
    )(params, inputs)

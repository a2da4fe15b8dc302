"""The optimizer, its learning rate over time, and when an update is skipped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from train.config import OptimizerConfig, ScheduleConfig

_NO_DECAY = re.compile(r"tok_embeddings\..*|(.*[._])?norm\.(weight|scale)")
_LAYER_MATRIX = re.compile(r"layers\.\d+\.(attention|feed_forward)\.w\w+\.weight")
_MUON_RMS = 0.2  # of an update's elements, about AdamW's (Liu et al., 2025, section 2.2)
_TYPICAL = 0.99  # a norm's weight in the running mean falls by this every update
_BEFORE_SPIKES = 50  # updates made before that mean is trusted


def schedule(
    config: ScheduleConfig, peak: float, steps: int, tokens: int = 1
) -> Callable[[jax.Array], jax.Array]:
    """Learning rate (float32) by the number of updates already made, from 0 to `steps` - 1.

    With t = that number + 1: peak · t / warmup_steps up to t = warmup_steps, then peak; the decay
    ends at t = steps with peak · final. Warmup–stable–decay: Hu et al., 2024 (MiniCPM), section 4.

    tokens: of one update, for a warm-up that is given in tokens.
    """
    warmup = config.warmup(tokens)
    decay = config.decay_steps if config.kind == "wsd" else steps - warmup

    def rate(count: jax.Array) -> jax.Array:
        t = jnp.asarray(count, jnp.int32) + 1
        warm = t / max(warmup, 1)
        into_decay = (t - (steps - decay)) / max(decay, 1)
        if config.kind == "cosine":
            into_decay = (1 - jnp.cos(jnp.pi * into_decay)) / 2
        falling = 1 - (1 - config.final) * into_decay
        relative = jnp.where(t < warmup, warm, jnp.where(t > steps - decay, falling, 1.0))
        return jnp.asarray(peak * relative, jnp.float32)

    return rate


def decays(path: str) -> bool:
    """Whether the parameter at a dotted path takes part in weight decay; norms, embeddings do not."""
    return not _NO_DECAY.fullmatch(path)


class Guarded(NamedTuple):
    """State of an optimizer that skips updates.

    Attributes:
        inner: state of what is guarded; a skipped update leaves it as it was.
        made: updates made, int32.
        skipped: updates skipped, int32; `in_row`: since the last one made.
        typical: running mean of the gradient's norm over updates made, float32.
        average: running mean of the parameters by path; None without `ema`.
    """

    inner: Any
    made: jax.Array
    skipped: jax.Array
    in_row: jax.Array
    typical: jax.Array
    average: Any


def make_optimizer(
    config: OptimizerConfig, rate: Callable[[jax.Array], jax.Array], paths: Iterable[str]
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, 2019) or Muon (Jordan, 2024) on parameters by dotted path.

    Clips the global norm first. Decay is decoupled and multiplied by the learning rate. Muon takes the
    matrices of the layers and AdamW the rest (embedding, head, norms). Each lane's matrix [O, I] is
    orthogonalised by itself: it acts on that lane's own stream, and so no lane waits for another. Its
    updates are scaled to AdamW's size, so that both share learning rate and decay.
    """
    paths = list(paths)
    mask = {path: decays(path) for path in paths}
    # A state of the same form either way, so that a run may resume with the other.
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(config.clip_norm)
    direction = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.name == "muon":
        labels = {p: "muon" if _LAYER_MATRIX.fullmatch(p) else "adamw" for p in paths}
        direction = optax.partition({"muon": _muon(config), "adamw": direction}, labels)
    inner = optax.chain(
        clip,
        direction,
        optax.add_decayed_weights(config.weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )
    return _guarded(inner, config)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    def matrices(updates: Any) -> Any:
        each_lane = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        return jax.tree.map(lambda _: each_lane, updates)

    def sized(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda u: u * (_MUON_RMS * max(u.shape[1:]) ** 0.5), updates)

    return optax.chain(
        optax.contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=matrices),
        optax.stateless(sized),
    )


def _guarded(
    inner: optax.GradientTransformation, config: OptimizerConfig
) -> optax.GradientTransformation:
    def init(params: Mapping[str, jax.Array]) -> Guarded:
        zero, average = jnp.zeros((), jnp.int32), None
        if config.ema is not None:
            average = jax.tree.map(jnp.copy, params)
        return Guarded(inner.init(params), zero, zero, zero, jnp.zeros(()), average)

    def update(grads: Any, state: Guarded, params: Any = None) -> tuple[Any, Guarded]:
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(norm)
        if config.skip_spikes is not None:
            good &= (state.made < _BEFORE_SPIKES) | (norm <= config.skip_spikes * state.typical)
        updates, after = inner.update(grads, state.inner, params)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(good, new, old)

        updates = jax.tree.map(lambda u: chosen(u, jnp.zeros_like(u)), updates)
        average = state.average
        if config.ema is not None:
            ema = config.ema

            def mean(old: jax.Array, param: jax.Array, step: jax.Array) -> jax.Array:
                return chosen(ema * old + (1 - ema) * (param + step), old)

            average = jax.tree.map(mean, average, params, updates)
        # Weighted so that the mean is one of few norms at first, too.
        share = jnp.maximum(1 - _TYPICAL, 1 / (state.made + 1.0))
        typical = chosen(state.typical + share * (norm - state.typical), state.typical)
        one = good.astype(jnp.int32)
        return updates, Guarded(
            jax.tree.map(chosen, after, state.inner),
            state.made + one,
            state.skipped + 1 - one,
            (state.in_row + 1) * (1 - one),
            typical,
            average,
        )

    return optax.GradientTransformation(init, update)

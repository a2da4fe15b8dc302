"""The optimizer and its learning rate over time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax

from train.config import OptimizerConfig, ScheduleConfig

_NO_DECAY = re.compile(r"tok_embeddings\..*|(.*[._])?norm\.(weight|scale)")


def schedule(config: ScheduleConfig, peak: float, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Learning rate (float32) by the number of updates already made, from 0 to `steps` - 1.

    With t = that number + 1: peak · t / warmup_steps up to t = warmup_steps, then peak; the decay
    ends at t = steps with peak · final. Warmup–stable–decay: Hu et al., 2024 (MiniCPM), section 4.
    """
    warmup = config.warmup_steps
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


def make_optimizer(
    config: OptimizerConfig, rate: Callable[[jax.Array], jax.Array], paths: Iterable[str]
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, 2019) on a dict of parameters by dotted path.

    Clips the global norm first. Decay is decoupled and multiplied by the learning rate.
    """
    mask = {path: decays(path) for path in paths}
    # A state of the same form either way, so that a run may resume with the other.
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask),
        optax.scale_by_learning_rate(rate),
    )

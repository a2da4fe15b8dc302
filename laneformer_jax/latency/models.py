"""Models whose speed can be asked for: presets, config files, and larger shapes that are only shapes.

The larger ones were never trained: round numbers of today's dense models, and mixtures of experts
known by the bytes of their active weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from laneformer_jax import settings
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.info import find_config
from laneformer_jax.latency.published import DEEPSEEK_BYTES, GPT_OSS_BYTES
from laneformer_jax.latency.workload import Workload, from_config, mixture_of_experts
from laneformer_jax.presets import PRESETS

_LATE = dict(use_early_comm=False, max_position_embeddings=131072)

# Dense: about 8.0 and 29.5 billion parameters.
DENSE: dict[str, LaneformerConfig] = {
    "8b": LaneformerConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        **_LATE,  # type: ignore[arg-type]
    ),
    "30b": LaneformerConfig(
        vocab_size=128000,
        hidden_size=6144,
        intermediate_size=20480,
        num_hidden_layers=60,
        num_attention_heads=48,
        num_key_value_heads=8,
        **_LATE,  # type: ignore[arg-type]
    ),
}
# Active bytes as published; depth and width are those of the models' class, rounded.
EXPERTS: dict[str, Callable[..., Workload]] = {
    "moe-5b-active": lambda **kw: mixture_of_experts(
        GPT_OSS_BYTES, layers=36, hidden_size=2880, name="moe-5b-active", **kw
    ),
    "moe-13b-active": lambda **kw: mixture_of_experts(
        DEEPSEEK_BYTES, layers=43, hidden_size=4096, name="moe-13b-active", **kw
    ),
}
NAMES = (*PRESETS, *DENSE, *EXPERTS)


def find_workload(
    name: str,
    context: int | None = None,
    weight_bits: int = 16,
    overrides: Iterable[str] = (),
    lanes: int | None = None,
    delay: int | None = None,
) -> Workload:
    """The workload of a preset, a larger shape, or a config.json.

    Args:
        name: one of `NAMES`, a config.json or a folder that holds one.
        context: positions in the cache; None for 2048 or the model's limit, whichever is less.
        weight_bits: 16, 8 or 4; mixtures of experts have their bytes given.
        overrides: FIELD=VALUE of the config.
        lanes, delay: replace the model's own; a delay of 0 leaves it, see `schedule.SCHEMES`.

    Raises:
        UserError: an unknown name or field, an impossible value, or one that a mixture lacks.
    """
    if name in EXPERTS:
        given = [*overrides, *(["--context"] if context else [])]
        given += ["--weight-bits"] if weight_bits != 16 else []
        if given:
            raise UserError(f"model: {name} is known by its active bytes only; drop {given[0]}")
        changes = {"num_lanes": lanes} if lanes else {}
        return EXPERTS[name](**changes, **({"delay": delay} if delay else {}))
    if name in DENSE:
        config = DENSE[name]
    else:
        try:
            config = find_config(name)
        except UserError as error:
            if nearest(name, NAMES) and "neither a preset" in str(error):
                raise UserError(f"model: {name!r} is unknown{nearest(name, NAMES)}") from None
            raise
    extra = [] if lanes is None else [f"num_lanes={lanes}"]
    if delay is not None:
        check_delay(delay, config.num_hidden_layers)
        extra += [f"broadcast_delay={delay}"] if delay else []
    if overrides or extra:
        config = settings.replace(config, [*overrides, *extra])
    limit = config.max_position_embeddings
    context = min(2048, limit) if context is None else context
    if not 1 <= context <= limit:
        raise UserError(f"context: {context} must be from 1 to max_position_embeddings {limit}")
    return from_config(config, context, weight_bits, name)


def check_delay(delay: int, layers: int) -> None:
    """Raise UserError unless 0 <= delay <= layers."""
    if not 0 <= delay <= layers:
        near = min(max(delay, 0), layers)
        raise UserError(
            f"delay: {delay} must be from 0 (every sum is waited for) to the model's {layers} "
            f"layers; the nearest is {near}"
        )

"""Named model shapes. What the public sources leave open is our choice, and is marked so."""

from dataclasses import fields
from typing import Any

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest

# Open in public sources, chosen here: the early layers do not wait for each other, since the point of the
# architecture is a token without a waited-for collective, and the window is the one of two published values
# (2048, 512) that the released context length makes useful.
_OURS = dict(use_early_comm=False, lm_head_type="replicate", bos_token_id=1, eos_token_id=2)

PRESETS: dict[str, dict[str, Any]] = {
    # The released shape: 2,320,069,632 parameters.
    "laneformer-2b": dict(
        vocab_size=32000,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=15,
        num_attention_heads=32,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        sliding_window=2048,
        swa_layers=tuple(range(10)),
    ),
    "350m": dict(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        sliding_window=2048,
        swa_layers=tuple(range(12)),
    ),
    "100m": dict(
        vocab_size=32000,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=11,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        sliding_window=1024,
        swa_layers=tuple(range(7)),
    ),
    "tiny": dict(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        sliding_window=64,
        swa_layers=(0, 1),
    ),
}


def preset(name: str, **overrides: Any) -> LaneformerConfig:
    """The configuration called `name`, with fields replaced.

    Raises UserError for an unknown name or field.
    """
    if name not in PRESETS:
        raise UserError(
            f"preset: {name!r} is unknown; one of {', '.join(PRESETS)}{nearest(name, PRESETS)}"
        )
    names = [f.name for f in fields(LaneformerConfig)]
    for key in overrides:
        if key not in names:
            raise UserError(f"{key}: unknown model field{nearest(key, names)}")
    return LaneformerConfig(**{**_OURS, **PRESETS[name], **overrides})

"""What the config.json of a dense Llama-family model says, in the lanes' terms, and back.

With δ ≥ N and early communication every module's lane outputs are summed at once, so the lanes are slices of
one dense model (spec, section 2); so is a single lane under any delay.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from laneformer_jax.config import LaneformerConfig, RopeScaling
from laneformer_jax.errors import UserError

FAMILIES = ("llama", "mistral", "qwen3")
COPIES = "kv_head_copies"  # key of a config's `extra`: how often each kv head of the dense model is there
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a family's configuration class assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

# Every key of a config.json that is looked at.
READ = (
    *("model_type", *_REQUIRED, *_TOKENS),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "quantization_config"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
)


# Dense -> lanes


def lane_config(values: Mapping[str, Any], lanes: int, delay: int) -> LaneformerConfig:
    """The lane form of a dense model, from its parsed config.json.

    Layers before the delay sum their lanes at once and do not queue them as well, so that δ ≥ N is the dense
    model and a smaller δ leaves nothing out twice. With fewer kv heads than lanes each is copied.

    Raises:
        UserError: a value or feature that lanes cannot express, by its name in config.json.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise UserError(
            f"model_type: {family!r} cannot be split; must be one of {', '.join(FAMILIES)}"
        )
    for name in _REQUIRED:
        if name not in values:
            raise UserError(f"{name}: missing")
    values = {**_DEFAULTS[family], **values}
    _refuse_what_lanes_lack(values)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    copies = 1
    if kv_heads < lanes:
        if lanes % kv_heads or heads % lanes:
            raise UserError(
                f"num_key_value_heads: {kv_heads} cannot be spread over {lanes} lanes; the lanes must be a "
                f"multiple of it and divide num_attention_heads {heads}"
            )
        copies = lanes // kv_heads
    window, sliding = _window(family, values)
    tokens = {name: _token(values.get(name), values["vocab_size"]) for name in _TOKENS}
    return LaneformerConfig(
        **{name: values[name] for name in _REQUIRED},
        num_key_value_heads=kv_heads * copies,
        head_dim=values.get("head_dim"),
        qk_norm=family == "qwen3",
        max_position_embeddings=values["max_position_embeddings"],
        norm_eps=values.get("rms_norm_eps", 1e-6),
        num_lanes=lanes,
        broadcast_delay=delay,
        use_early_comm=True,
        early_broadcast=False,
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        sliding_window=window,
        swa_layers=sliding,
        extra={COPIES: copies} if copies > 1 else {},
        **_rope(values),
        **tokens,
    )


def copies_of(config: LaneformerConfig) -> int:
    """How many copies of each kv head of the dense model a split one holds."""
    return int(config.extra.get(COPIES, 1))


def _token(value: Any, vocab_size: int) -> Any:
    if isinstance(value, list):
        return tuple(v for v in value if 0 <= v < vocab_size) or None
    return value if isinstance(value, int) and 0 <= value < vocab_size else None


def _refuse_what_lanes_lack(values: Mapping[str, Any]) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise UserError(f"{name}: lanes have no biases; only models with it false can be split")
    if values.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act: {values['hidden_act']!r} must be 'silu'")
    if values.get("partial_rotary_factor", 1) != 1:
        raise UserError("partial_rotary_factor: only heads that rotate whole can be split")
    if values.get("quantization_config"):
        raise UserError("quantization_config: quantised weights cannot be split; must be absent")


def _window(family: str, values: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
    """Sliding window and its layers, as the family's configuration class decides."""
    layers, window = values["num_hidden_layers"], values.get("sliding_window")
    if family == "llama" or window is None:
        return None, None
    if family == "mistral":
        return window, tuple(range(layers))
    if not values.get("use_sliding_window", False):
        return None, None
    kinds = values.get("layer_types")
    if kinds is None:
        sliding = tuple(range(values.get("max_window_layers", 28), layers))
    else:
        sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return (window, sliding) if sliding else (None, None)


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling, in either generation's spelling."""
    found = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = found.pop("rope_theta", values.get("rope_theta", 10000.0))
    kind = found.pop("rope_type", found.pop("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise UserError(
            f"rope_scaling: rope_type {kind!r} is not supported; allowed: default, llama3"
        )
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**found)}


# Lanes -> dense


def check_dense(config: LaneformerConfig) -> None:
    """Raises UserError, naming each field in the way, unless Llama code can run the model as one."""
    lanes, layers = config.num_lanes, config.num_hidden_layers
    found = []
    if lanes > 1:
        if config.ladder_residual:
            found.append("ladder_residual: modules that read an older stream are no dense model")
        if config.broadcast_delay < layers:
            found.append(
                f"broadcast_delay {config.broadcast_delay} is less than num_hidden_layers {layers}: "
                "lanes that hear each other late are no dense model"
            )
        if not config.use_early_comm:
            found.append(
                "use_early_comm is false: lanes that never hear each other are no dense model"
            )
        if config.pre_norm_lane_agg:
            found.append(
                "pre_norm_lane_agg needs norm_eps / num_lanes² in the final norm, and Llama has one norm_eps"
            )
    windows = {config.window(i) for i in range(layers)}
    if None in windows and len(windows) > 1 and not config.qk_norm:
        found.append(
            "only some layers have a sliding window, which neither Llama nor Mistral can say"
        )
    if found:
        raise UserError(f"export --as llama: {'; '.join(found)}")


def family_of(config: LaneformerConfig) -> str:
    """The family whose code runs a dense model: qwen3 for q/k norms, mistral for windows, else llama."""
    if config.qk_norm:
        return "qwen3"
    return "llama" if config.window(0) is None else "mistral"


def dense_config_text(config: LaneformerConfig, kv_heads: int, dtype: str) -> str:
    """config.json of the dense model for transformers."""
    family, layers = family_of(config), range(config.num_hidden_layers)
    values: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **{name: getattr(config, name) for name in _REQUIRED},
        "num_key_value_heads": kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": dataclasses.asdict(config.rope_scaling) if config.rope_scaling else None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "torch_dtype": dtype,
    }
    for name in _TOKENS:
        token = getattr(config, name)
        values[name] = list(token) if isinstance(token, tuple) else token
    slides = [config.window(i) is not None for i in layers]
    if family != "llama":
        values["sliding_window"] = config.sliding_window if any(slides) else None
    if family == "qwen3":
        values["use_sliding_window"] = any(slides)
        values["layer_types"] = [
            "sliding_attention" if slide else "full_attention" for slide in slides
        ]
    return json.dumps(values, indent=2) + "\n"

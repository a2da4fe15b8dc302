"""Dense Llama-family models as lanes, and lanes that are mathematically dense as a Llama again.

With δ ≥ N and early communication every module's lane outputs are summed at once, so the lanes are slices of
one dense model (spec, section 2); so is a single lane under any delay. Llama, Mistral and Qwen3 checkpoints
differ from the lane layout in names, in slicing, and in RoPE: theirs pairs row i of a head with row i + d/2
("half-rotated"), ours with its neighbour, so the rows of a head, and the weights of a q/k norm, change order.

Shapes: L lanes, N layers, D hidden, H query heads, K kv heads, d head size, F feed-forward width.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laneformer_jax.checkpoint import hf, native
from laneformer_jax.checkpoint.memory import Scratch
from laneformer_jax.checkpoint.sources import EMBEDDING, Params, Source, Specs, flat_shapes, groups
from laneformer_jax.checkpoint.tensorfile import TensorFolder, TensorSpec
from laneformer_jax.config import LaneformerConfig, RopeScaling
from laneformer_jax.errors import UserError
from laneformer_jax.files import read_json

FAMILIES = ("llama", "mistral", "qwen3")
EMBEDDING_NAME = "model.embed_tokens.weight"
COPIES = "kv_head_copies"  # key of a config's `extra`: how often each kv head of the dense model is there
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
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


class LayerOrder(NamedTuple):
    """A layer's units in the order in which lanes take equal runs of them.

    kv_heads: [K] each with its query heads; neurons: [F].
    """

    kv_heads: np.ndarray
    neurons: np.ndarray


def dense_name(path: str) -> str:
    """Name in a Llama-style checkpoint of our parameter at a dotted path."""
    if path == EMBEDDING:
        return EMBEDDING_NAME
    if not path.startswith("layers."):
        return hf.HEAD if path.startswith("lm_head.") else "model.norm.weight"
    _, layer, rest = path.split(".", 2)
    module = rest.rpartition(".")[0]
    return f"model.layers.{layer}.{_MODULES[module]}.weight"


# Rows and lanes


def interleave(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows [heads·d, …] of half-rotated heads in the order of adjacent pairs: 0, d/2, 1, d/2+1, …"""
    split = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: np.ndarray, head_size: int) -> np.ndarray:
    """The inverse of `interleave`."""
    split = rows.reshape(-1, head_size // 2, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def split_rows(flat: np.ndarray, lanes: int) -> np.ndarray:
    """[out, in] -> [L, out/L, in]."""
    return flat.reshape(lanes, -1, flat.shape[1])


def split_columns(flat: np.ndarray, lanes: int) -> np.ndarray:
    """[out, in] -> [L, out, in/L]."""
    return np.ascontiguousarray(flat.reshape(flat.shape[0], lanes, -1).swapaxes(0, 1))


def merge_rows(split: np.ndarray) -> np.ndarray:
    """The inverse of `split_rows`."""
    return split.reshape(-1, split.shape[2])


def merge_columns(split: np.ndarray) -> np.ndarray:
    """The inverse of `split_columns`."""
    return np.ascontiguousarray(split.swapaxes(0, 1)).reshape(split.shape[1], -1)


def _by_unit(values: np.ndarray, order: np.ndarray, axis: int) -> np.ndarray:
    """Reorder the units, equal runs of `axis`, to `order`."""
    shape = values.shape
    units = values.reshape(*shape[:axis], len(order), -1, *shape[axis + 1 :])
    return np.take(units, order, axis=axis).reshape(shape)


# Dense -> lanes


def is_dense(folder: Path) -> bool:
    """Whether a Hugging Face folder says that it is a dense model of a family we split."""
    return hf.model_type(folder) in FAMILIES


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


def dense_shapes(config: LaneformerConfig, copies: int) -> dict[str, tuple[int, ...]]:
    """Shape by name of a model's Llama-style checkpoint, where `copies` of a kv head are one."""
    d, head = config.hidden_size, config.head_size
    kv_heads = config.num_key_value_heads // copies
    q, kv, ffn = config.num_attention_heads * head, kv_heads * head, config.intermediate_size
    by_module = {
        "attention.wq": (q, d),
        "attention.wk": (kv, d),
        "attention.wv": (kv, d),
        "attention.wo": (d, q),
        "attention.q_norm": (head,),
        "attention.k_norm": (head,),
        "feed_forward.w1": (ffn, d),
        "feed_forward.w3": (ffn, d),
        "feed_forward.w2": (d, ffn),
    }
    shapes = {}
    for path in flat_shapes(config):
        if path in (EMBEDDING, "lm_head.weight", "lm_head.linear.weight"):
            shape: tuple[int, ...] = (config.vocab_size, d)
        elif not path.startswith("layers."):
            shape = (d,)
        else:
            shape = by_module.get(path.split(".", 2)[2].rpartition(".")[0], (d,))
        shapes[dense_name(path)] = shape
    return shapes


class DenseFolder:
    """A dense Hugging Face folder, split into lanes, as a conversion's source.

    Args:
        folder: config.json and safetensors of a Llama, Mistral or Qwen3 model.
        lanes, delay: L and δ of the result.
        dtype: cast to it; None keeps the files'.
        order: of each layer's units; None: as they are.

    Raises:
        UserError: a model that cannot be split, or a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        lanes: int,
        delay: int,
        dtype: np.dtype[Any] | None = None,
        order: list[LayerOrder] | None = None,
    ):
        values = read_json(folder / "config.json")
        try:
            self.config = lane_config(values, lanes, delay)
        except UserError as error:
            raise UserError(f"{folder / 'config.json'}: {error}") from None
        self.tensors = TensorFolder(folder)
        for name in [n for n in self.tensors.specs if n.endswith(".rotary_emb.inv_freq")]:
            del self.tensors.specs[name]  # a table that old checkpoints carry along
        hf.check_tensors(
            self.tensors, self.config, dense_shapes(self.config, copies_of(self.config))
        )
        hf.warn_of_untied_head(self.tensors, self.config, EMBEDDING_NAME)
        self.folder, self._dtype, self._order = folder, dtype, order
        self.specs: Specs = {
            path: TensorSpec(shape, dtype or self.tensors.specs[dense_name(path)].dtype)
            for path, shape in flat_shapes(self.config).items()
        }

    def read(self, group: str, memory: Scratch | None = None) -> Params:
        paths = [path for path in self.specs if native.group_of(path) == group]
        flat = {p: hf.read_tensor(self.tensors, dense_name(p), self._dtype, memory) for p in paths}
        order = None
        if self._order is not None and group.startswith("layer_"):
            order = self._order[int(group.removeprefix("layer_"))]
        return split_group(self.config, flat, order)


def split_group(
    config: LaneformerConfig, flat: Mapping[str, np.ndarray], order: LayerOrder | None = None
) -> Params:
    """Cut dense matrices (by our paths) into lanes, with RoPE pairs and units in our order."""
    lanes, head = config.num_lanes, config.head_size
    copies = copies_of(config)
    out = {}
    for path, value in flat.items():
        module = path.rpartition(".")[0].rpartition(".")[2]
        if module in ("wq", "wk", "q_norm", "k_norm"):
            value = interleave(value, head)
        if module in ("wk", "wv") and copies > 1:
            heads = value.reshape(-1, head, value.shape[1])
            value = np.repeat(heads, copies, axis=0).reshape(-1, value.shape[1])
        if module in ("wq", "wk", "wv", "w1", "w3"):
            if order is not None:
                units = order.neurons if module in ("w1", "w3") else order.kv_heads
                value = _by_unit(value, units, axis=0)
            value = split_rows(value, lanes)
        elif module in ("wo", "w2"):
            if order is not None:
                units = order.neurons if module == "w2" else order.kv_heads
                value = _by_unit(value, units, axis=1)
            value = split_columns(value, lanes)
        out[path] = np.ascontiguousarray(value)
    return out


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


def removable_copies(source: Source) -> int:
    """How many kv heads of a split model can become one: its copies while they are equal, else 1."""
    copies, head = copies_of(source.config), source.config.head_size
    if copies == 1:
        return 1
    for group in groups(source):
        for path, value in source.read(group).items():
            if path.endswith((".wk.weight", ".wv.weight")):
                heads = merge_rows(value).reshape(-1, copies, head, value.shape[2])
                if not np.array_equal(heads, np.broadcast_to(heads[:, :1], heads.shape)):
                    return 1
    return copies


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


def merge_group(config: LaneformerConfig, params: Mapping[str, np.ndarray], copies: int) -> Params:
    """Tensors by Llama-style name of one group; `copies` of each kv head become one.

    A lane's own norm scales move into the columns that read its stream (float32, rounded once); heads follow
    the golden README, "Merging".
    """
    out: Params = {}
    head = config.head_size
    dtype = next(iter(params.values())).dtype
    layer_norms = {p: v for p, v in params.items() if p.endswith("_norm.scale")}
    for path, value in params.items():
        name = dense_name(path)
        prefix, _, module = path.rpartition(".")[0].rpartition(".")
        if path in layer_norms:
            out[name] = np.ones(config.hidden_size, dtype)
            continue
        if module in ("wq", "wk", "wv", "w1", "w3"):
            norm = "attention_norm" if module in ("wq", "wk", "wv") else "ffn_norm"
            scale = layer_norms.get(f"{prefix.rpartition('.')[0]}.{norm}.scale")
            if scale is not None:
                value = _scaled(value, scale[:, None, :])
            value = merge_rows(value)
        elif module in ("wo", "w2"):
            value = merge_columns(value)
        if module in ("wk", "wv") and copies > 1:
            heads = value.reshape(-1, head, value.shape[1])
            value = np.ascontiguousarray(heads[::copies]).reshape(-1, value.shape[1])
        if module in ("wq", "wk", "q_norm", "k_norm"):
            value = deinterleave(value, head)
        out[name] = value
    if any(path.startswith(("norm.", "lm_head.")) for path in params):
        out = _merge_head(config, params)
    return out


def _merge_head(config: LaneformerConfig, params: Mapping[str, np.ndarray]) -> Params:
    scale = params.get("norm.scale")  # [L, D]
    if scale is None:
        norm = params["norm.weight"]
    elif config.lm_head_type == "replicate":
        norm = scale.astype(np.float32).mean(axis=0).astype(scale.dtype)
    else:
        norm = np.ones(config.hidden_size, scale.dtype)
    out = {"model.norm.weight": norm}
    if config.lm_head_type == "replicate":
        if "lm_head.weight" in params:
            out[hf.HEAD] = params["lm_head.weight"]
    elif config.lm_head_type == "vocab_parallel":
        value = params["lm_head.weight"]
        out[hf.HEAD] = merge_rows(value if scale is None else _scaled(value, scale[:, None, :]))
    else:
        value = params["lm_head.linear.weight"]
        by_lane = value.reshape(value.shape[0], config.num_lanes, -1).astype(np.float32)
        if scale is not None:
            by_lane = by_lane * scale.astype(np.float32)
        out[hf.HEAD] = by_lane.sum(axis=1).astype(value.dtype)
    return out


def _scaled(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (value.astype(np.float32) * scale.astype(np.float32)).astype(value.dtype)

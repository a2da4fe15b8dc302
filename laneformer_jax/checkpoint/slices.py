"""The matrices of a dense model as slices of lanes, and back.

Llama, Mistral and Qwen3 checkpoints differ from the lane layout in names, in slicing, and in RoPE: theirs
pairs row i of a head with row i + d/2 ("half-rotated"), ours with its neighbour, so the rows of a head, and
the weights of a q/k norm, change order.

Shapes: L lanes, D hidden, K kv heads, d head size, F feed-forward width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from laneformer_jax.checkpoint import hf
from laneformer_jax.checkpoint.families import copies_of
from laneformer_jax.checkpoint.sources import EMBEDDING, Params, flat_shapes
from laneformer_jax.config import LaneformerConfig

EMBEDDING_NAME = "model.embed_tokens.weight"
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

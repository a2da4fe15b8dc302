"""Names and shapes of the published checkpoints' tensors, and random tensors to fill them."""

from __future__ import annotations

import numpy as np


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    dim, lanes = config["hidden_size"], config["num_lanes"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or dim // heads
    q, kv, ffn = heads * d // lanes, kv_heads * d // lanes, config["intermediate_size"] // lanes
    vocab = config["vocab_size"]
    one_scale = config.get("replicated_rmsn_scale", True)

    def norm(name: str, replicated: bool = one_scale) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (dim,)} if replicated else {f"{name}.scale": (lanes, dim)}

    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (vocab, dim)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= norm(f"{layer}.attention_norm") | norm(f"{layer}.ffn_norm")
        shapes[f"{layer}.attention.wq.weight"] = (lanes, q, dim)
        shapes[f"{layer}.attention.wk.weight"] = (lanes, kv, dim)
        shapes[f"{layer}.attention.wv.weight"] = (lanes, kv, dim)
        shapes[f"{layer}.attention.wo.weight"] = (lanes, dim, q)
        if config.get("qk_norm", False):
            shapes |= {f"{layer}.attention.{n}.weight": (d,) for n in ("q_norm", "k_norm")}
        shapes[f"{layer}.feed_forward.w1.weight"] = (lanes, ffn, dim)
        shapes[f"{layer}.feed_forward.w3.weight"] = (lanes, ffn, dim)
        shapes[f"{layer}.feed_forward.w2.weight"] = (lanes, dim, ffn)
    shapes |= norm("model.norm", one_scale or config.get("pre_norm_lane_agg", False))
    kind = config.get("lm_head_type", "replicate")
    if kind == "lane":
        shapes["lm_head.linear.weight"] = (vocab, lanes * dim)
    elif kind == "vocab_parallel":
        shapes["lm_head.weight"] = (lanes, vocab // lanes, dim)
    elif not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """float32, sized so that every rule shows in the logits: lively attention, uneven norms."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if "norm" in name:
            value = rng.uniform(0.5, 1.5, shape)
        elif "embeddings" in name:
            value = rng.normal(0, 0.5, shape)
        elif "lm_head" in name:
            value = rng.normal(0, 0.2, shape)
        else:
            gain = 2.5 if ".wq." in name or ".wk." in name else 1.0
            value = rng.normal(0, gain / np.sqrt(3 * config["hidden_size"]), shape)
        tensors[name] = value.astype(np.float32)
    return tensors

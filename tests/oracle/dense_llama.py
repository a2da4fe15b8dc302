"""A dense Llama-family forward in float64 NumPy, from its public description: half-rotated RoPE, GQA, SwiGLU.

Independent of the library: it reads the same config.json and tensors by their Llama names.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray

BASE = dict(
    vocab_size=40,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
FAMILIES = {
    "llama": dict(BASE, model_type="llama", head_dim=6),  # 6: no power of two
    "llama-tied": dict(BASE, model_type="llama", num_key_value_heads=8, tie_word_embeddings=True),
    "mistral": dict(BASE, model_type="mistral", sliding_window=9),
    "qwen3": dict(BASE, model_type="qwen3", head_dim=16, num_key_value_heads=8),
    "qwen3-sliding": dict(
        BASE,
        model_type="qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
}


def write(folder: Path, config: dict, tensors: dict[str, Array]) -> Path:
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by name."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    out = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        out["lm_head.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out


def random_tensors(config: dict, seed: int = 0, dtype=np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape)
        return rng.normal(0, 0.5 if "embed" in name else shape[-1] ** -0.5, shape)

    return {name: draw(name, shape).astype(dtype) for name, shape in shapes(config).items()}


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate_half(x: Array, theta: float) -> Array:
    """[S, heads, d] at positions 0 … S−1; row i pairs with row i + d/2."""
    seq, _, d = x.shape
    angle = np.arange(seq)[:, None, None] * theta ** (-2 * np.arange(d // 2) / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def window(config: dict, layer: int) -> int | None:
    if config["model_type"] == "mistral":
        return config.get("sliding_window")
    if config["model_type"] == "qwen3" and config.get("use_sliding_window"):
        return config["sliding_window"] if layer >= config["max_window_layers"] else None
    return None


def logits(config: dict, tensors: dict[str, Array], ids: Array) -> Array:
    """[S] token ids -> float64 logits [S, V]."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    eps, theta = config["rms_norm_eps"], config["rope_theta"]
    x = t["model.embed_tokens.weight"][ids]
    seq = len(ids)
    distance = np.arange(seq)[:, None] - np.arange(seq)
    for i in range(config["num_hidden_layers"]):
        w = {n.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): v for n, v in t.items()}
        h = norm(x, w["input_layernorm"], eps)
        q, k, v = (
            (h @ w[f"self_attn.{n}_proj"].T).reshape(seq, count, d)
            for n, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if "self_attn.q_norm" in w:
            q = norm(q, w["self_attn.q_norm"], eps)
            k = norm(k, w["self_attn.k_norm"], eps)
        q, k = rotate_half(q, theta), rotate_half(k, theta)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("shd,thd->hst", q, k) * d**-0.5
        span = window(config, i) or seq
        scores = np.where((distance >= 0) & (distance < span), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hst,thd->shd", p, v).reshape(seq, -1)
        x = x + mixed @ w["self_attn.o_proj"].T
        h = norm(x, w["post_attention_layernorm"], eps)
        gate = h @ w["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, t["model.norm.weight"], eps) @ head.T

"""Laneformer in plain numpy float64: what the library is judged by.

Written from the rules, lane by lane, for reading and not for speed. It knows nothing of the library
and uses no JAX. Inputs are a dict of tensors under their Hugging Face names and a config.json dict
of either generation of the public code. Every function of the mathematics returns its value and
`back`, its hand-written transpose.

Shapes: B batch, S sequence, D hidden, H heads of one lane, K kv heads of one lane, d head size,
F ffn of one lane, V vocabulary, N layers, L lanes. A lane is an element of a Python list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
MODULES = ("attention", "feed_forward")
NORM_OF = {"attention": "attention_norm", "feed_forward": "ffn_norm"}
WEIGHTS_OF = {"attention": ("wq", "wk", "wv", "wo"), "feed_forward": ("w1", "w2", "w3")}
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Run:
    """One forward pass. `backward(dlogits [B,S,V])` gives the gradient of every tensor, by name."""

    logits: Array  # [B,S,V]
    hidden: Array  # [N,B,S,L,D] after each layer
    final_hidden: Array  # [B,S,D], or [B,S,L,D] for the heads that read lanes separately
    partials: dict[str, Array]  # module -> [N,B,S,L,D] raw lane outputs, before any sum or scale
    backward: Callable[[Array], dict[str, Array]]


def window_of_layer(config: dict, layer: int) -> int | None:
    """How many keys (its own position included) a query of this layer sees; None for all."""
    n, window = config["num_hidden_layers"], config.get("sliding_window")
    if config.get("swa_layers") is not None:
        return window if layer in config["swa_layers"] else None
    k = config.get("sliding_window_n_layers") or 0
    slides = layer < k or layer >= n + k  # negative k: the last |k| layers
    unclamped = layer in (config.get("unclamped_layers") or ())
    return window if slides and not unclamped else None


def communicates(config: dict, module: str) -> bool:
    newer = {"attention": "use_attention_comm", "feed_forward": "use_mlp_comm"}[module]
    value = config.get(newer)
    return config.get("use_comm", True) if value is None else value


def rope_angles(config: dict, d: int, positions: Array) -> Array:
    """positions [B,S] -> angles [B,S,d/2] of the pairs (2i, 2i+1)."""
    freq = config.get("rope_theta", 10000.0) ** (-np.arange(0, d, 2) / d)
    scaling = config.get("rope_scaling")
    if scaling:  # Llama 3: long waves are stretched, short ones kept, a ramp between
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * freq / (2 * math.pi)  # turns within the original context
        keep = np.clip((turns - low) / (high - low), 0, 1)
        freq = freq * (keep + (1 - keep) / scaling["factor"])
    return positions[..., None] * freq


def rotate(x: Array, angles: Array) -> Array:
    """x [B,S,H,d] rotated pairwise; angles [B,S,d/2]. The transpose is rotation by -angles."""
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return out


def visible(config: dict, layer: int, shape: tuple[int, int], attention_mask, segment_ids) -> Array:
    """[B,S,S]: may query q see key k? Distances are array indices, not positions."""
    b, s = shape
    q, k = np.arange(s)[:, None], np.arange(s)[None, :]
    see = k <= q
    window = window_of_layer(config, layer)
    if window is not None:
        see = see & (q - k < window)
    see = np.broadcast_to(see, (b, s, s))
    if attention_mask is not None:
        see = see & (attention_mask[:, None, :] != 0)
    if segment_ids is not None:
        see = see & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return see


def weight_grad(dy: Array, x: Array) -> Array:
    """Gradient of w in y = x w^T: [out,in]."""
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def rms_norm(x: Array, weight: Array, eps: float):
    r = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    unit = x * r

    def back(dy):
        du = dy * weight
        dx = r * (du - unit * np.mean(du * unit, -1, keepdims=True))
        return dx, np.sum(dy * unit, axis=tuple(range(dy.ndim - 1)))

    return unit * weight, back


def attention(x: Array, w: dict[str, Array], d: int, eps: float, angles: Array, see: Array):
    """One lane. x [B,S,D] -> [B,S,D]; wq [H*d,D], wk and wv [K*d,D], wo [D,H*d].

    With q_norm and k_norm [d] each query and key head is normalised before its rotation (Qwen3).
    """
    b, s, _ = x.shape
    heads, kv_heads = w["wq"].shape[0] // d, w["wk"].shape[0] // d
    group = heads // kv_heads
    q = (x @ w["wq"].T).reshape(b, s, heads, d)
    k = (x @ w["wk"].T).reshape(b, s, kv_heads, d)
    if "q_norm" in w:
        q, q_back = rms_norm(q, w["q_norm"], eps)
        k, k_back = rms_norm(k, w["k_norm"], eps)
    q, k = rotate(q, angles), rotate(k, angles)
    v = (x @ w["wv"].T).reshape(b, s, kv_heads, d)
    k_H, v_H = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k_H) / math.sqrt(d)
    scores = np.where(see[:, None], scores, -1e300)  # a row that sees nothing becomes uniform
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", p, v_H).reshape(b, s, heads * d)

    def back(dy):
        dmixed = (dy @ w["wo"]).reshape(b, s, heads, d)
        dp = np.einsum("bqhd,bkhd->bhqk", dmixed, v_H)
        dscores = p * (dp - np.sum(p * dp, -1, keepdims=True))
        dscores = np.where(see[:, None], dscores, 0) / math.sqrt(d)
        dq = np.einsum("bhqk,bkhd->bqhd", dscores, k_H)
        dk_H = np.einsum("bhqk,bqhd->bkhd", dscores, q)
        dv_H = np.einsum("bhqk,bqhd->bkhd", p, dmixed)
        dk = dk_H.reshape(b, s, kv_heads, group, d).sum(3)
        dv = dv_H.reshape(b, s, kv_heads, group, d).sum(3)
        dq, dk = rotate(dq, -angles), rotate(dk, -angles)
        grads = {"wo": weight_grad(dy, mixed)}
        if "q_norm" in w:
            dq, grads["q_norm"] = q_back(dq)
            dk, grads["k_norm"] = k_back(dk)
        dq, dk, dv = (g.reshape(b, s, -1) for g in (dq, dk, dv))
        dx = dq @ w["wq"] + dk @ w["wk"] + dv @ w["wv"]
        return dx, grads | {n: weight_grad(g, x) for n, g in (("wq", dq), ("wk", dk), ("wv", dv))}

    return mixed @ w["wo"].T, back


def feed_forward(x: Array, w: dict[str, Array]):
    """One lane. x [B,S,D] -> [B,S,D]; w1 and w3 [F,D], w2 [D,F]."""
    a, gate = x @ w["w1"].T, x @ w["w3"].T
    sigmoid = 1 / (1 + np.exp(-a))
    inner = a * sigmoid * gate

    def back(dy):
        dinner = dy @ w["w2"]
        da = dinner * gate * sigmoid * (1 + a * (1 - sigmoid))
        dgate = dinner * a * sigmoid
        dx = da @ w["w1"] + dgate @ w["w3"]
        return dx, {
            "w1": weight_grad(da, x),
            "w3": weight_grad(dgate, x),
            "w2": weight_grad(dy, inner),
        }

    return inner @ w["w2"].T, back


@dataclass(frozen=True)
class Exchange:
    """How one module of one layer is added: x_l += total, or x_l += own*y_l + what is due."""

    own: float
    present: bool  # every lane adds the sum of all lanes' outputs of this very module
    past: int | None  # or the other lanes' outputs of this earlier layer

    @classmethod
    def of(cls, config: dict, layer: int, module: str) -> Exchange:
        lanes, n = config["num_lanes"], config["num_hidden_layers"]
        delta = config["broadcast_delay"]
        early_sum = config.get("use_early_comm", True)
        if layer < delta:
            return cls(0, True, None) if early_sum else cls(math.sqrt(lanes), False, None)
        if not communicates(config, module):
            return cls(math.sqrt(lanes), False, None)
        source = layer - delta
        summed_already = source < delta and early_sum
        queued = not summed_already or config.get("early_broadcast", True)
        last = layer >= n - delta and config.get("final_own_scale", "one") == "sqrt_lanes"
        return cls(math.sqrt(lanes) if last else 1, False, source if queued else None)

    def add(self, x: list[Array], y: list[Array], outputs: list[list[Array]]) -> list[Array]:
        """outputs[i][m]: lane m's output of the same module in layer i."""
        lanes = range(len(x))
        if self.present:
            total = sum(y)
            return [x[m] + total for m in lanes]
        out = [x[m] + self.own * y[m] for m in lanes]
        if self.past is not None:
            due = outputs[self.past]
            out = [out[m] + sum(due[o] for o in lanes if o != m) for m in lanes]
        return out

    def back(self, dx: list[Array], d_outputs: list[list[Array]], layer: int) -> None:
        """Add the streams' gradients dx to those of the outputs that went into them."""
        lanes = range(len(dx))
        for m in lanes:
            if self.present:
                d_outputs[layer][m] = d_outputs[layer][m] + sum(dx)
                continue
            d_outputs[layer][m] = d_outputs[layer][m] + self.own * dx[m]
            if self.past is not None:
                others = sum((dx[o] for o in lanes if o != m), np.zeros_like(dx[m]))
                d_outputs[self.past][m] = d_outputs[self.past][m] + others


def head(t: dict[str, Array], config: dict, x: list[Array]):
    """Final norm and output layer: logits, final hidden, back(dlogits, grads) -> dx per lane."""
    eps, lanes = config.get("norm_eps", 1e-5), len(x)
    kind = config.get("lm_head_type", "replicate")
    flat_name = "lm_head.weight" if "lm_head.weight" in t else "model.tok_embeddings.weight"

    if config.get("pre_norm_lane_agg", False):
        final, norm_back = rms_norm(sum(x), t["model.norm.weight"], eps)

        def back(dlogits, grads):
            grads[flat_name] += weight_grad(dlogits, final)
            dx, dw = norm_back(dlogits @ t[flat_name])
            grads["model.norm.weight"] += dw
            return [dx] * lanes

        return final @ t[flat_name].T, final, back

    normed = [rms_norm(x[m], norm_weight(t, "model.norm", m), eps) for m in range(lanes)]
    outs = [n for n, _ in normed]

    def norms_back(douts, grads):
        dx = []
        for m in range(lanes):
            dx_m, dw = normed[m][1](douts[m])
            add_norm_grad(grads, "model.norm", m, dw)
            dx.append(dx_m)
        return dx

    if kind == "replicate":
        final = sum(outs) / lanes

        def back(dlogits, grads):
            grads[flat_name] += weight_grad(dlogits, final)
            return norms_back([dlogits @ t[flat_name] / lanes] * lanes, grads)

        return final @ t[flat_name].T, final, back

    if kind == "lane":
        w = t["lm_head.linear.weight"]
        wide = np.concatenate(outs, axis=-1)

        def back(dlogits, grads):
            grads["lm_head.linear.weight"] += weight_grad(dlogits, wide)
            return norms_back(np.split(dlogits @ w, lanes, axis=-1), grads)

        return wide @ w.T, np.stack(outs, axis=2), back

    if kind == "vocab_parallel":
        w = t["lm_head.weight"]

        def back(dlogits, grads):
            parts = np.split(dlogits, lanes, axis=-1)
            for m in range(lanes):
                grads["lm_head.weight"][m] += weight_grad(parts[m], outs[m])
            return norms_back([parts[m] @ w[m] for m in range(lanes)], grads)

        logits = np.concatenate([outs[m] @ w[m].T for m in range(lanes)], axis=-1)
        return logits, np.stack(outs, axis=2), back

    raise ValueError(f"lm_head_type {kind!r}")


def norm_weight(t: dict[str, Array], name: str, lane: int) -> Array:
    return t[f"{name}.weight"] if f"{name}.weight" in t else t[f"{name}.scale"][lane]


def add_norm_grad(grads: dict[str, Array], name: str, lane: int, dw: Array) -> None:
    if f"{name}.weight" in grads:
        grads[f"{name}.weight"] += dw
    else:
        grads[f"{name}.scale"][lane] += dw


def forward(
    tensors: dict[str, Array],
    config: dict,
    input_ids: Array,  # [B,S]
    attention_mask: Array | None = None,  # [B,S], 0 = a key nobody sees
    positions: Array | None = None,  # [B,S], default 0..S-1 whatever the mask
    segment_ids: Array | None = None,  # [B,S], a token sees only its own segment
) -> Run:
    t = {name: np.asarray(a, np.float64) for name, a in tensors.items()}
    b, s = input_ids.shape
    n_layers, lanes = config["num_hidden_layers"], config["num_lanes"]
    eps = config.get("norm_eps", 1e-5)
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if positions is None:
        positions = np.broadcast_to(np.arange(s), (b, s))
    angles = rope_angles(config, d, positions)

    x = [t["model.tok_embeddings.weight"][input_ids]] * lanes
    outputs: dict[str, list[list[Array]]] = {module: [] for module in MODULES}
    hidden, backs = [], {}
    for i in range(n_layers):
        see = visible(config, i, (b, s), attention_mask, segment_ids)
        for module in MODULES:
            prefix, y = f"model.layers.{i}", []
            for m in range(lanes):
                scale = norm_weight(t, f"{prefix}.{NORM_OF[module]}", m)
                normed, norm_back = rms_norm(x[m], scale, eps)
                w = {n: t[f"{prefix}.{module}.{n}.weight"][m] for n in WEIGHTS_OF[module]}
                if module == "attention":
                    shared = {n: t.get(f"{prefix}.attention.{n}.weight") for n in HEAD_NORMS}
                    w |= {n: a for n, a in shared.items() if a is not None}
                    y_m, back = attention(normed, w, d, eps, angles, see)
                else:
                    y_m, back = feed_forward(normed, w)
                y.append(y_m)
                backs[i, module, m] = (norm_back, back)
            outputs[module].append(y)
            x = Exchange.of(config, i, module).add(x, y, outputs[module])
        hidden.append(np.stack(x, axis=2))
    logits, final, head_back = head(t, config, x)

    def backward(dlogits: Array) -> dict[str, Array]:
        grads = {name: np.zeros_like(a) for name, a in t.items()}
        dx = head_back(dlogits, grads)
        zero = np.zeros_like(dx[0])
        d_outputs = {module: [[zero] * lanes for _ in range(n_layers)] for module in MODULES}
        for i in reversed(range(n_layers)):
            for module in reversed(MODULES):
                Exchange.of(config, i, module).back(dx, d_outputs[module], i)
                prefix, into_x = f"model.layers.{i}", []
                for m in range(lanes):
                    norm_back, back = backs[i, module, m]
                    d_normed, dw = back(d_outputs[module][i][m])
                    for n, g in dw.items():
                        total = grads[f"{prefix}.{module}.{n}.weight"]
                        total[... if n in HEAD_NORMS else m] += g
                    d_stream, d_scale = norm_back(d_normed)
                    add_norm_grad(grads, f"{prefix}.{NORM_OF[module]}", m, d_scale)
                    into_x.append(dx[m] + d_stream)
                dx = into_x
        np.add.at(grads["model.tok_embeddings.weight"], input_ids, sum(dx))
        return grads

    return Run(
        logits=logits,
        hidden=np.stack(hidden),
        final_hidden=final,
        partials={m: np.stack([np.stack(y, 2) for y in outputs[m]]) for m in MODULES},
        backward=backward,
    )


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[float, Array]:
    """Mean of -log softmax(logits)[targets] under weights [B,S], and its gradient [B,S,V]."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    share = weights / weights.sum()
    onehot = np.eye(logits.shape[-1])[targets]
    return float(-(picked * share).sum()), (np.exp(log_p) - onehot) * share[..., None]


def next_token(input_ids: Array, attention_mask: Array | None = None) -> tuple[Array, Array]:
    """Targets and weights [B,S] of Hugging Face's shifted loss; the last row predicts nothing."""
    targets = np.roll(input_ids, -1, axis=1)
    weights = np.ones(input_ids.shape)
    if attention_mask is not None:
        weights = np.roll(attention_mask, -1, axis=1).astype(np.float64)
    weights[:, -1] = 0
    return targets, weights


def greedy(
    tensors: dict[str, Array],
    config: dict,
    prompt_ids: Array,
    steps: int,
    attention_mask: Array | None = None,
) -> tuple[Array, Array]:
    """Tokens [B,steps] and the logits [B,steps,V] each was taken from; no cache, every step anew.

    With a mask, positions count the real tokens only.
    """
    ids = prompt_ids
    mask = np.ones_like(ids) if attention_mask is None else attention_mask
    step_logits = []
    for _ in range(steps):
        positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
        logits = forward(tensors, config, ids, mask, positions).logits[:, -1]
        step_logits.append(logits)
        ids = np.concatenate([ids, logits.argmax(-1)[:, None].astype(ids.dtype)], 1)
        mask = np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
    return ids[:, prompt_ids.shape[1] :], np.stack(step_logits, 1)

"""Ladder Residual against its definition in float64: module j reads the stream without module j − 1.

u_j = embedding + Σ_{k ≤ j−2} Y_k, Y_k = Σ_lanes y_k(u_k); the head reads embedding + Σ_k Y_k.
"""

import json

import jax
import numpy as np
import oracle
import parity
import pytest
from shapes import random_tensors

from laneformer_jax import LaneformerConfig, costs
from laneformer_jax.errors import UserError
from laneformer_jax.sharding import make_mesh

CONFIG = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_lanes=4,
    ladder_residual=True,
    lm_head_type="replicate",
)


def ladder(tensors, config, ids):
    """Logits [B,S,V] and a function from their gradient to that of every tensor."""
    t = {name: np.asarray(a, np.float64) for name, a in tensors.items()}
    lanes, d = config["num_lanes"], config["hidden_size"] // config["num_attention_heads"]
    angles = oracle.rope_angles(config, d, np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    start = t["model.tok_embeddings.weight"][ids]
    order = [(i, m) for i in range(config["num_hidden_layers"]) for m in oracle.MODULES]
    sums, backs = [], []
    for j, (i, module) in enumerate(order):
        u = start + sum(sums[: max(j - 1, 0)])
        name = f"model.layers.{i}.{oracle.NORM_OF[module]}"
        total, lane_backs = 0.0, []
        for m in range(lanes):
            normed, norm_back = oracle.rms_norm(u, t[f"{name}.weight"], 1e-5)
            prefix = f"model.layers.{i}.{module}"
            w = {n: t[f"{prefix}.{n}.weight"][m] for n in oracle.WEIGHTS_OF[module]}
            if module == "attention":
                see = oracle.visible(config, i, ids.shape, None, None)
                y, back = oracle.attention(normed, w, d, 1e-5, angles, see)
            else:
                y, back = oracle.feed_forward(normed, w)
            total = total + y
            lane_backs.append((m, prefix, name, norm_back, back))
        sums.append(total)
        backs.append(lane_backs)
    logits, _, head_back = oracle.head(t, config, [start + sum(sums)] * lanes)

    def backward(dlogits):
        grads = {name: np.zeros_like(a) for name, a in t.items()}
        end = sum(head_back(dlogits, grads))
        inputs = [0.0] * len(order)
        for j in reversed(range(len(order))):
            dy = end + sum(inputs[j + 2 :])
            for m, prefix, name, norm_back, back in backs[j]:
                d_normed, dw = back(dy)
                for n, g in dw.items():
                    grads[f"{prefix}.{n}.weight"][m] += g
                du, d_scale = norm_back(d_normed)
                grads[f"{name}.weight"] += d_scale
                inputs[j] = inputs[j] + du
        np.add.at(grads["model.tok_embeddings.weight"], ids, end + sum(inputs))
        return grads

    return logits, backward


@pytest.mark.parametrize("devices", [1, 4])
def test_equals_the_definition(devices):
    tensors = random_tensors(CONFIG)
    ids = np.random.default_rng(0).integers(0, 61, (2, 9)).astype(np.int32)
    targets, weights = oracle.next_token(ids)
    mesh = make_mesh(lane=4) if devices == 4 else None
    got = parity.run(
        parity.library_model(CONFIG, tensors, mesh), {"input_ids": ids}, targets, weights
    )
    logits, backward = ladder(tensors, CONFIG, ids)
    loss, dlogits = oracle.cross_entropy(logits, targets, weights)
    assert np.abs(np.asarray(got.logits) - logits).max() <= 2e-5 * np.abs(logits).max()
    assert float(got.loss) == pytest.approx(loss, rel=1e-5)
    assert parity.greatest_error(got.grads, backward(dlogits)) <= 1e-4
    # And it is a scheme of its own.
    dense = {**CONFIG, "ladder_residual": False, "broadcast_delay": 3}
    assert np.abs(oracle.forward(tensors, dense, ids).logits - logits).max() > 0.1


def test_decoding_with_a_cache_agrees():
    import decode

    tensors = random_tensors(CONFIG)
    ids = np.random.default_rng(1).integers(0, 61, (1, 6)).astype(np.int32)
    new = decode.generate(parity.library_model(CONFIG, tensors), ids, max_new_tokens=5).tokens
    whole = np.concatenate([ids, np.asarray(new)], axis=1)
    logits, _ = ladder(tensors, CONFIG, whole)
    assert np.array_equal(logits[:, 5:-1].argmax(-1), np.asarray(new))


def test_sums():
    config = LaneformerConfig(**CONFIG)
    assert config.lane_sums() == 2 * 3 + 1
    assert costs.waited_lane_sums(config) == 2  # the last module's, and the lane mean
    mesh = make_mesh(lane=4)
    model = parity.library_model(CONFIG, random_tensors(CONFIG), mesh)
    ids = np.zeros((1, 4), np.int32)
    text = jax.jit(lambda ids: model(ids)).lower(ids).as_text()
    assert text.count("stablehlo.all_reduce") == config.lane_sums()


def test_config_file_and_refusals():
    config = LaneformerConfig(**CONFIG)
    assert LaneformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "ladder_residual" not in LaneformerConfig().to_dict()
    with pytest.raises(UserError, match=r"use_mlp_comm: false .*true or absent with ladder_resid"):
        LaneformerConfig(**CONFIG, use_mlp_comm=False)

"""The float64 oracle against the golden numbers and, beyond them, hand-worked sums."""

import math
from pathlib import Path

import numpy as np
import pytest
from goldens import BFLOAT16, COMMITTED, FLOAT32, golden_of
from oracle import (
    MODULES,
    Exchange,
    cross_entropy,
    forward,
    greedy,
    next_token,
    rope_angles,
    window_of_layer,
)
from shapes import random_tensors, tensor_shapes


@pytest.fixture(params=FLOAT32)
def golden(request):
    return golden_of(request, request.param)


def close(got, want, atol):
    np.testing.assert_allclose(got, want, atol=atol, rtol=0)


def test_forward_and_gradients(golden):
    want = golden.want
    run = forward(golden.weights, golden.config, want["input_ids"])
    close(run.logits, want["logits"], 1e-5)
    close(run.hidden, want["hidden_states"], 1e-5)
    close(run.final_hidden, want["final_hidden"], 1e-5)
    loss, dlogits = cross_entropy(run.logits, *next_token(want["input_ids"]))
    close(loss, want["loss"], 2e-6)
    grads = run.backward(dlogits)
    assert {f"grad.{name}" for name in grads} == {k for k in want if k.startswith("grad.")}
    for name, g in grads.items():
        close(g, want[f"grad.{name}"], 1e-5 * np.abs(g).max())


def test_padding(golden):
    want = golden.want
    for side, positions, logits in (
        ("lpad", None, "logits"),
        ("lpad", want["lpad.position_ids"], "logits_pos"),
        ("rpad", None, "logits"),
    ):
        ids, mask = want[f"{side}.input_ids"], want[f"{side}.attention_mask"]
        run = forward(golden.weights, golden.config, ids, mask, positions)
        real = mask == 1
        close(run.logits[real], want[f"{side}.{logits}"][real], 1e-5)
        if side == "rpad":
            close(cross_entropy(run.logits, *next_token(ids, mask))[0], want["rpad.loss"], 3e-6)


def test_greedy(golden):
    want = golden.want
    for kind, mask in (("gen", None), ("genpad", want["genpad.attention_mask"])):
        tokens, logits = greedy(golden.weights, golden.config, want[f"{kind}.prompt_ids"], 16, mask)
        np.testing.assert_array_equal(tokens, want[f"{kind}.tokens"])
        close(logits, want[f"{kind}.step_logits"], 1e-5)


def test_partials(request):
    golden = golden_of(request, "l4_d1_vocab_parallel")
    partials = forward(golden.weights, golden.config, golden.want["input_ids"]).partials
    close(partials["attention"], golden.want["attn_out"], 1e-5)
    close(partials["feed_forward"], golden.want["mlp_out"], 1e-5)


def test_bfloat16_weights(request):
    golden = golden_of(request, BFLOAT16)
    logits = forward(golden.weights, golden.config, golden.want["input_ids"]).logits
    assert (
        np.abs(logits - golden.want["logits"]).mean() < 0.02
    )  # bfloat16 rounding, not another model


def test_committed_numbers_are_the_shared_ones(shared):
    here = Path(__file__).parents[1] / "golden" / COMMITTED
    for name in ("config.json", "model.safetensors", "golden.safetensors"):
        assert (here / name).read_bytes() == (shared / "golden" / COMMITTED / name).read_bytes()


def test_golden_names_and_shapes_are_the_table(golden):
    assert {n: a.shape for n, a in golden.weights.items()} == tensor_shapes(golden.config)


TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 24,
    "num_lanes": 4,
    "broadcast_delay": 2,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"early_broadcast": False},
        {"final_own_scale": "sqrt_lanes", "use_early_comm": False, "lm_head_type": "lane"},
        {"use_attention_comm": False, "use_mlp_comm": True, "replicated_rmsn_scale": False},
        {"use_attention_comm": True, "use_mlp_comm": False, "lm_head_type": "vocab_parallel"},
        {"sliding_window": 3, "swa_layers": [0, 3], "tie_word_embeddings": True},
        {"num_lanes": 1, "num_hidden_layers": 2, "head_dim": 6, "pre_norm_lane_agg": True},
        {"num_lanes": 2, "qk_norm": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_gradients_are_the_slope_of_the_loss(fields):
    """Along one random direction per tensor, central differences in float64."""
    config = TINY | fields
    tensors = {n: a.astype(np.float64) for n, a in random_tensors(config, seed=1).items()}
    rng = np.random.default_rng(0)
    ids = rng.integers(config["vocab_size"], size=(2, 7))
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    weights = rng.uniform(size=ids.shape)

    def loss_of(t):
        run = forward(t, config, ids, segment_ids=segments)
        return run, *cross_entropy(run.logits, np.roll(ids, -1, 1), weights)

    run, _, dlogits = loss_of(tensors)
    for name, g in run.backward(dlogits).items():
        step = rng.normal(size=g.shape) * 1e-6
        up, down = (loss_of(tensors | {name: tensors[name] + s * step})[1] for s in (1, -1))
        slope = np.vdot(g, step)
        assert abs((up - down) / 2 - slope) < 1e-7 * np.linalg.norm(g) * np.linalg.norm(step), name


ROOT2 = math.sqrt(2)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        # Lane 0 of two after four layers, delay 1: how often it has heard each layer's output,
        # its own and the other lane's.
        ({}, ([1, 1, 1, 1], [2, 1, 1, 0])),
        ({"early_broadcast": False}, ([1, 1, 1, 1], [1, 1, 1, 0])),
        ({"use_early_comm": False}, ([ROOT2, 1, 1, 1], [1, 1, 1, 0])),
        ({"use_early_comm": False, "early_broadcast": False}, ([ROOT2, 1, 1, 1], [1, 1, 1, 0])),
        ({"final_own_scale": "sqrt_lanes"}, ([1, 1, 1, ROOT2], [2, 1, 1, 0])),
        ({"use_comm": False}, ([1, ROOT2, ROOT2, ROOT2], [1, 0, 0, 0])),
        ({"use_comm": False, "use_early_comm": False}, ([ROOT2] * 4, [0] * 4)),
        ({"broadcast_delay": 2}, ([1, 1, 1, 1], [2, 2, 0, 0])),
        ({"broadcast_delay": 2, "use_early_comm": False}, ([ROOT2, ROOT2, 1, 1], [1, 1, 0, 0])),
        (
            {"broadcast_delay": 3, "final_own_scale": "sqrt_lanes"},
            ([1, 1, 1, ROOT2], [2, 1, 1, 0]),
        ),
        ({"broadcast_delay": 9}, ([1] * 4, [1] * 4)),
    ],
    ids=str,
)
def test_what_a_lane_hears(fields, want):
    config = {"num_lanes": 2, "num_hidden_layers": 4, "broadcast_delay": 1} | fields
    own, other = np.eye(8)[:4], np.eye(8)[4:]  # one axis for each lane's output of each layer
    x, outputs = [np.zeros(8)] * 2, []
    for i in range(4):
        outputs.append([own[i], other[i]])
        x = Exchange.of(config, i, "attention").add(x, outputs[i], outputs)
    np.testing.assert_allclose(x[0], np.concatenate(want))
    np.testing.assert_allclose(x[1], np.concatenate(want[::-1]))


def test_modules_communicate_separately():
    config = {"num_lanes": 4, "num_hidden_layers": 4, "broadcast_delay": 1}
    for attention, mlp in ((True, False), (False, True)):
        fields = {"use_comm": True, "use_attention_comm": attention, "use_mlp_comm": mlp}
        rules = [Exchange.of(config | fields, 2, module) for module in MODULES]
        assert [r.past is not None for r in rules] == [attention, mlp]
        assert [r.own for r in rules] == [1 if attention else 2, 1 if mlp else 2]


@pytest.mark.parametrize(
    ("fields", "sliding"),
    [
        ({}, []),
        ({"sliding_window_n_layers": 2}, [0, 1]),
        ({"sliding_window_n_layers": -2}, [3, 4]),
        ({"sliding_window_n_layers": 5, "unclamped_layers": [1, 3]}, [0, 2, 4]),
        ({"swa_layers": [0, 4]}, [0, 4]),
        ({"swa_layers": []}, []),
    ],
)
def test_which_layers_slide(fields, sliding):
    config = {"num_hidden_layers": 5, "sliding_window": 7} | fields
    assert [i for i in range(5) if window_of_layer(config, i)] == sliding


def test_llama3_rope_scaling():
    """Kept below 2048 positions a turn, divided by 8 above 8192, in proportion between."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    one, base = np.ones((1, 1)), {"rope_theta": 500000.0}
    plain = rope_angles(base, 128, one)[0, 0]
    scaled = rope_angles(base | {"rope_scaling": scaling}, 128, one)[0, 0]
    wave = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wave < 2048], plain[wave < 2048])
    np.testing.assert_allclose(scaled[wave > 8192], plain[wave > 8192] / 8)
    between = (wave > 2048) & (wave < 8192)
    assert between.any()
    keep = (8192 / wave[between] - 1) / 3
    np.testing.assert_allclose(scaled[between], plain[between] * (keep + (1 - keep) / 8))

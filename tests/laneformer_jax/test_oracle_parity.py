"""The library against the float64 oracle on models and inputs that no golden folder holds."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import cross_entropy, forward
from parity import greatest_error, library_model, run
from safetensors.numpy import load_file
from shapes import random_tensors, tensor_shapes

ATOL = 1e-4
ROWS, TOKENS, VOCAB = 2, 10, 24

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_lanes": 4,
    "broadcast_delay": 2,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=ATOL, rtol=0)


def batch(config, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(config["vocab_size"], size=(2 * ROWS, TOKENS)).astype(np.int32)
    return ids, np.roll(ids, -1, axis=1), rng.uniform(size=ids.shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"early_broadcast": False, "lm_head_type": "vocab_parallel"},
        {"final_own_scale": "sqrt_lanes", "use_early_comm": False, "lm_head_type": "lane"},
        {"use_attention_comm": False, "use_mlp_comm": True, "replicated_rmsn_scale": False},
        {"swa_layers": [0, 1, 3], "sliding_window": 4, "rope_scaling": SCALING, "head_dim": 6},
        {"use_mlp_comm": False, "tie_word_embeddings": True, "qk_norm": True},
        {"sliding_window_n_layers": -2, "sliding_window": 3, "pre_norm_lane_agg": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_logits_streams_loss_and_every_gradient(fields):
    """Packed documents (two a row, padding behind) in one half of the batch, left padding in the other."""
    config = BASE | fields
    tensors = random_tensors(config, seed=3)
    ids, targets, weights = batch(config)
    segments = np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 5 + [0] * 2] + [[1] * TOKENS] * 2)
    mask = np.array([[1] * TOKENS] * 2 + [[0] * 3 + [1] * 7, [0] * 9 + [1]])
    positions = np.array([[*range(4), *range(6)], [*range(3), *range(5), 0, 0]])
    positions = np.concatenate([positions, np.maximum(np.cumsum(mask[2:], 1) - 1, 0)])
    weights *= (segments > 0) & (mask > 0)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "positions": positions.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
    }
    got = run(library_model(config, tensors), inputs, targets, weights)
    want = forward(tensors, config, **inputs)
    loss, dlogits = cross_entropy(want.logits, targets, weights)
    real = weights > 0
    close(got.logits[real], want.logits[real])
    close(got.hidden[:, real], want.hidden[:, real])
    np.testing.assert_allclose(got.loss, loss, atol=1e-5)
    assert greatest_error(got.grads, want.backward(dlogits)) <= 1e-4


def test_a_document_knows_nothing_of_its_neighbours():
    """Other tokens in document 1 and 3 leave document 2's logits as they were, to the bit."""
    config = BASE | {"sliding_window": 4, "sliding_window_n_layers": 3}
    model = library_model(config, random_tensors(config))
    rng = np.random.default_rng(0)
    segments = np.repeat([[1] * 5 + [2] * 6 + [3] * 3], 2, axis=0).astype(np.int32)
    ids = rng.integers(VOCAB, size=segments.shape).astype(np.int32)
    ids[1] = np.where(segments[1] == 2, ids[0], (ids[0] + 1) % VOCAB)
    logits = np.asarray(model(ids, segment_ids=segments))
    second = segments[0] == 2
    np.testing.assert_array_equal(logits[0, second], logits[1, second])
    assert (logits[0, ~second] != logits[1, ~second]).any(axis=-1).all()
    alone = forward(random_tensors(config), config, ids[:1, second]).logits
    close(logits[:1, second], alone)


@st.composite
def configs(draw):
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(1, 4))
    kv_heads = lanes * draw(st.integers(1, 2))
    heads, d = kv_heads * draw(st.integers(1, 2)), draw(st.sampled_from([2, 4, 6]))
    config = {
        "vocab_size": VOCAB,
        "hidden_size": heads * d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": lanes * draw(st.integers(1, 3)),
        "max_position_embeddings": 64,
        "rope_theta": draw(st.sampled_from([100.0, 10000.0])),
        "num_lanes": lanes,
        "broadcast_delay": draw(st.integers(1, layers + 1)),
        "use_early_comm": draw(st.booleans()),
        "early_broadcast": draw(st.booleans()),
        "final_own_scale": draw(st.sampled_from(["one", "sqrt_lanes"])),
        "replicated_rmsn_scale": draw(st.booleans()),
        "lm_head_type": draw(st.sampled_from(["replicate", "lane", "vocab_parallel"])),
        "qk_norm": draw(st.booleans()),
    }
    if draw(st.booleans()):
        config |= {"hidden_size": 12, "head_dim": d}
    if draw(st.booleans()):
        config["rope_scaling"] = SCALING
    if config["lm_head_type"] == "replicate":
        config["pre_norm_lane_agg"] = draw(st.booleans())
        config["tie_word_embeddings"] = draw(st.booleans())
    config |= draw(
        st.one_of(
            st.fixed_dictionaries({"use_comm": st.booleans()}),
            st.fixed_dictionaries(
                {"use_attention_comm": st.booleans(), "use_mlp_comm": st.booleans()}
            ),
        )
    )
    some_layers = st.lists(st.integers(0, layers - 1), unique=True)
    config |= draw(
        st.one_of(
            st.just({"sliding_window": None}),
            st.fixed_dictionaries(
                {
                    "sliding_window": st.integers(1, TOKENS + 1),
                    "sliding_window_n_layers": st.integers(-layers, layers),
                    "unclamped_layers": some_layers,
                }
            ),
            st.fixed_dictionaries(
                {"sliding_window": st.integers(1, TOKENS + 1), "swa_layers": some_layers}
            ),
        )
    )
    return config


@st.composite
def inputs(draw):
    """Token ids with any of: padding on either side, positions that jump, packed documents."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (ROWS, TOKENS)
    out = {"input_ids": rng.integers(VOCAB, size=shape).astype(np.int32)}
    if draw(st.booleans()):
        pads, left = rng.integers(0, TOKENS, size=(ROWS, 1)), draw(st.booleans())
        column = np.arange(TOKENS)
        mask = column >= pads if left else column < TOKENS - pads
        out["attention_mask"] = mask.astype(np.int32)
    if draw(st.booleans()):
        out["positions"] = rng.integers(0, 50, size=shape).astype(np.int32)
    if draw(st.booleans()):
        out["segment_ids"] = 1 + np.cumsum(rng.random(shape) < 0.3, axis=1).astype(np.int32)
    return out


def check(config, inputs, seed):
    tensors = random_tensors(config, seed)
    logits, hidden = library_model(config, tensors)(**inputs, return_hidden=True)
    want = forward(tensors, config, **inputs)
    real = inputs.get("attention_mask", np.ones((ROWS, TOKENS))) == 1
    close(hidden[:, real], want.hidden[:, real])
    close(logits[real], want.logits[real])


SWEEP = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(configs(), inputs(), st.integers(0, 9))
@settings(max_examples=8, derandomize=True, **SWEEP)
def test_some_models_and_inputs(config, inputs, seed):
    check(config, inputs, seed)


@pytest.mark.slow
@given(configs(), inputs(), st.integers(0, 9))
@settings(max_examples=100, **SWEEP)
def test_many_models_and_inputs(config, inputs, seed):
    check(config, inputs, seed)


@given(configs())
@settings(max_examples=15, derandomize=True, **SWEEP)
def test_saved_names_shapes_and_bits_are_the_tables(tmp_path_factory, config):
    """What is loaded from a folder is saved as the published table says, with the same bits."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tensors = random_tensors(config)
    library_model(config, tensors).save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == tensor_shapes(config)
    for name, value in tensors.items():
        np.testing.assert_array_equal(saved[name], value)

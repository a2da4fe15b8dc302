"""Dense models into lanes and back, against an independent dense forward in float64."""

import dataclasses
import json
from pathlib import Path

import dense_llama
import goldens
import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import FAMILIES, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from laneformer_jax import LaneformerConfig, cli
from laneformer_jax.checkpoint import convert, dense, families, native, slices, sources
from laneformer_jax.errors import UserError


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_with_delay_n_are_the_dense_model(family, lanes, tmp_path, lane_logits):
    config = FAMILIES[family]
    tensors = dense_llama.random_tensors(config, seed=1)
    folder = write(tmp_path / "dense", config, tensors)
    ids = np.random.default_rng(0).integers(config["vocab_size"], size=48)
    want = dense_llama.logits(config, tensors, ids)
    got = lane_logits(dense.DenseFolder(folder, lanes, 2), ids)
    assert want.std() > 0.5
    np.testing.assert_allclose(got, want, atol=5e-5, rtol=0)


def test_a_real_delay_is_another_model(tmp_path, lane_logits):
    config = dict(FAMILIES["llama"], num_hidden_layers=4)
    tensors = dense_llama.random_tensors(config, seed=1)
    folder = write(tmp_path / "dense", config, tensors)
    ids = np.arange(30)
    want = dense_llama.logits(config, tensors, ids)
    split = dense.DenseFolder(folder, 4, 1)
    assert np.abs(lane_logits(split, ids) - want).max() > 0.05
    assert split.config.use_early_comm
    assert not split.config.early_broadcast


@pytest.mark.parametrize("family", FAMILIES)
def test_export_as_llama_returns_the_exact_weights(family, tmp_path, capsys):
    config = FAMILIES[family]
    tensors = dense_llama.random_tensors(config)
    folder = write(tmp_path / "dense", config, tensors)
    lanes, out = tmp_path / "lanes", tmp_path / "out"
    command = ["import", str(folder), str(lanes), "--lanes", "8", "--delay", "2", "--verify"]
    assert cli.main(command) == 0
    assert cli.main(["export", "--as", "llama", str(lanes), str(out), "--verify"]) == 0
    assert capsys.readouterr().out.count("equal the dense model's within") == 2
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    written = json.loads((out / "config.json").read_text())
    assert written["model_type"] == config["model_type"]
    assert written["num_key_value_heads"] == config["num_key_value_heads"]
    ids = np.arange(30)
    np.testing.assert_array_equal(
        dense_llama.logits({**config, **written}, found, ids),
        dense_llama.logits(config, tensors, ids),
    )


@pytest.mark.parametrize(
    "name", ["l1_dense", "l4_delay_ge_layers", "per_lane_scales", "lane_head", "vocab_parallel"]
)
def test_dense_lanes_of_every_head_and_norm_become_a_llama(name, request, tmp_path):
    variants = {
        "per_lane_scales": dict(replicated_rmsn_scale=False),
        "lane_head": dict(replicated_rmsn_scale=False, lm_head_type="lane"),
        "vocab_parallel": dict(replicated_rmsn_scale=False, lm_head_type="vocab_parallel"),
    }
    if name in variants:
        config = LaneformerConfig(
            vocab_size=40,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=64,
            num_lanes=4,
            broadcast_delay=2,
            **variants[name],
        )
        rng = np.random.default_rng(3)
        params = {
            path: (rng.uniform(0.5, 1.5, s) if "norm" in path else rng.normal(0, s[-1] ** -0.5, s))
            for path, s in sources.flat_shapes(config).items()
        }
        model = native.model_of(
            config, {p: jnp.asarray(v, jnp.float32) for p, v in params.items()}, None
        )
        native.save_inference(tmp_path / "lanes", model)
    else:
        golden = goldens.golden_of(request, name)
        convert.import_lanes(golden.folder, tmp_path / "lanes")
        model = native.load_model(tmp_path / "lanes")
    convert.export(tmp_path / "lanes", tmp_path / "out", check=True, layout="llama")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=40)
    want = np.asarray(model(jnp.asarray(ids)[None]))[0]
    got = dense_llama.logits(written, load_file(tmp_path / "out" / "model.safetensors"), ids)
    assert want.std() > 0.1
    np.testing.assert_allclose(got, want, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(broadcast_delay=1), "broadcast_delay 1 is less than num_hidden_layers 2"),
        (dict(broadcast_delay=2, use_early_comm=False), "use_early_comm is false"),
        (dict(broadcast_delay=2, pre_norm_lane_agg=True), "pre_norm_lane_agg"),
        (dict(broadcast_delay=2, sliding_window=4, swa_layers=(0,)), "only some layers"),
    ],
)
def test_lanes_that_are_not_dense_are_refused_by_name(changes, told):
    config = LaneformerConfig(num_hidden_layers=2, num_lanes=4, **changes)
    with pytest.raises(UserError, match=told):
        families.check_dense(config)
    families.check_dense(
        dataclasses.replace(config, num_lanes=1, swa_layers=None, sliding_window=None)
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(attention_bias=True), "attention_bias: lanes have no biases"),
        (dict(mlp_bias=True), "mlp_bias"),
        (dict(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type 'yarn'"),
        (dict(model_type="qwen2"), "model_type: 'qwen2' cannot be split"),
        (
            dict(num_key_value_heads=3, num_attention_heads=9),
            "num_key_value_heads: 3 cannot be spread",
        ),
        (dict(intermediate_size=60), "intermediate_size: 60"),
    ],
)
def test_what_lanes_cannot_express_is_refused_by_name(changes, told):
    with pytest.raises(UserError, match=told):
        families.lane_config({**FAMILIES["llama"], "head_dim": 6, **changes}, 8, 2)


def test_a_missing_key_and_explicit_nulls():
    values = dict(FAMILIES["mistral"])
    assert families.lane_config(values, 4, 2).window(1) == 9
    assert families.lane_config({**values, "sliding_window": None}, 4, 2).window(1) is None
    del values["sliding_window"]
    assert families.lane_config(values, 4, 2).window(1) == 4096
    del values["hidden_size"]
    with pytest.raises(UserError, match="hidden_size: missing"):
        families.lane_config(values, 4, 2)


def test_llama3_rope_in_both_spellings():
    scaling = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    old = families.lane_config(
        {**FAMILIES["llama"], "rope_theta": 5e5, "rope_scaling": scaling}, 4, 2
    )
    values = {k: v for k, v in FAMILIES["llama"].items() if k != "rope_theta"}
    new = families.lane_config({**values, "rope_parameters": {**scaling, "rope_theta": 5e5}}, 4, 2)
    assert old == new
    assert old.rope_scaling.factor == 8.0
    assert old.rope_theta == 5e5


def test_biased_tensors_are_named(tmp_path):
    tensors = dense_llama.random_tensors(FAMILIES["llama"])
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
    folder = write(tmp_path / "dense", FAMILIES["llama"], tensors)
    with pytest.raises(UserError, match=r"unexpected model.layers.0.self_attn.q_proj.bias \[48\]"):
        dense.DenseFolder(folder, 4, 2)


@pytest.mark.parametrize("head_size", [2, 6, 96])
def test_rope_rows_of_a_known_matrix(head_size):
    rows = np.arange(3 * head_size * 2).reshape(3 * head_size, 2)
    there = slices.interleave(rows, head_size)
    half = head_size // 2
    for head in range(3):
        for i in range(half):
            base = head * head_size
            np.testing.assert_array_equal(there[base + 2 * i], rows[base + i])
            np.testing.assert_array_equal(there[base + 2 * i + 1], rows[base + half + i])
    np.testing.assert_array_equal(slices.deinterleave(there, head_size), rows)


@given(
    lanes=st.sampled_from([1, 2, 4, 8]),
    per_lane=st.integers(1, 3),
    half=st.integers(1, 5),
    group=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_split_then_merge_is_the_identity(lanes, per_lane, half, group, data):
    kv_heads = lanes * per_lane
    config = LaneformerConfig(
        vocab_size=8,
        hidden_size=6,
        intermediate_size=2 * lanes,
        num_hidden_layers=1,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=2 * half,
        qk_norm=data.draw(st.booleans()),
        num_lanes=lanes,
    )
    shapes = slices.dense_shapes(config, 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for paths in native.grouped(sources.flat_shapes(config)).values():
        flat = {p: rng.normal(size=shapes[slices.dense_name(p)]) for p in paths}
        lanes_of = slices.split_group(config, flat)
        assert {p: v.shape for p, v in lanes_of.items()} == paths
        back = slices.merge_group(config, lanes_of, 1)
        for path, value in flat.items():
            np.testing.assert_array_equal(back[slices.dense_name(path)], value, err_msg=path)


def test_copied_kv_heads_stay_copies_until_trained(tmp_path):
    config = dict(FAMILIES["llama"], num_key_value_heads=2)
    folder = write(tmp_path / "dense", config, dense_llama.random_tensors(config))
    convert.import_dense(folder, tmp_path / "lanes", lanes=8, delay=2)
    model = native.load_model(tmp_path / "lanes")
    assert model.config.num_key_value_heads == 8
    weight = model.layers[1].attention.wk.weight
    weight.set_value(weight[...].at[3].add(1.0))
    native.save_inference(tmp_path / "trained", model)
    convert.export(tmp_path / "trained", tmp_path / "out", check=True, layout="llama")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_key_value_heads"] == 8


def test_a_dense_source_without_lanes_and_lanes_with_them(tmp_path, capsys):
    config = FAMILIES["llama"]
    folder = write(tmp_path / "dense", config, dense_llama.random_tensors(config))
    assert cli.main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert "is a dense model; name the lanes" in capsys.readouterr().err
    golden = Path(__file__).parents[2] / "golden" / goldens.COMMITTED
    assert cli.main(["import", str(golden), str(tmp_path / "out"), "--lanes", "8"]) == 2
    assert "is no dense model to split" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""Figures of the specification, and formulas against counts made another way."""

import dataclasses

import pytest

from laneformer_jax import costs
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.presets import PRESETS, preset

RELEASE = preset("laneformer-2b")


@pytest.mark.smoke
def test_the_released_model():
    # Spec section 1: parameters, bytes read per token, KV bytes per layer and position.
    d, f, n, v = 3072, 12288, 15, 32000
    assert RELEASE.num_parameters() == n * (3 * d * d + 3 * d * f) + 2 * v * d + (2 * n + 1) * d
    assert RELEASE.num_parameters() == 2_320_069_632
    assert costs.decode_weight_bytes(RELEASE) == 4_443_531_264
    assert costs.kv_bytes_per_position(RELEASE) == 6_144
    # Ten layers hold a window of 2048, five the whole context of 4096.
    assert costs.kv_cache_bytes(RELEASE, 4096) == 6_144 * (10 * 2048 + 5 * 4096)
    assert costs.kv_cache_bytes(RELEASE, 100) == 6_144 * 15 * 100
    matmuls = n * (3 * d * d + 3 * d * f) + v * d
    assert costs.decode_flops(RELEASE, 4096) == 2 * matmuls + 4 * d * (10 * 2048 + 5 * 4096)


def test_parameter_groups_of_the_released_model():
    assert costs.parameter_groups(RELEASE) == {
        "embedding": 98_304_000,
        "attention": 15 * 3 * 3072 * 3072,
        "mlp": 15 * 3 * 3072 * 12288,
        "head": 98_304_000,
        "norms": 31 * 3072,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"lm_head_type": "lane"},
        {"lm_head_type": "vocab_parallel"},
        {"tie_word_embeddings": True},
        {"replicated_rmsn_scale": False},
        {"replicated_rmsn_scale": False, "pre_norm_lane_agg": True},
        {"qk_norm": True, "head_dim": 32},
    ],
)
def test_groups_add_up(changes):
    config = preset("tiny", **changes)
    groups = costs.parameter_groups(config)
    assert sum(groups.values()) == config.num_parameters()
    d, n, lanes = config.hidden_size, config.num_hidden_layers, config.num_lanes
    scale = d if config.replicated_rmsn_scale else lanes * d
    final = d if config.pre_norm_lane_agg else scale
    heads = 2 * n * config.head_size if config.qk_norm else 0
    assert groups["norms"] == 2 * n * scale + final + heads


def test_a_tied_table_is_read_as_the_head():
    tied, untied = preset("tiny", tie_word_embeddings=True), preset("tiny")
    assert costs.decode_weight_bytes(tied) == costs.decode_weight_bytes(untied)
    assert costs.decode_flops(tied, 1) == costs.decode_flops(untied, 1)
    assert costs.decode_weight_bytes(tied, "float32") == 2 * costs.decode_weight_bytes(tied)


@pytest.mark.parametrize("sequence", [1, 63, 64, 65, 300])
def test_training_is_three_times_the_forward_passes_of_all_positions(sequence):
    config = preset("tiny")
    assert config.sliding_window == 64
    positions = range(1, sequence + 1)
    forward = sum(costs.decode_flops(config, seen) for seen in positions)
    assert costs.training_flops(config, sequence) == pytest.approx(3 * forward / sequence, rel=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_waited_lane_sums_without_early_communication(name):
    config = preset(name)
    assert config.lane_sums() == 2 * (config.num_hidden_layers - 2) + 1
    assert costs.waited_lane_sums(config) == 1


def test_waited_lane_sums_with_early_communication():
    config = dataclasses.replace(RELEASE, use_early_comm=True)
    assert costs.waited_lane_sums(config) == 2 * 2 + 1
    dense = LaneformerConfig(broadcast_delay=20, lm_head_type="vocab_parallel")
    assert costs.waited_lane_sums(dense) == 2 * 15 == dense.lane_sums()

"""The table of roles: every parameter has one, impossible and colliding assignments are refused by name."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from laneformer_jax.checkpoint.native import abstract_params
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.sharding import AXES, FSDP, LANE, RULES, Rule, check_rules, make_mesh
from laneformer_jax.sharding import training_spec as spec_of

CONFIG = LaneformerConfig(
    vocab_size=40,
    hidden_size=24,
    head_dim=4,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=32,
    qk_norm=True,
)
HEADS = [
    {},
    {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    {"lm_head_type": "vocab_parallel"},
    {"tie_word_embeddings": True},
]


def specs(mesh, **fields):
    config = dataclasses.replace(CONFIG, **fields)
    shapes = abstract_params(config)
    return {p: (spec_of(p, x.shape, config, mesh), x.shape) for p, x in shapes.items()}


def test_the_table_has_no_collision():
    check_rules()


@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_every_large_parameter_is_split_over_fsdp_and_lane(fields):
    mesh = make_mesh(fsdp=2, lane=4)
    for path, (spec, shape) in specs(mesh, **fields).items():
        if len(shape) > 1 and "norm" not in path:
            assert set(spec) - {None} == {FSDP, LANE}, path
        for axis, size in zip(spec, shape, strict=False):
            assert axis is None or size % mesh.shape[axis] == 0


def test_an_axis_that_does_not_divide_leaves_the_tensor_whole_along_it():
    found = specs(make_mesh(fsdp=5), vocab_size=41)
    assert all(spec == P() for spec, _ in found.values())  # 24 is not a multiple of 5
    found = specs(make_mesh(fsdp=2, lane=4), vocab_size=42)
    assert found["tok_embeddings.weight"][0] == found["lm_head.weight"][0] == P(None, FSDP)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P(LANE, LANE), "sharding of mine, train: axis 'lane' splits dimensions 0 and 1"),
        (P((FSDP, LANE), FSDP), "axis 'fsdp' splits dimensions 0 and 1"),
        (P(None, "lanes"), "axis 'lanes' of dimension 1 is not one of data, fsdp, lane (did you"),
    ],
    ids=str,
)
def test_impossible_rules_are_refused_by_name(spec, message):
    with pytest.raises(UserError) as error:
        check_rules([*RULES, Rule("mine", "x", P(), spec)])
    assert message in str(error.value)


def test_lanes_are_neighbours():
    mesh = make_mesh(data=2, fsdp=2, lane=2)
    assert mesh.axis_names == AXES
    assert mesh.devices.ravel().tolist() == jax.devices()[:8]

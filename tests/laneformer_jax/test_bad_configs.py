"""A config.json may hold anything; what is wrong with it is told in one line."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.files import parse_json, read_json
from laneformer_jax.presets import preset

GOOD = preset("tiny").to_dict()
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(LaneformerConfig.__dataclass_fields__)), JUNK)
def test_any_value_in_any_field_loads_or_is_refused_by_name(name, junk):
    try:
        config = LaneformerConfig.from_dict({**GOOD, name: junk})
    except UserError:
        return
    text = json.dumps(config.to_dict())
    assert json.dumps(LaneformerConfig.from_dict(json.loads(text)).to_dict()) == text


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(("factor", "low_freq_factor", "high_freq_factor", "rope_type")), JUNK)
def test_any_rope_scaling(name, junk):
    try:
        config = LaneformerConfig.from_dict({**GOOD, "rope_scaling": {"factor": 8, name: junk}})
    except UserError:
        return
    assert math.isfinite(config.rope_scaling.factor)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("swa_layers", 3, "a list of layer numbers"),
        ("swa_layers", "01", "a list of layer numbers"),
        ("unclamped_layers", 0, "a list of layer numbers"),
        ("rope_scaling", 5, "a mapping with a factor"),
        ("rope_scaling", {"factor": "8"}, "a finite number"),
        ("rope_scaling", {"factor": math.inf}, "a finite number"),
        (
            "rope_scaling",
            {"factor": 8, "original_max_position_embeddings": -3},
            "a positive integer",
        ),
        ("norm_eps", 10**400, "a positive, finite number"),
        ("hidden_size", 2**31, "below 2**31"),
        ("num_hidden_layers", 10**8, "at most 10000"),
        ("head_dim", -4, "a positive even number"),
        ("use_comm", 1, "true or false"),
        ("hidden_act", "gelu", "silu"),
    ],
)
def test_told_by_name(field, value, said):
    with pytest.raises(UserError, match=rf"^{field}") as caught:
        LaneformerConfig.from_dict({**GOOD, field: value})
    assert said in str(caught.value)
    assert len(str(caught.value)) < 200


def test_another_object_is_no_config():
    with pytest.raises(UserError, match="holds no field of a Laneformer"):
        LaneformerConfig.from_dict({"a": 1})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" + b"0" * 5000])
def test_json_that_is_none(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"^there: not valid JSON"):
        parse_json(text, "there")

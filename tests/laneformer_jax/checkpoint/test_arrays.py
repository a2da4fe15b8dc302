"""Arrays read without orbax: what orbax itself reads, of both formats that a checkpoint's groups have."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from laneformer_jax import Laneformer
from laneformer_jax.checkpoint import arrays, native
from laneformer_jax.errors import UserError
from laneformer_jax.model import parameter_paths
from laneformer_jax.presets import preset


@pytest.fixture(scope="module", params=["inference", "training"])
def folder(request, tmp_path_factory):
    """A checkpoint, and its parameters."""
    config = preset("tiny", vocab_size=64, num_hidden_layers=2, broadcast_delay=1)
    model = Laneformer(config, rngs=nnx.Rngs(0))
    params = {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}
    path = tmp_path_factory.mktemp(request.param) / "checkpoint"
    native.save_inference(path, model)
    if request.param == "training":  # orbax's own files in the place of the plain ones
        with ocp.StandardCheckpointer() as checkpointer:
            for group, values in native.grouped(params).items():
                checkpointer.save(path / group, values, force=True)
    return path, config, params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_dtype(folder, dtype, monkeypatch):
    path, config, params = folder
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)  # whoever imports it fails
    found = native.read_params(path, native.abstract_params(config, dtype))
    assert found.keys() == params.keys()
    for name, value in found.items():
        assert value.dtype == dtype
        assert value.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
        expected = np.asarray(params[name]).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(value), expected)


def test_what_does_not_fit_is_named(folder):
    path, config, _ = folder
    target = native.abstract_params(config)
    target["norm.weight"] = jax.ShapeDtypeStruct(
        (3,), jnp.float32, sharding=target["norm.weight"].sharding
    )
    del target["lm_head.weight"]
    with pytest.raises(
        UserError, match=r"unexpected lm_head.weight; norm.weight is \[128\], must be \[3\]"
    ):
        native.read_group(path, native.HEAD, target)


def test_other_items_are_left_to_orbax(folder, tmp_path):
    """A tree that is not flat, arrays that are not there, and no item at all."""
    path, _, _ = folder
    assert arrays.opened(tmp_path) is None
    about = json.loads((path / native.HEAD / "_METADATA").read_text())
    (tmp_path / "_METADATA").write_text(json.dumps(about))
    assert arrays.opened(tmp_path) is None
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "deep", {"a": {"b": jnp.ones(3)}})
    assert arrays.opened(tmp_path / "deep") is None

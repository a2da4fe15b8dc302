"""What a model is called with is checked before XLA clamps or broadcasts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from laneformer_jax.errors import UserError
from laneformer_jax.inputs import checked
from laneformer_jax.presets import preset
from laneformer_jax.sharding import check_mesh, make_mesh

CONFIG = preset("tiny")
IDS = np.ones((2, 5), np.int32)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.ones(5, np.int32), "shape (5,)"),
        (np.ones((1, 2, 3), np.int32), "shape (1, 2, 3)"),
        (np.ones((0, 3), np.int32), "shape (0, 3)"),
        (np.ones((2, 0), np.int32), "shape (2, 0)"),
        (np.ones((1, 3)), "dtype float64"),
        (np.ones((1, 3), bool), "dtype bool"),
        ([[1, 2], [3]], "rows differ"),
        ("abc", "str must be an integer array"),
        (None, "NoneType must be an integer array"),
        ([[0, CONFIG.vocab_size]], f"must lie in 0…{CONFIG.vocab_size - 1}"),
        (jnp.full((1, 2), -1), "ids -1…-1"),
        (np.full((1, 2), 2**40), "must lie in"),
        (np.ones((1, CONFIG.max_position_embeddings + 1), np.int32), "max_position_embeddings"),
    ],
)
def test_ids(ids, said):
    with pytest.raises(UserError, match=r"^input_ids: ") as caught:
        checked(CONFIG, None, ids)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["attention_mask", "positions", "segment_ids"])
@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (5,), (1, 5), (2, 1, 5, 5)])
def test_shapes_beside_the_ids(name, shape):
    with pytest.raises(UserError, match=rf"^{name}: shape .* must be that of input_ids \(2, 5\)"):
        checked(CONFIG, None, IDS, **{name: np.ones(shape, np.int32)})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("attention_mask", "float32"), ("positions", "float32"), ("segment_ids", "bool")],
)
def test_dtypes_beside_the_ids(name, dtype):
    # A float mask would be the additive kind, 0 where this one has 1.
    with pytest.raises(UserError, match=rf"^{name}: dtype {dtype} must be"):
        checked(CONFIG, None, IDS, **{name: np.zeros(IDS.shape, dtype)})


def test_good_inputs_pass_as_they_are():
    inputs = checked(CONFIG, None, IDS.tolist(), IDS.astype(bool), IDS, jnp.asarray(IDS))
    assert all(np.array_equal(value, IDS) for value in inputs)


def test_values_are_not_asked_for_under_jit():
    out = jax.jit(lambda ids: checked(CONFIG, None, ids).input_ids)(jnp.asarray(IDS))
    assert np.array_equal(out, IDS)


def test_the_model_checks_them():
    from laneformer_jax.checkpoint.hf import abstract_model

    with pytest.raises(UserError, match=r"^input_ids: ids 0…4096 must lie in 0…4095"):
        abstract_model(CONFIG)(jnp.asarray([[0, CONFIG.vocab_size]]))
    assert nnx.state(abstract_model(CONFIG))


def test_batch_over_the_data_and_fsdp_axes():
    mesh = make_mesh(data=2, fsdp=2)
    with pytest.raises(
        UserError, match="batch 6 must be divisible by the mesh's data axis 2 × fsdp"
    ):
        checked(CONFIG, mesh, np.ones((6, 4), np.int32))


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_mesh_sizes(size):
    with pytest.raises(UserError, match=r"^mesh: lane .* must be a positive integer"):
        make_mesh(lane=size)


def test_meshes_of_others():
    with pytest.raises(UserError, match="must be a mesh of `make_mesh`"):
        check_mesh("lane", CONFIG)
    with pytest.raises(UserError, match="axes"):
        check_mesh(jax.make_mesh((1, 1), ("a", "b"), devices=jax.devices()[:1]), CONFIG)

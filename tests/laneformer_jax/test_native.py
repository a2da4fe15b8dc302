"""The native checkpoint: exact round trips, other meshes, damage and interruption."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from laneformer_jax import Laneformer, LaneformerConfig
from laneformer_jax.checkpoint import manifest, native
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.errors import UserError
from laneformer_jax.model import parameter_paths
from laneformer_jax.sharding import make_mesh, named, parameter_spec

CONFIG = LaneformerConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def model() -> Laneformer:
    return Laneformer(CONFIG, rngs=nnx.Rngs(0))


def params_of(model: Laneformer) -> dict[str, jax.Array]:
    return {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}


def assert_same(a: dict, b: dict) -> None:
    assert list(a) == list(b)
    for path in a:
        assert a[path].dtype == b[path].dtype
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]), err_msg=path)


@pytest.mark.smoke
def test_inference_round_trip(model, tmp_path):
    (tmp_path / "some.model").write_bytes(b"tokens")
    native.save_inference(tmp_path / "out", model, tokenizer=tmp_path / "some.model")
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == [
        "embedding",
        "head",
        "layer_000",
        "layer_001",
        "layer_002",
    ]
    loaded = native.load_model(tmp_path / "out")
    assert loaded.config == CONFIG
    assert_same(params_of(loaded), params_of(model))
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"tokens"
    metadata = native.read_metadata(tmp_path / "out")
    assert metadata["kind"] == "inference"
    assert metadata["dtype"] == "float32"
    assert metadata["environment"]["jax_version"] == jax.__version__


def test_a_taken_folder_and_a_missing_tokenizer_are_refused(model, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="not empty"):
        native.save_inference(tmp_path / "taken", model)
    with pytest.raises(UserError, match=r"tokenizer: .*nowhere"):
        native.save_inference(tmp_path / "out", model, tokenizer=tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_one_group_at_a_time_on_a_mesh_in_bfloat16(model, tmp_path):
    native.save_inference(tmp_path / "out", model)
    mesh = make_mesh(2, 4)
    target = native.abstract_params(CONFIG, jnp.bfloat16, mesh)
    group = native.read_group(tmp_path / "out", "layer_001", target)
    assert all(path.startswith("layers.1.") for path in group)
    wq = group["layers.1.attention.wq.weight"]
    assert wq.sharding.is_equivalent_to(
        named(mesh, parameter_spec("layers.1.attention.wq.weight", CONFIG)), wq.ndim
    )
    expected = params_of(model)["layers.1.attention.wq.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(wq), np.asarray(expected))


def test_misfitting_tensors_are_all_named(model, tmp_path):
    native.save_inference(tmp_path / "out", model)
    target = native.abstract_params(CONFIG)
    target["layers.0.attention.q_norm.weight"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    wq = target["layers.0.attention.wq.weight"]
    target["layers.0.attention.wq.weight"] = jax.ShapeDtypeStruct((8, 4, 7), wq.dtype)
    del target["layers.0.feed_forward.w2.weight"]
    with pytest.raises(UserError) as error:
        native.read_params(tmp_path / "out", target)
    assert "layers.0.attention.q_norm.weight is missing" in str(error.value)
    assert "unexpected layers.0.feed_forward.w2.weight" in str(error.value)
    assert "wq.weight is [8, 4, 32], must be [8, 4, 7]" in str(error.value)


def train_state(model: Laneformer, mesh=None) -> tuple[dict, dict]:
    params = params_of(model)
    if mesh is not None:
        params = {
            p: jax.device_put(v, named(mesh, parameter_spec(p, CONFIG))) for p, v in params.items()
        }
    return params, {"adam": optax.adamw(1e-3).init(params), "rng": jnp.arange(2, dtype=jnp.uint32)}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save_steps(folder: Path, model: Laneformer, steps, **kwargs) -> None:
    params, optimizer = train_state(model)
    checkpoints = TrainingCheckpoints(folder, **kwargs)
    for step in steps:
        scaled = jax.tree.map(lambda x, s=step: x + s, params)
        checkpoints.save(step, scaled, optimizer, CONFIG, {"data": {"at": step}})
    checkpoints.wait()
    checkpoints.close()


@pytest.mark.parametrize(("write", "read"), [((2, 4), (1, 1)), ((1, 1), (4, 2))])
def test_training_round_trip_across_meshes(model, tmp_path, write, read):
    mesh = make_mesh(*write)
    params, optimizer = train_state(model, mesh)
    checkpoints = TrainingCheckpoints(tmp_path / "run" / "checkpoints")
    checkpoints.save(7, params, optimizer, CONFIG, {"data": [1, {"x": None}]})
    checkpoints.close()
    other = TrainingCheckpoints(tmp_path / "run" / "checkpoints")
    target = train_state(model, make_mesh(*read))
    restored = other.restore(other.newest(), abstract(target[0]), abstract(target[1]))
    other.close()
    assert restored.step == 7
    assert restored.metadata["data"] == [1, {"x": None}]
    assert_same(restored.params, params)
    for path, value in restored.params.items():
        assert value.sharding.is_equivalent_to(target[0][path].sharding, value.ndim)
    for a, b in zip(jax.tree.leaves(restored.optimizer), jax.tree.leaves(optimizer), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert_same(params_of(native.load_model(tmp_path / "run")), params)


def test_retention_keeps_the_newest_and_every_nth(model, tmp_path):
    save_steps(tmp_path, model, [2, 4, 6, 8, 10], keep=2, keep_every=4)
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()) == [4, 8, 10]


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder: Path) -> str:
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes, should have"


def flip(folder: Path) -> str:
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "checksum differs"


def delete(folder: Path) -> str:
    largest_file(folder).unlink()
    return "is missing"


def drop_manifest(folder: Path) -> str:
    (folder / native.MANIFEST).unlink()
    return "MANIFEST.json is missing"


@pytest.mark.parametrize("damage", [truncate, flip, delete, drop_manifest])
def test_damage_falls_back_to_the_newest_complete_one(model, tmp_path, damage):
    save_steps(tmp_path, model, [1, 2])
    what = damage(tmp_path / "2")
    params, optimizer = train_state(model)
    with pytest.warns(UserWarning, match=f"(?s)/2 is not complete.*{what}.*falling back.*/1"):
        native.load_model(tmp_path)
    checkpoints = TrainingCheckpoints(tmp_path)
    with pytest.warns(UserWarning, match="falling back"):
        newest = checkpoints.newest()
    restored = checkpoints.restore(newest, abstract(params), abstract(optimizer))
    assert restored.step == 1
    assert_same(restored.params, jax.tree.map(lambda x: x + 1, params))
    # The run reaches step 2 again and may save it.
    checkpoints.save(2, params, optimizer, CONFIG, {})
    checkpoints.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.find(tmp_path) == tmp_path / "2"


def test_nothing_complete_left_says_what_is_wrong(model, tmp_path):
    save_steps(tmp_path, model, [1, 2])
    truncate(tmp_path / "1")
    delete(tmp_path / "2")
    checkpoints = TrainingCheckpoints(tmp_path)
    with pytest.raises(UserError, match=r"(?s)no complete checkpoint.*/2 .*missing.*/1 .*bytes"):
        checkpoints.newest()
    checkpoints.close()
    with pytest.raises(UserError, match="no such folder"):
        native.find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no native checkpoint"):
        native.find(tmp_path / "empty")


@pytest.mark.parametrize("waited", [True, False])
def test_a_save_that_cannot_be_written_is_loud_and_leaves_nothing(
    model, tmp_path, monkeypatch, waited
):
    """Also where another error ends the run before anyone waits for the save."""
    params, optimizer = train_state(model)
    checkpoints = TrainingCheckpoints(tmp_path)
    checkpoints.save(1, params, optimizer, CONFIG, {})
    checkpoints.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write_side_files", full)
    checkpoints.save(2, params, optimizer, CONFIG, {})
    if waited:
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
        checkpoints.close()
    else:
        with pytest.raises(OSError, match="No space left"):
            checkpoints.close()
    assert native.find(tmp_path) == tmp_path / "1"
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_mesh_with_explicit_axes_stays_one(model, tmp_path):
    """Also where that mesh is set while it is saved and read."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "lane"), axis_types=kinds)
    by_lane = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("lane"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {
        p: jax.device_put(np.asarray(x), by_lane if x.ndim == 3 else whole)
        for p, x in params_of(model).items()
    }
    checkpoints = TrainingCheckpoints(tmp_path)
    with jax.set_mesh(mesh):
        checkpoints.save(1, params, {"moment": params}, CONFIG, {})
        checkpoints.wait()
        restored = checkpoints.restore(
            tmp_path / "1", abstract(params), abstract({"moment": params})
        )
    checkpoints.close()
    assert_same(restored.params, params)
    assert_same(restored.optimizer["moment"], params)
    for path, value in restored.params.items():
        assert value.sharding == params[path].sharding
        assert value.sharding.mesh.axis_types == kinds


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from laneformer_jax.checkpoint import manifest
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.config import LaneformerConfig
checkpoints = TrainingCheckpoints(sys.argv[1])
params = {"tok_embeddings.weight": jnp.ones((8, 8))}
checkpoints.save(1, params, {"m": jnp.ones(3)}, LaneformerConfig(), {})
checkpoints.wait()
manifest.write_side_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(2, params, {"m": jnp.ones(3)}, LaneformerConfig(), {})
checkpoints.wait()
"""


def test_a_kill_between_the_arrays_and_their_manifest_leaves_the_save_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob("2.orbax-checkpoint-tmp*")
    assert any(p.is_file() for p in left.rglob("*"))
    checkpoints = TrainingCheckpoints(tmp_path)
    assert checkpoints.newest() == tmp_path / "1"
    assert checkpoints.steps() == [1]


def test_manifest_covers_every_array_file(model, tmp_path):
    save_steps(tmp_path, model, [3])
    files = json.loads((tmp_path / "3" / native.MANIFEST).read_text())["files"]
    on_disk = {
        str(p.relative_to(tmp_path / "3")) for p in (tmp_path / "3").rglob("*") if p.is_file()
    }
    uncovered = {Path(name).name for name in on_disk - files.keys()}
    assert uncovered <= {"MANIFEST.json", "_CHECKPOINT_METADATA", "commit_success.txt"}

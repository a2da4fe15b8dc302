"""Import and export: identical files, the public layout, and what comes along."""

import json
import struct
import zlib
from pathlib import Path

import goldens
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from laneformer_jax import cli
from laneformer_jax.checkpoint import convert
from laneformer_jax.checkpoint.manifest import MANIFEST
from laneformer_jax.checkpoint.memory import Scratch
from laneformer_jax.checkpoint.sources import LaneFolder, NativeCheckpoint, read_ahead
from laneformer_jax.checkpoint.tensorfile import DTYPES, INDEX, SINGLE, TensorFolder


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def header(file: Path) -> tuple[dict, int]:
    """Tensor entries of a safetensors file, and where its tensors begin."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__")
    return entries, 8 + length


@pytest.mark.smoke
def test_round_trip_of_the_committed_golden_through_the_command_line(tmp_path, capsys):
    source = Path(__file__).parents[2] / "golden" / goldens.COMMITTED
    native, out = tmp_path / "native", tmp_path / "out"
    assert cli.main(["import", str(source), str(native), "--verify"]) == 0
    assert cli.main(["export", str(native), str(out), "--verify"]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    told = capsys.readouterr().out
    assert told.count("57 tensors equal bit for bit") == 2
    assert told.count("logits of a probe batch equal bit for bit") == 2
    assert "remote code" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["native", "out"]


@pytest.mark.parametrize("name", [*goldens.FLOAT32, goldens.BFLOAT16])
def test_round_trip_of_every_golden(name, request, tmp_path):
    golden = goldens.golden_of(request, name)
    convert.import_lanes(golden.folder, tmp_path / "native")
    convert.export(tmp_path / "native", tmp_path / "out")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (golden.folder / file).read_bytes()


def sharded(folder: Path, config: dict, tensors: dict[str, np.ndarray], shards: int) -> Path:
    """A folder whose tensors are dealt over shards as nothing here would deal them."""
    folder.mkdir()
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(
            {n: tensors[n] for n in names[i::shards]}, folder / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(names[i::shards], file)
    total = sum(t.nbytes for t in tensors.values())
    metadata = {"total_size": total, "total_parameters": total // 4}  # as transformers 5 writes it
    index = {"weight_map": dict(sorted(weight_map.items())), "metadata": metadata}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_round_trip_of_a_sharded_set_with_its_tokenizer(tmp_path):
    golden = goldens.committed()
    source = sharded(tmp_path / "source", golden.config, golden.weights, 3)
    (source / "tokenizer.model").write_bytes(b"any")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": 0}')
    (source / "modeling_laneformer.py").write_text("raise SystemExit('remote code was run')")
    convert.import_lanes(source, tmp_path / "native")
    convert.export(tmp_path / "native", tmp_path / "out")
    before, after = files_of(source), files_of(tmp_path / "out")
    assert "modeling_laneformer.py" not in after
    del before["modeling_laneformer.py"], after["README.md"]
    assert after == before
    # Dealt anew, nothing is left of the old index.
    convert.export(tmp_path / "native", tmp_path / "one", shard_bytes=10**9)
    assert (tmp_path / "one" / SINGLE).exists()
    assert not (tmp_path / "one" / INDEX).exists()


def test_exported_shards_have_the_public_layout(tmp_path):
    golden = goldens.committed()
    convert.import_lanes(golden.folder, tmp_path / "native")
    convert.export(tmp_path / "native", tmp_path / "out", shard_bytes=300_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in golden.weights.values())
    assert set(index["weight_map"]) == set(golden.weights)
    found: dict[str, np.ndarray] = {}
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 300_000
        found |= tensors
        _, begin = header(tmp_path / "out" / file)
        size = sum(t.nbytes for t in tensors.values())
        assert (tmp_path / "out" / file).stat().st_size == begin + size
    assert found.keys() == golden.weights.keys()
    for name, value in golden.weights.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_dtype_changes_on_the_way(tmp_path):
    golden = goldens.committed()
    convert.import_lanes(golden.folder, tmp_path / "native", dtype="bfloat16")
    convert.export(tmp_path / "native", tmp_path / "bf16")
    convert.export(tmp_path / "native", tmp_path / "f32", dtype="float32")
    bf16, f32 = TensorFolder(tmp_path / "bf16"), TensorFolder(tmp_path / "f32")
    for name, value in golden.weights.items():
        rounded = value.astype(bf16.specs[name].dtype)
        assert str(rounded.dtype) == "bfloat16"
        assert bf16.read(name).tobytes() == rounded.tobytes()
        np.testing.assert_array_equal(f32.read(name), rounded.astype(np.float32))
    assert json.loads((tmp_path / "bf16/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "f32/config.json").read_text())["torch_dtype"] == "float32"


def test_memory_used_again_holds_each_group_until_the_next(tmp_path):
    golden = goldens.committed()
    convert.import_lanes(golden.folder, tmp_path / "native")
    for source in (LaneFolder(golden.folder), NativeCheckpoint(tmp_path / "native")):
        seen = []
        for group, params in read_ahead(source):
            seen.append(group)
            for path, value in params.items():
                name = path if path.startswith("lm_head.") else f"model.{path}"
                np.testing.assert_array_equal(value, golden.weights[name], err_msg=name)
        assert seen == [
            "embedding",
            *(f"layer_{i:03d}" for i in range(golden.config["num_hidden_layers"])),
            "head",
        ]


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(sorted(DTYPES))), max_size=12))
@settings(max_examples=30, deadline=None)
def test_scratch_arrays_do_not_overlap(asked):
    scratch = Scratch(1000)
    for _ in range(2):
        arrays = [scratch.array((size,), DTYPES[code]) for size, code in asked]
        for i, array in enumerate(arrays):
            array.view(np.uint8)[:] = i
        for i, array in enumerate(arrays):
            assert array.dtype == DTYPES[asked[i][1]]
            assert (array.view(np.uint8) == i).all()
        scratch.clear()


def test_orbax_reads_the_plain_files_and_the_manifest_tells_them(tmp_path):
    golden = goldens.committed()
    convert.import_lanes(golden.folder, tmp_path / "native", dtype="bfloat16")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "native" / "layer_002")
    path = "layers.2.attention.wk.weight"
    want = golden.weights[f"model.{path}"].astype(DTYPES["BF16"])
    assert np.asarray(found[path]).tobytes() == want.tobytes()
    files = json.loads((tmp_path / "native" / MANIFEST).read_text())["files"]
    told = files[f"layer_002/{path}/0.0.0"]
    assert told == {"size": want.nbytes, "crc32": zlib.crc32(want.tobytes())}
    for name, entry in files.items():
        content = (tmp_path / "native" / name).read_bytes()
        assert entry == {"size": len(content), "crc32": zlib.crc32(content)}, name

"""Import and export: identical files, the public layout, and what comes along."""

import json
import struct
from pathlib import Path

import goldens
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from laneformer_jax import cli
from laneformer_jax.checkpoint import convert
from laneformer_jax.checkpoint.tensorfile import INDEX, TensorFolder


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
    convert.export_lanes(tmp_path / "native", tmp_path / "out")
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
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_round_trip_of_a_sharded_set_with_its_tokenizer(tmp_path):
    golden = goldens.load_golden(Path(__file__).parents[2] / "golden" / goldens.COMMITTED)
    source = sharded(tmp_path / "source", golden.config, golden.weights, 3)
    (source / "tokenizer.model").write_bytes(b"any")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": 0}')
    (source / "modeling_laneformer.py").write_text("raise SystemExit('remote code was run')")
    convert.import_lanes(source, tmp_path / "native")
    convert.export_lanes(tmp_path / "native", tmp_path / "out")
    before, after = files_of(source), files_of(tmp_path / "out")
    assert "modeling_laneformer.py" not in after
    del before["modeling_laneformer.py"], after["README.md"]
    assert after == before


def test_exported_shards_have_the_public_layout(tmp_path):
    golden = goldens.load_golden(Path(__file__).parents[2] / "golden" / goldens.COMMITTED)
    convert.import_lanes(golden.folder, tmp_path / "native")
    convert.export_lanes(tmp_path / "native", tmp_path / "out", shard_bytes=300_000)
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
    golden = goldens.load_golden(Path(__file__).parents[2] / "golden" / goldens.COMMITTED)
    convert.import_lanes(golden.folder, tmp_path / "native", dtype="bfloat16")
    convert.export_lanes(tmp_path / "native", tmp_path / "bf16")
    convert.export_lanes(tmp_path / "native", tmp_path / "f32", dtype="float32")
    bf16, f32 = TensorFolder(tmp_path / "bf16"), TensorFolder(tmp_path / "f32")
    for name, value in golden.weights.items():
        rounded = value.astype(bf16.specs[name].dtype)
        assert str(rounded.dtype) == "bfloat16"
        assert bf16.read(name).tobytes() == rounded.tobytes()
        np.testing.assert_array_equal(f32.read(name), rounded.astype(np.float32))
    assert json.loads((tmp_path / "bf16/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "f32/config.json").read_text())["torch_dtype"] == "float32"

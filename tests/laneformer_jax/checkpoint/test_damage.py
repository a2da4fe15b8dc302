"""Damaged and hostile inputs: one line that names the tensor or file, and nothing left behind."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import goldens
import numpy as np
import pytest
from goldens import write_folder
from safetensors.numpy import save_file

from laneformer_jax import Laneformer, cli
from laneformer_jax.checkpoint import convert, manifest, native
from laneformer_jax.checkpoint.tensorfile import INDEX, SINGLE, TensorFolder, count_nonfinite
from laneformer_jax.errors import UserError

GOLDEN = goldens.committed()
WK = "model.layers.3.attention.wk.weight"


@pytest.fixture
def two_shards(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOLDEN.config))
    names = list(GOLDEN.weights)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: GOLDEN.weights[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, capsys) -> str:
    """The one line with which both the import and from_pretrained refuse a folder."""
    target = folder.parent / "out"
    assert cli.main(["import", str(folder), str(target)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    with pytest.raises(UserError) as raised:
        Laneformer.from_pretrained(folder)
    assert str(raised.value) in line
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    return line


def reindex(folder: Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_missing_shard(two_shards, capsys):
    (two_shards / "model-00002-of-00002.safetensors").unlink()
    line = refused(two_shards, capsys)
    assert "model-00002-of-00002.safetensors: shard is missing" in line
    assert "model." in line.split("puts tensor ")[1]


def test_truncated_file(folder, capsys):
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-100])
    assert f"{folder / SINGLE}: not a whole safetensors file" in refused(folder, capsys)


@pytest.mark.parametrize("kept", [0, 5, 8, 200])
def test_file_cut_inside_its_header(folder, kept, capsys):
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:kept])
    assert f"{folder / SINGLE}: not a whole safetensors file" in refused(folder, capsys)


@pytest.mark.parametrize(
    "lie",
    [
        lambda entry: entry.update(data_offsets=[0, entry["data_offsets"][1] + 4]),
        lambda entry: entry.update(data_offsets=[10**9, 10**9 + 8192]),
        lambda entry: entry.update(shape=[8, 4, 65]),
        lambda entry: entry.update(dtype="F77"),
    ],
    ids=["overlap", "beyond", "shape", "dtype"],
)
def test_header_that_lies(folder, lie, capsys):
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    lie(header[WK])
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert f"{folder / SINGLE}: not a whole safetensors file" in refused(folder, capsys)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1])
def test_header_length_beyond_all_memory(folder, length, capsys):
    raw = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(struct.pack("<Q", length) + raw[8:])
    assert f"{folder / SINGLE}: not a whole safetensors file" in refused(folder, capsys)


@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json"])
@pytest.mark.parametrize("kind", ["folder", "dangling", "loop"])
def test_what_should_be_a_file_is_none(folder, name, kind, capsys):
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name if kind == "loop" else folder / "nowhere")
    if name == INDEX and kind != "folder":
        return  # a link to nothing is no index: the single file is read
    assert name in refused(folder, capsys)


def test_empty_and_eight_bit_tensors_are_named(tmp_path, capsys):
    import ml_dtypes

    for name, value, told in (
        ("empty", np.zeros((0, 4, 64), np.float32), f"{WK} is [0, 4, 64], must be [8, 4, 64]"),
        ("f8", GOLDEN.weights[WK].astype(ml_dtypes.float8_e4m3fn), f"tensor {WK} is F8_E4M3;"),
    ):
        (tmp_path / name).mkdir()
        folder = write_folder(tmp_path / name / "source", {**GOLDEN.weights, WK: value})
        assert told in refused(folder, capsys)


def test_a_misspelt_key_is_warned_of(folder, tmp_path):
    config = {**GOLDEN.config, "broadcast_dely": 3}
    (folder / "config.json").write_text(json.dumps(config))
    told = r"config.json: 'broadcast_dely' is not known .*did you mean 'broadcast_delay'\?"
    with pytest.warns(UserWarning, match=told):
        Laneformer.from_pretrained(folder)


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path, capsys):
    tensors = dict(GOLDEN.weights)
    del tensors["model.layers.1.ffn_norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.9.attention.wq.weight"] = np.zeros((8, 8, 64), np.float32)
    tensors[WK] = np.ascontiguousarray(tensors[WK].swapaxes(1, 2))
    line = refused(write_folder(tmp_path / "source", tensors), capsys)
    for told in (
        "missing model.layers.1.ffn_norm.weight [64]",
        "missing lm_head.weight [128, 64]",
        "unexpected model.layers.9.attention.wq.weight [8, 8, 64]",
        f"{WK} is [8, 64, 4], must be [8, 4, 64]",
    ):
        assert told in line


def test_integer_tensors_are_refused(tmp_path, capsys):
    tensors = {**GOLDEN.weights, WK: GOLDEN.weights[WK].astype(np.int8)}
    line = refused(write_folder(tmp_path / "source", tensors), capsys)
    assert f"tensor {WK} is I8; must be one of F32, BF16, F16" in line


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("../elsewhere.safetensors", "outside this folder"),
        ("/etc/passwd", "outside this folder"),
        ("model-00009-of-00002.safetensors", "shard is missing"),
        ("pytorch_model.bin", "only .safetensors files are loaded"),
        (7, "not a JSON index"),
    ],
)
def test_index_that_points_elsewhere(two_shards, file, told, capsys):
    reindex(two_shards, lambda index: index["weight_map"].update({WK: file}))
    line = refused(two_shards, capsys)
    assert told in line
    assert WK in line or INDEX in line


def test_index_against_its_shards(two_shards, capsys):
    def swap(index):
        held = index["weight_map"][WK]
        others = set(index["weight_map"].values()) - {held}
        index["weight_map"][WK] = others.pop()

    reindex(two_shards, swap)
    assert f"lacks tensor {WK}" in refused(two_shards, capsys)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', "\x00"])
def test_index_that_is_none(two_shards, text, capsys):
    (two_shards / INDEX).write_text(text)
    assert f"{INDEX}: not a JSON index" in refused(two_shards, capsys)


def test_tensor_in_two_shards(two_shards, capsys):
    files = sorted(two_shards.glob("*.safetensors"))
    for file in files:
        names = json.loads((two_shards / INDEX).read_text())["weight_map"]
        held = {n: GOLDEN.weights[n] for n, f in names.items() if f == file.name or n == WK}
        save_file(held, file)
    assert f"tensor {WK} is also in" in refused(two_shards, capsys)


class _Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_loaded(folder, name, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / SINGLE).unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    line = refused(folder, capsys)
    assert f"{name} is a pickle, which is never loaded" in line
    assert cli.main(["import", str(folder / name), str(folder.parent / "out")]) == 2
    assert "is a file; a folder" in capsys.readouterr().err
    assert not (folder / "exploded").exists()


def test_a_pickle_under_a_safetensors_name_is_never_loaded(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / SINGLE).write_bytes(pickle.dumps(_Bomb()))
    assert "not a whole safetensors file" in refused(folder, capsys)
    assert not (folder / "exploded").exists()


def test_remote_code_is_never_run(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "modeling.py").write_text("import os; os.mkdir('exploded')")
    config = {**GOLDEN.config, "model_type": "exotic", "auto_map": {"AutoModel": "modeling.Exotic"}}
    (folder / "config.json").write_text(json.dumps(config))
    line = refused(folder, capsys)
    assert "model_type 'exotic' is not a Laneformer" in line
    assert "code that is never run" in line
    config["model_type"] = "laneformer_tp"  # ours: its weights load, its code is not looked at
    (folder / "config.json").write_text(json.dumps(config))
    Laneformer.from_pretrained(folder)
    assert not (folder / "exploded").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_weights_are_warned_of(tmp_path, value):
    tensors = {**GOLDEN.weights, WK: GOLDEN.weights[WK].copy()}
    tensors[WK][2, 1, 5:7] = value
    folder = write_folder(tmp_path / "source", tensors)
    told = f"{folder / SINGLE}: tensor {WK} holds 2 NaN or infinite values"
    with pytest.warns(UserWarning, match=told):
        assert cli.main(["import", str(folder), str(tmp_path / "out")]) == 0
    with pytest.warns(UserWarning, match="holds 2 NaN or infinite values"):
        model = Laneformer.from_pretrained(folder)
    assert not np.isfinite(np.asarray(model.layers[3].attention.wk.weight[...])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_pattern_is_judged_as_numpy_does(dtype):
    import ml_dtypes

    if dtype == "float32":
        bits = np.random.default_rng(0).integers(2**32, size=20_000, dtype=np.uint32)
        bits[:6] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001, 0, 0x80000000]
        values = bits.view(np.float32)
    else:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        values = np.arange(2**16, dtype=np.uint16).view(kind)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        finite = np.isfinite(values.astype(np.float64))
    assert count_nonfinite(values) == np.count_nonzero(~finite)
    assert count_nonfinite(values[finite]) == 0


def test_values_beyond_a_narrower_dtype_are_warned_of(tmp_path):
    tensors = {**GOLDEN.weights, WK: GOLDEN.weights[WK].copy()}
    tensors[WK][0, 0, 0] = 1e6
    folder = write_folder(tmp_path / "source", tensors)
    with pytest.warns(UserWarning, match=rf"{WK}: 1 values exceed the range of float16"):
        convert.import_lanes(folder, tmp_path / "out", dtype="float16")


def test_tied_heads_as_the_config_says(tmp_path, capsys):
    embedding = GOLDEN.weights["model.tok_embeddings.weight"]
    without = {n: t for n, t in GOLDEN.weights.items() if n != "lm_head.weight"}
    absent = write_folder(tmp_path / "absent", without, tie_word_embeddings=True)
    present = write_folder(
        tmp_path / "present", {**without, "lm_head.weight": embedding}, tie_word_embeddings=True
    )
    other = write_folder(tmp_path / "other", GOLDEN.weights, tie_word_embeddings=True)
    ids = np.arange(10)[None]
    want = Laneformer.from_pretrained(absent)(ids)
    np.testing.assert_array_equal(Laneformer.from_pretrained(present)(ids), want)
    with pytest.warns(UserWarning, match=r"lm_head.weight differs from .* ties them"):
        np.testing.assert_array_equal(Laneformer.from_pretrained(other)(ids), want)
    convert.import_lanes(present, tmp_path / "native")
    convert.export(tmp_path / "native", tmp_path / "out")
    assert "lm_head.weight" not in TensorFolder(tmp_path / "out").specs
    capsys.readouterr()
    (tmp_path / "alone").mkdir()
    untied = write_folder(tmp_path / "alone" / "untied", without, tie_word_embeddings=False)
    assert "missing lm_head.weight [128, 64]" in refused(untied, capsys)


def test_a_taken_target_is_left_alone(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert cli.main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_export_of_what_is_no_checkpoint(folder, tmp_path, capsys):
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "is already a Hugging Face folder" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_export_of_a_corrupt_checkpoint(folder, tmp_path, capsys):
    convert.import_lanes(folder, tmp_path / "native")
    victim = next((tmp_path / "native" / "layer_002").rglob("0.0.0"))
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    assert cli.main(["export", str(tmp_path / "native"), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert victim.name in line
    assert "checksum differs" in line


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda item, array: shutil.rmtree(item), "layer_002: is missing, or no whole item"),
        (lambda item, array: (item / "_METADATA").unlink(), "layer_002: is missing, or no whole"),
        (lambda item, array: os.truncate(array / "0.0.0", 10), r"wk.weight/0.0.0: cannot be read"),
    ],
    ids=["item", "metadata", "short"],
)
def test_damage_that_the_manifest_does_not_tell(folder, tmp_path, damage, told, capsys):
    """As when someone edits a checkpoint by hand and makes the manifest anew."""
    native_folder = tmp_path / "native"
    convert.import_lanes(folder, native_folder)
    item = native_folder / "layer_002"
    damage(item, item / "layers.2.attention.wk.weight")
    (native_folder / manifest.MANIFEST).unlink()
    manifest.write_side_files(native_folder, {})
    capsys.readouterr()
    assert cli.main(["export", str(native_folder), str(tmp_path / "out")]) == 2
    line = next(t for t in capsys.readouterr().err.splitlines() if t.startswith("error: "))
    assert told in line
    assert not (tmp_path / "out").exists()


def test_verify_finds_a_tensor_that_changed_on_its_way(folder, tmp_path, monkeypatch):
    add = native.Writer.add

    def slip(self, group, params):
        params = {p: v.copy() for p, v in params.items()}
        if group == "layer_001":
            params["layers.1.feed_forward.w2.weight"].flat[7] += 1
        add(self, group, params)

    monkeypatch.setattr(native.Writer, "add", slip)
    with pytest.raises(UserError, match=r"verify: tensor model.layers.1.feed_forward.w2.weight"):
        convert.import_lanes(folder, tmp_path / "out", check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]

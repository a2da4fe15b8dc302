"""`laneformer info` on folders: what they hold, without loading it."""

import json
import subprocess
import sys
from pathlib import Path

import dense_llama
import goldens
import pytest
from dense_llama import FAMILIES, write

from laneformer_jax import cli
from laneformer_jax.checkpoint import convert
from laneformer_jax.checkpoint.contents import contents
from laneformer_jax.errors import UserError

GOLDEN = Path(__file__).parents[2] / "golden" / goldens.COMMITTED


def test_hugging_face_folders(tmp_path):
    held = contents(GOLDEN)
    assert held["kind"] == "lanes"
    assert held["dtype"] == "float32"
    assert held["tensors"] == 57
    assert held["bytes"] == 953_600
    folder = write(tmp_path / "d", FAMILIES["llama"], dense_llama.random_tensors(FAMILIES["llama"]))
    assert contents(folder)["kind"] == "dense"
    assert contents(tmp_path) is None
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"model.safetensors: not a whole safetensors file"):
        contents(folder)


def test_native_checkpoints(tmp_path, capsys):
    convert.import_lanes(GOLDEN, tmp_path / "native", dtype="bfloat16")
    held = contents(tmp_path / "native")
    assert held["kind"] == "inference"
    assert held["holds"] == "a native inference checkpoint, without optimizer"
    assert held["dtype"] == "bfloat16"
    assert held["complete"]
    assert cli.main(["info", str(tmp_path / "native")]) == 0
    told = capsys.readouterr().out
    assert "a native inference checkpoint, without optimizer" in told
    assert "complete: yes" in told
    next((tmp_path / "native/layer_001").rglob("0.0.0")).unlink()
    assert not contents(tmp_path / "native")["complete"]


def test_a_run(tmp_path):
    for step in (100, 20):
        folder = tmp_path / "checkpoints" / str(step)
        folder.mkdir(parents=True)
        metadata = {"kind": "training", "dtype": "float32", "step": step}
        (folder / "metadata.json").write_text(json.dumps(metadata))
        (folder / "MANIFEST.json").write_text('{"files": {"config.json": {"size": 2, "crc32": 0}}}')
        (folder / "config.json").write_text("{}")
    held = contents(tmp_path)
    assert held["holds"] == "a training run with 2 checkpoints"
    assert held["checkpoints"] == [20, 100]
    assert held["step"] == 100
    assert held["complete"]
    assert contents(tmp_path / "checkpoints" / "20")["kind"] == "training"


def test_a_dense_folder_gets_no_lane_figures(tmp_path, capsys):
    folder = write(tmp_path / "d", FAMILIES["qwen3"], dense_llama.random_tensors(FAMILIES["qwen3"]))
    assert cli.main(["info", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["contents"]["kind"] == "dense"
    assert "parameters" not in told


def test_info_loads_no_jax():
    code = (
        "import sys; from laneformer_jax import cli; "
        f"cli.main(['info', {str(GOLDEN)!r}]); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=GOLDEN.parents[2])

"""`benchmarks/gpu_decode.py --tiny`: all of what it measures on a GPU, end to end in the interpreter."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_decode.py"


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPT.exists(), reason="benchmarks/ is not installed with the package")
def test_every_part_runs(tmp_path, monkeypatch, capsys):
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--no-peer", "--json", str(file)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    figures = json.loads(file.read_text())
    assert not figures["measured_on_gpu"]
    assert len(figures["kernels"]) == 2 * 6  # at one lane and at eight
    assert max(row["error"] for row in figures["kernels"]) < 2**-7
    ways = ["xla", "fused", "layer", "token"]
    assert [row["kernels"] for row in figures["tokens"]] == 2 * ways  # at two contexts
    assert [row["kernels"] for row in figures["shard"]] == ["xla", "fused", "layer"]
    out = capsys.readouterr().out
    assert "not run on a GPU" in out
    assert out.count("PROJECTION") == 1

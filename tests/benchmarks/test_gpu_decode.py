"""The GPU benchmark runs end to end where there is no GPU, checks what it times, and says what it is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_tiny_runs_anywhere(tmp_path):
    out = subprocess.run(
        [
            sys.executable,
            "benchmarks/gpu_decode.py",
            "--tiny",
            "--no-peer",
            "--json",
            tmp_path / "figures.json",
        ],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "not run on a GPU" in out.stdout
    assert "PROJECTION" in out.stdout
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["measured_on_gpu"] is False
    assert {(row["lanes"], row["kernel"]) for row in record["kernels"]} == {
        (lanes, kernel)
        for lanes in (1, 8)
        for kernel in (
            "norm_qkv",
            "attention",
            "attention_out",
            "norm_gate_up",
            "mlp_down",
            "head",
        )
    }
    assert all(row["error"] < 2**-7 for row in record["kernels"])
    assert {(row["kernels"], row["context"]) for row in record["tokens"]} == {
        (kernels, context) for kernels in ("xla", "fused", "layer", "token") for context in (7, 40)
    }
    assert [row["kernels"] for row in record["shard"]] == ["xla", "fused", "layer"]

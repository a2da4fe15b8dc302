import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_bench_measures_what_it_checked(tmp_path):
    out = tmp_path / "speed.json"
    sizes = "--batch 2 --seq 16 --new 4 --repeats 1".split()
    command = [sys.executable, "benchmarks/speed.py", *sizes, "--json", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert set(record["environment"]) == {"command", "commit", "date", "machine", "versions"}
    assert [row["name"] for row in record["rows"]] == ["forward", "training step", "decoded token"]
    for row in record["rows"]:
        assert row["check"].startswith("checked: ")
        assert row["check"] in done.stdout
    forward = record["rows"][0]
    assert forward["figures"]["tokens/s"] == pytest.approx(2 * 16 / forward["seconds"])

"""Conversions that are interrupted or killed leave nothing half-written, and can be made again."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laneformer_jax import cli
from laneformer_jax.checkpoint import convert, workplace
from laneformer_jax.checkpoint.tensorfile import SINGLE

_SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of a script
from laneformer_jax import cli
from laneformer_jax.checkpoint import convert, native
def slow(of, name, last):
    method = getattr(of, name)
    def slowed(self, key, value):
        method(self, key, value)
        if key == last:
            print("half-way", flush=True)
            time.sleep(60)
    setattr(of, name, slowed)
slow(native.Writer, "add", "layer_001")
slow(convert.TensorWriter, "write", "model.layers.1.attention.wo.weight")
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def half_way(folder, tmp_path):
    """Begins a conversion of `folder` and stops it in the middle: what it reads, the process."""

    def begin(command):
        source = folder
        if command == "export":
            convert.import_lanes(folder, source := tmp_path / "native")
        arguments = [command, str(source), str(tmp_path / "out")]
        process = subprocess.Popen(
            [sys.executable, "-c", _SLOW, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert process.stdout.readline() == "half-way\n"
        return source, process

    return begin


@pytest.mark.parametrize(
    ("command", "number"),
    [("import", signal.SIGINT), ("import", signal.SIGTERM), ("export", signal.SIGTERM)],
)
def test_an_interrupted_conversion_leaves_nothing(half_way, tmp_path, command, number):
    source, process = half_way(command)
    sources = {"source", source.name}
    assert len(list(tmp_path.iterdir())) == len(sources) + 1
    process.send_signal(number)
    assert process.wait(60) == 130
    assert {p.name for p in tmp_path.iterdir()} == sources


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_killed_conversion_can_be_rerun_and_leaves_nothing(half_way, folder, tmp_path, command):
    source, process = half_way(command)
    running = [p for p in tmp_path.iterdir() if p.name.startswith(".out.")]
    workplace.sweep(tmp_path / "out")  # of a conversion that still runs: not touched
    assert [p for p in running if p.exists()] == running
    process.kill()
    process.wait(60)
    time.sleep(0.1)
    assert cli.main([command, str(source), str(tmp_path / "out")]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"source", source.name, "out"}
    exported = tmp_path / "out"
    if command == "import":
        convert.export(tmp_path / "out", exported := tmp_path / "again")
    assert (exported / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()

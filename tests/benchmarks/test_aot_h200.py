"""How XLA's list of launches is read, and what it says of the engine's loop over eight H200s."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "aot_h200.py"
SPEC = importlib.util.spec_from_file_location("aot_h200", PATH)
aot = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(aot)

PLUGINS = importlib.util.find_spec("jax_plugins")
needs_plugin = pytest.mark.skipif(
    PLUGINS is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="needs the CUDA plugin, not a GPU: pip install 'laneformer-jax[cuda13]'",
)
STEP = """\
001: kCustomKernel [source       | next=004 (3)] loop_sine_fusion grid: [1, 1, 1]
002: kCopy         [source       | next=004 (3)] kCopy
003: kAsyncStart   [prev=002 (1) | next=031 (19)] stream=communication_stream[0], async_id=3
    004: kAllReduce [source | sink] kAllReduce
005: kCustomKernel [prev=001 (3) | next=006 (1) ] kernel=norm_gate_up, grid: [384, 1, 1]
006: kCustomKernel [prev=005 (1) | next=007 (1) ] mlp_down__1 grid: [384, 1, 1]
007: kAsyncDone    [source       | sink         ] async_id=3
008: kAllReduce    [prev=006 (1) | sink         ] kAllReduce
"""


def test_reads_a_step():
    launched = aot.read(STEP)
    assert launched.kernels == 4
    assert launched.by_name == {"loop_sine_fusion": 1, "copy": 1, "norm_gate_up": 1, "mlp_down": 1}
    assert launched.in_flight == [2, 0]


def test_reads_the_body_of_a_loop():
    body = "".join(f"    {line}\n" for line in STEP.splitlines())
    around = "000: kCopy [source | sink] kCopy\n009: kWhile [source | sink]\ncondition:\n"
    around += "    010: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]\n  body:\n"
    assert aot.read(around + body + "011: kCopy [source | sink] kCopy\n") == aot.read(STEP)


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize(("kernels", "most"), [("fused", 93), ("layer", 45)])
@pytest.mark.parametrize("loop", [False, True])
def test_delayed_sums_run_beside_kernels(kernels, most, loop):
    """The 2B model with a lane on each of eight H200s: 26 delayed sums, then the lane mean and the
    exchange of the likeliest token."""
    row = aot.run(aot.Case(kernels, 8, loop=loop))
    assert row["kernel_launches"] <= most  # with the engine's own bookkeeping
    assert row["all_reduces"] == 28
    assert all(row["in_flight"][:26])
    assert row["launches"].get("copy", 0) <= 2 * loop  # of a few numbers
    assert row["temp_bytes"] < 2 * 2049 * 96 * 2  # one layer's keys, with a window


@pytest.mark.slow
@needs_plugin
def test_undelayed_sums_are_waited_for():
    row = aot.run(aot.Case("fused", 8, delayed=False))
    assert row["all_reduces"] == 32
    assert not any(row["in_flight"][:30])

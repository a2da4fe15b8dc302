"""Where time goes: speed, MFU, goodput over restarts, memory."""

import jax
import pytest

from laneformer_jax.hardware import DEVICES
from train import clock
from train.clock import TIMED, Clock, earlier, mfu


class Time:
    """A clock that only moves when told."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock.time, "time", lambda: 5000.0 + self.now)

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch) -> Time:
    return Time(monkeypatch)


def test_pauses_and_waiting_are_no_useful_time(time):
    made = Clock(tokens=512, flops=1e9, began=None, useful=0.0)
    with made.paused():
        time.pass_(30)  # compiling
    time.pass_(4)
    made.tick()
    with made.paused():
        time.pass_(10)  # evaluating
    time.pass_(6)
    made.tick()
    figures = made.lap(waited=2.0)
    assert figures["step_s"] == 5
    assert figures["tokens_per_s"] == 2 * 512 / 10
    assert figures["model_flops_per_s"] == 2e9 / 10
    assert figures["data_wait"] == 0.2
    assert figures["time"] == 6050
    assert figures["wall_s"] == 50
    assert figures["useful_s"] == 8
    assert figures["goodput"] == 8 / 50
    assert figures.keys() <= TIMED
    time.pass_(3)
    made.tick()
    figures = made.lap(waited=2.0)  # only what came since
    assert (figures["step_s"], figures["data_wait"], figures["useful_s"]) == (3, 0, 11)


def test_goodput_goes_on_over_restarts_and_lost_updates_do_not_count(time):
    records: list[dict] = []
    first = Clock(1, 1.0, *earlier(records, 0))
    for step in range(1, 9):
        time.pass_(10)
        first.tick()
        records.append({"step": step, **first.lap(0.0)})
    assert records[-1]["goodput"] == 1
    records.append({"step": 8, "eval_loss": 1.0})
    time.pass_(20)  # killed after step 8, started again; step 5 was saved
    assert earlier(records, 5) == (6000, 50)
    second = Clock(1, 1.0, *earlier(records, 5))
    time.pass_(10)
    second.tick()
    figures = second.lap(0.0)
    assert figures["wall_s"] == 110
    assert figures["useful_s"] == 60
    assert figures["goodput"] == pytest.approx(60 / 110)
    # Killed before anything was saved: nothing is useful, all of it is wall time.
    assert earlier(records, 0) == (6000, 0)
    assert earlier([{"step": 1, "loss": 2.0}], 3) == (None, 0)  # of a version without these


def test_mfu_is_of_the_dense_peak_of_all_devices():
    assert mfu(0.4 * 8 * 989.5e12, "NVIDIA H200", 8) == pytest.approx(0.4)
    assert mfu(650e12, "NVIDIA B200", 1) == pytest.approx(650 / 2250)
    assert mfu(1e12, "cpu", 1) is None


def test_peaks_are_the_vendors_dense_figures():
    """NVIDIA's sheets print the double, "with sparsity"."""
    sheets = {"h200": 1979 / 2, "h100": 1979 / 2, "b200": 4500 / 2, "mi300x": 1307.4}
    assert {n: d.bf16_flops / 1e12 for n, d in DEVICES.items()} == pytest.approx(sheets)


def test_memory_is_this_process_at_its_highest(monkeypatch):
    def device(stats):
        return type("Device", (), {"memory_stats": lambda self: stats})()

    monkeypatch.setattr(jax, "local_devices", lambda: [device(None)])
    figures = clock.memory()
    assert figures.keys() == {"host_memory_peak_bytes"}
    assert 2**24 < figures["host_memory_peak_bytes"] < 2**40  # bytes, not kilobytes
    held = [device({"peak_bytes_in_use": 7}), device({"peak_bytes_in_use": 9})]
    monkeypatch.setattr(jax, "local_devices", lambda: held)
    assert clock.memory()["device_memory_peak_bytes"] == 9

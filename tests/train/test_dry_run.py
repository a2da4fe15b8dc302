"""A dry run: exact where it says so, and refused by name where a run would be."""

import dataclasses

import pytest

from laneformer_jax import costs, settings
from laneformer_jax.checkpoint.native import abstract_params
from laneformer_jax.errors import UserError
from laneformer_jax.hardware import find_device
from train import RunConfig
from train.config import MeshConfig
from train.dry_run import choose_mesh, dry_run, text

BASE = (
    "model.preset=tiny",
    "model.overrides.num_hidden_layers=2",
    "tokenizer=somewhere",
    "data.sources.std.kind=stdlib",
    "train.batch_size=8",
    "train.seq_len=32",
    "train.steps=1000",
    "train.remat=layer",
)


def load(*overrides: str) -> RunConfig:
    return settings.load(RunConfig, None, [*BASE, *overrides])


@pytest.fixture(autouse=True)
def no_cuda_compiler(monkeypatch):
    monkeypatch.setattr("train.dry_run.target_config", lambda device: None)


def test_figures_of_a_small_run():
    config, device = load(), find_device("h200")
    assert config.model is not None
    model = config.model.build()
    report = dry_run(config, 8, device)
    assert report.mesh == (1, 8, 1)  # FSDP over everything unless the config has a mesh
    norms = sum(x.size for p, x in abstract_params(model).items() if "norm" in p)
    held = 4 * ((model.num_parameters() - norms) // 8 + norms)
    assert report.state["parameters"] == report.state["gradients"] == held
    counters = 4 * 6  # Adam's count, the schedule's, and those of skipped updates
    assert report.state["optimizer"] == 2 * held + counters
    assert report.tokens_per_step == 256
    assert report.flops_per_token == costs.training_flops(model, 32)
    stream = 8 * 1 * 32 * 128 * 4  # lanes, rows of a device, tokens, hidden, float32
    assert report.step["streams kept for the backward pass"] == 2 * 2 * stream
    longest = max(report.seconds.values())
    assert 0 < report.mfu_bound <= 0.75  # one forward pass in four is made again
    assert report.days == pytest.approx(longest * 1000 / 86400)
    shown = text(report)
    assert "data 1 × fsdp 8 × lane 1, H200" in shown
    assert shown.count("(estimate") == len(report.step) + 1
    assert report.bytes == sum(report.state.values()) + sum(report.step.values())
    # What XLA tells for the device itself takes the place of the estimates, and of the gradients.
    compiled = dataclasses.replace(report, temporary=5 * 10**9)
    assert compiled.bytes == report.bytes - sum(report.step.values()) - held + 5 * 10**9
    assert "all                                        5.0" in text(compiled)
    assert "GB  (compiled; fits in 141 GB)" in text(compiled)


def test_the_mesh_must_fit_the_devices():
    assert choose_mesh(MeshConfig(2, 2, 2), 8) == MeshConfig(2, 2, 2)
    assert choose_mesh(MeshConfig(24, 8, 1), 8) == MeshConfig(1, 8, 1)
    with pytest.raises(UserError, match=r"fsdp 3 × lane 2 is 6 devices, which must divide"):
        choose_mesh(MeshConfig(fsdp=3, lane=2), 8)
    with pytest.raises(UserError, match=r"divisible by accumulate 2 × data 1 × fsdp 8"):
        dry_run(load("train.accumulate=2"), 8, find_device("h200"))

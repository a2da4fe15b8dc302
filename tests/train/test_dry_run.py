"""A dry run: exact where it says so, and refused by name where a run would be."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from laneformer_jax import cli, costs, settings
from laneformer_jax.checkpoint import native
from laneformer_jax.checkpoint.native import abstract_params
from laneformer_jax.errors import UserError
from laneformer_jax.hardware import find_device
from laneformer_jax.model import Laneformer
from train import RunConfig
from train.config import MeshConfig
from train.dry_run import choose_mesh, compile_step, dry_run, text

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
    with pytest.raises(UserError, match=r"fsdp: 3, lane: 1"):
        choose_mesh(MeshConfig(fsdp=8), 3)
    with pytest.raises(UserError, match=r"batch_size = 8: must be .*; the nearest is 9$"):
        dry_run(load(), 9, find_device("h200"))


def test_a_run_that_starts_from_another_has_that_ones_model(tmp_path):
    start = load().model
    assert start is not None
    native.save_inference(tmp_path / "start", Laneformer(start.build(), rngs=nnx.Rngs(0)))
    overrides = ("model=null", "tokenizer=null", f"init_from={tmp_path / 'start'}")
    compiled = compile_step(load(*overrides), 1, find_device("h200"))
    assert compiled.plan.config == start.build()
    told = r"init_from: .*nowhere: no such folder; --dry-run .*init_from=null model.preset="
    with pytest.raises(UserError, match=told):
        compile_step(load(*overrides, "init_from=nowhere"), 8, find_device("h200"))


def test_recipes_that_are_given_a_tokenizer_need_none(monkeypatch, capsys):
    """On the command line, which may not change this process's devices."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    asked = ["--dry-run", "--devices", "8", "--hardware", "h200"]
    assert cli.main(["train", "--config", "quickstart/pretrain", *asked]) == 0
    told = capsys.readouterr().out
    assert "tokens per step         1,024 in 1 microbatches" in told
    assert "data 1 × fsdp 8 × lane 1, H200" in told
    assert not Path("unread").exists()


def test_the_recipe_for_4t_tokens_by_hand(monkeypatch):
    """FLOPs of a token, tokens of an update and the days, without the code that the report is made with."""
    recipe = settings.load(RunConfig, settings.find_config("laneformer-2b/pretrain"))
    # What lies in the layers' matrices and the head; the embedding is looked up.
    attention = 15 * 3072 * (32 + 16 + 16 + 32) * 96
    products = attention + 15 * 3 * 3072 * 12288 + 32000 * 3072
    # Keys that a token sees on the mean: the whole half, or 2,048 once there are as many.
    whole, window = 4097 / 2, (2048 * 2049 / 2 + 2048 * 2048) / 4096
    per_token = 3 * (2 * products + 4 * 32 * 96 * (5 * whole + 10 * window))
    assert per_token == costs.training_flops(recipe.model.build(), 4096) == 14273925120
    tokens = 1152 * 4096
    assert recipe.train.batch_size * recipe.train.seq_len == tokens
    assert recipe.train.steps * tokens == pytest.approx(4e12, rel=1e-6)
    # One forward pass in four is made again.
    days = recipe.train.steps * tokens * per_token * 4 / 3 / (8 * 989.5e12) / 86400
    assert days == pytest.approx(111.3, abs=0.1)
    monkeypatch.setattr("train.dry_run.make_train_step", lambda *_: Uncompiled())
    report = dry_run(recipe, 8, find_device("h200"))
    assert (report.tokens_per_step, report.flops_per_token) == (tokens, per_token)
    assert report.days == pytest.approx(days, rel=1e-9)
    assert report.mfu_bound == pytest.approx(3 / 4)


class Uncompiled:
    """Stands for the jitted step, whose compiling takes half a minute."""

    def lower(self, *_):
        return self

    def compile(self, *_):
        return self

"""Run configs: shipped files load, mistakes are named."""

from pathlib import Path

import pytest

from laneformer_jax import settings
from laneformer_jax.errors import UserError
from train import RunConfig

BASE = ("model.preset=tiny", "tokenizer=somewhere", "data.sources.std.kind=stdlib")


def load(*overrides: str) -> RunConfig:
    return settings.load(RunConfig, None, [*BASE, *overrides])


def test_overrides_reach_every_part_and_the_yaml_reads_back(tmp_path: Path):
    config = load("train.steps=7", "schedule.warmup_steps=2", "log.wandb.mode=offline")
    assert config.train.steps == 7
    assert config.schedule.warmup_steps == 2
    assert config.log.wandb is not None
    (tmp_path / "c.yaml").write_text(settings.to_yaml(config))
    assert settings.load(RunConfig, tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=7", "train.step: unknown field (did you mean 'steps'?)"),
        ("train.accumulate=3", "accumulate = 3: must divide batch_size 8"),
        ("mesh.data=3", "must be divisible by mesh.data 3"),
        ("schedule.warmup_steps=2000", "exceed train.steps 1000"),
        ("optimizer.learning_rate=0", "learning_rate = 0.0: must be a positive number"),
        ("train.compute_dtype=float16", "train.compute_dtype = 'float16'"),
        ("model.preset=tinny", "did you mean 'tiny'?"),
        ("model.overrides.num_lane=4", "did you mean 'num_lanes'?"),
        ("init_from=x", "model: leave it out with init_from"),
        ("tokenizer=null", "tokenizer: required without init_from"),
        ("model=null", "model: required without init_from"),
        ("eval.interval=0", "interval = 0: must be at least 1"),
    ],
)
def test_mistakes_are_named(override: str, message: str):
    with pytest.raises(UserError) as error:
        load(override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)

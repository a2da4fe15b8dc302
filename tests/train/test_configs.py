"""The shipped configs are ones."""

import pytest

from laneformer_jax import settings, yaml12
from train import RunConfig

PHASES = [
    path
    for path in sorted(settings.configs_dir().rglob("*.yaml"))
    if "phase" in yaml12.read_mapping(path)
]


@pytest.mark.parametrize("path", PHASES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_phase_loads(path):
    given = yaml12.read_mapping(path)
    overrides = () if "tokenizer" in given or "init_from" in given else ("tokenizer=t",)
    config = settings.load(RunConfig, path, overrides)
    assert config.data.sources
    assert config.data.decontaminate
    assert config.data.deduplicate
    total = config.train.steps * config.train.batch_size * config.train.seq_len
    for point in config.data.schedule:
        assert point.tokens < total


def test_there_are_phases():
    assert len(PHASES) >= 9

"""`laneformer bench data` measures every part it offers."""

import json

import pytest

from data.bench import PARTS
from laneformer_jax.cli import main


@pytest.mark.slow
def test_all_parts(tmp_path, capsys):
    arguments = ["--seconds", "0.1", "--rounds", "1", "--files", "2000", "--gigabytes", "0.05"]
    where = ["--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    assert main(["bench", "data", *arguments, *where]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(PARTS) == 4
    assert len(figures) == 4 + 6 + 1 + 4
    assert all(value > 0 for value in figures.values())
    assert len(capsys.readouterr().out.splitlines()) == len(figures)
    # Nothing is left of the data but what was asked for.
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]

import json

import pytest

from laneformer_jax.cli import main
from laneformer_jax.latency import published
from laneformer_jax.latency.published import Comparison, comparisons

# Spec section 3, name by name.
PUBLISHED = [8400, 7700, 7562, 6909, 890, 36, 3000, 27, 2100, 2200, 2400, 1160, 1270, 8, 20]


@pytest.mark.smoke
def test_every_published_figure_is_reproduced():
    rows = comparisons()
    assert [row.published for row in rows] == PUBLISHED
    for row in rows:
        if row.digits is None:
            assert row.ours < row.published
        else:
            rounded = float(f"{row.ours:.{row.digits}g}")
            close = row.ours == pytest.approx(row.published, rel=0.02)
            assert close or rounded == row.published, row
        assert row.agrees


def test_ours_is_computed(monkeypatch):
    """Other inputs give other figures: none is typed in."""
    before = {row.name: row.ours for row in comparisons()}
    monkeypatch.setattr(published, "NOMINAL_PARAMETERS", 1e9)
    monkeypatch.setattr(published, "GPT_OSS_BYTES", 2 * published.GPT_OSS_BYTES)
    monkeypatch.setattr(published, "DEEPSEEK_BYTES", 2 * published.DEEPSEEK_BYTES)
    monkeypatch.setitem(published.LAUNCHES, "launch", 9e-6)
    after = {row.name: row.ours for row in comparisons()}
    ratio = {name: after[name] / before[name] for name in before}
    for name, value in ratio.items():
        if "nominal" in name or name.startswith("speed"):
            assert value == pytest.approx(2, rel=1e-3)
        elif name.startswith(("launch", "utilisation", "GPT", "DeepSeek")):
            assert value == pytest.approx(0.5, rel=1e-3)
        else:
            assert value == 1


def test_a_figure_that_is_off_differs():
    assert not Comparison("", 2400, 2300, 2).agrees
    assert Comparison("", 2400, 2353, 2).agrees
    assert not Comparison("", 20, 21, None).agrees


def test_json_line(capsys):
    assert main(["latency", "--published", "--json"]) == 0
    out = capsys.readouterr().out
    (line,) = out.splitlines()
    rows = json.loads(line)["published"]
    assert len(rows) >= 10
    assert [set(row) for row in rows] == [{"name", "published", "ours"}] * len(rows)
    assert [row["published"] for row in rows] == PUBLISHED


def test_table(capsys):
    assert main(["latency", "--published"]) == 0
    out = capsys.readouterr().out
    assert out.count("agrees") == len(PUBLISHED)
    assert "differs" not in out

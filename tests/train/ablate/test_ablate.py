"""Expansion, caching, choice of learning rates, statistics and report, on results written by hand."""

import json
import math
import shutil

import numpy as np
import pytest

from laneformer_jax import settings
from laneformer_jax.cli import main
from laneformer_jax.errors import UserError
from train.ablate import report
from train.ablate.cli import _task
from train.ablate.config import AblationConfig, check_cells, expand
from train.ablate.runs import RESULT, Ablation
from train.ablate.stats import paired_gap

SMALL = dict(
    vocab_size=280, hidden_size=32, intermediate_size=32, num_hidden_layers=3, swa_layers=[]
)
CELLS = {
    "dense": {"broadcast_delay": math.inf},
    "late": {"broadcast_delay": 1, "use_early_comm": False},
    "ladder": {"ladder_residual": True},
}


def ablation(corpus, folder, **changes):
    values = {
        "base": {
            "model": {"preset": "tiny", "overrides": SMALL},
            "tokenizer": str(corpus / "tokenizer.model"),
            "data": {
                "sources": {
                    "texts": {"kind": "text", "path": str(corpus / "texts"), "heldout": 0.3}
                }
            },
            "train": {"steps": 3, "batch_size": 2, "seq_len": 16},
            "eval": {"interval": 2, "batches": 2},
        },
        "cells": CELLS,
        "learning_rates": [1e-3, 4e-3],
        "seeds": [1, 2],
        **changes,
    }
    return Ablation(settings.from_dict(AblationConfig, values), folder)


def finish(one, run, loss):
    folder = one.path(run)
    folder.mkdir(parents=True)
    found = {
        "key": run.key,
        "eval_loss": loss,
        "curve": [[64, loss + 1], [96, loss]],
        "drift": [0.0, 0.1, 0.2],
        "model": run.config.model.build().to_dict(),
        "run": {"tokenizer": str(one.folder / "tokenizer" / "tokenizer.model")},
    }
    (folder / RESULT).write_text(json.dumps(found))


def test_cells_and_grid(corpus, tmp_path):
    one = ablation(corpus, tmp_path, grid={"num_lanes": [2, 4], "broadcast_delay": [1, 2]})
    cells = expand(one.config)
    assert [*cells][:3] == ["dense", "late", "ladder"]
    assert cells["num_lanes=2,broadcast_delay=2"] == {"num_lanes": 2, "broadcast_delay": 2}
    assert len(cells) == 3 + 4
    dense = one.run("dense", 1e-3, 5).config
    model = dense.model.build()
    assert (model.broadcast_delay, model.use_early_comm) == (3, True)
    assert (dense.train.seed, dense.optimizer.learning_rate) == (5, 1e-3)
    assert len(one.tuning()) == 7 * 2


def test_keys_follow_what_decides_the_result(corpus, tmp_path):
    one = ablation(corpus, tmp_path)
    run = one.run("late", 1e-3, 1)
    again = ablation(corpus, tmp_path / "elsewhere", cells={**CELLS, "renamed": CELLS["late"]})
    assert again.run("renamed", 1e-3, 1).key == run.key
    spelled = {**CELLS, "late": {**CELLS["late"], "num_lanes": 8}}  # as the preset has it
    assert ablation(corpus, tmp_path, cells=spelled).run("late", 1e-3, 1).key == run.key
    others = [one.run("late", 1e-3, 2), one.run("late", 2e-3, 1), one.run("dense", 1e-3, 1)]
    longer = json.loads(json.dumps(one.config.base))
    longer["train"]["steps"] = 4
    others.append(ablation(corpus, tmp_path, base=longer).run("late", 1e-3, 1))
    softer = json.loads(json.dumps(one.config.base))
    softer["model"]["residual_init_scale"] = 0.5
    others.append(ablation(corpus, tmp_path, base=softer).run("late", 1e-3, 1))
    assert len({run.key, *(other.key for other in others)}) == 6
    quiet = json.loads(json.dumps(one.config.base))
    quiet["log"] = {"interval": 7}
    assert ablation(corpus, tmp_path, base=quiet).run("late", 1e-3, 1).key == run.key


def test_the_best_learning_rate_is_each_cells_own(corpus, tmp_path):
    one = ablation(corpus, tmp_path)
    with pytest.raises(UserError, match=r"cell .dense.: not tuned at learning rate 0\.001 yet"):
        one.comparison()
    for run in one.tuning():
        low = run.cell == "dense"
        finish(one, run, 3.0 + ((run.learning_rate == 1e-3) != low))
    assert [one.best_rate(cell) for cell in CELLS] == [1e-3, 4e-3, 4e-3]
    runs = one.comparison()
    assert [(r.cell, r.seed) for r in runs] == [(c, s) for s in (1, 2) for c in CELLS]
    assert {r.cell: r.learning_rate for r in runs} == {"dense": 1e-3, "late": 4e-3, "ladder": 4e-3}
    # With the tuning seed among the seeds its run is not done again.
    same = ablation(corpus, tmp_path, seeds=[0, 1])
    assert [same.result(run) is not None for run in same.comparison()] == [True] * 3 + [False] * 3


def test_report(corpus, tmp_path):
    one = ablation(corpus, tmp_path)
    for run in one.tuning():
        finish(one, run, 3.0 if run.learning_rate == 4e-3 else 3.5)
    noise = {1: 0.00, 2: 0.03}
    for run in one.comparison():
        extra = {"dense": 0.0, "late": 0.2 + 0.001 * run.seed, "ladder": 0.05 * (-1) ** run.seed}
        finish(one, run, 3.0 + noise[run.seed] + extra[run.cell])
    lines = report.write(one).splitlines()
    assert lines[2].startswith("| dense | 0.004 (edge) | 2 | 3.0150 |")
    assert lines[2].endswith("| baseline |")
    assert "+0.2015" in lines[3]
    assert lines[3].endswith("| worse |")
    assert lines[4].endswith("| within noise |")
    rows = [json.loads(line) for line in (tmp_path / report.RESULTS).read_text().splitlines()]
    assert [row["role"] for row in rows] == ["tune"] * 6 + ["compare"] * 6
    assert (tmp_path / report.TABLE).read_text().splitlines() == lines
    for name in ("loss", "gap-delay", "gap-lanes", "drift"):
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    # What is published, without the runs, tells the same and nothing of this machine.
    published = tmp_path / "published"
    published.mkdir()
    shutil.copy(tmp_path / report.RESULTS, published)
    assert str(tmp_path) not in (published / report.RESULTS).read_text()
    assert report.write(Ablation(one.config, published)).splitlines() == lines


def test_paired_gap_against_the_textbook():
    baseline = {1: 3.10, 2: 3.30, 3: 2.90}
    cell = {1: 3.15, 2: 3.37, 3: 2.93, 9: 1.0}
    gap = paired_gap(cell, baseline)
    differences = np.array([0.05, 0.07, 0.03])
    half = 4.30265273 * differences.std(ddof=1) / np.sqrt(3)  # t with 2 degrees of freedom, 97.5 %
    assert gap.by_seed == pytest.approx({1: 0.05, 2: 0.07, 3: 0.03})
    assert gap.mean == pytest.approx(0.05)
    assert (gap.low, gap.high) == pytest.approx((0.05 - half, 0.05 + half))
    assert gap.verdict == "worse"  # though the seeds differ by far more than the cells
    assert paired_gap({1: 3.0, 2: 3.5, 3: 2.8}, baseline).verdict == "within noise"
    assert paired_gap({1: 3.05, 2: 3.24, 3: 2.85}, baseline).verdict == "better"
    assert paired_gap({1: 3.0}, baseline).verdict == "one seed"
    assert paired_gap({7: 3.0}, baseline) is None


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        noise, own = rng.normal(0, 1, 3), rng.normal(0.1, 0.02, 3)
        gap = paired_gap(dict(enumerate(noise + own)), dict(enumerate(noise)))
        covered += gap.low <= 0.1 <= gap.high
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)


def test_tasks_share_all_runs(monkeypatch, corpus, tmp_path):
    runs = [run.key for run in ablation(corpus, tmp_path).tuning()]
    shares = [runs[i::4] for i in range(4)]
    assert sorted(key for share in shares for key in share) == sorted(runs)
    assert _task(None) == (0, 1)
    assert _task("3/4") == (3, 4)
    for name, value in (("ID", "7"), ("COUNT", "5"), ("MIN", "5")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert _task(None) == (2, 5)
    for bad in ("4/4", "1", "a/b"):
        with pytest.raises(UserError, match="must be I/N"):
            _task(bad)


def test_the_shipped_ablation_is_sound(tmp_path):
    config = settings.load(AblationConfig, settings.find_config("ablation/lanes"))
    check_cells(config, tmp_path / "tokenizer.model")
    one = Ablation(config, tmp_path)
    assert len(one.tuning()) == 10 * 3
    models = {run.cell: run.config.model.build() for run in one.tuning()}
    assert models["dense"].broadcast_delay == models["dense"].num_hidden_layers
    embedding = 2 * 1024 * 128
    assert 1e6 < models["dense"].num_parameters() - embedding < 5e6
    assert len({model.num_parameters() for model in models.values()}) == 1


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["ablation/lane"], "did you mean 'ablation/lanes'?"),
        (["ablation/lanes", "baseline=dens"], "did you mean 'dense'?"),
        (["ablation/lanes", "cells.odd={broadcast_delai: 1}"], "cell 'odd':"),
        (["ablation/lanes", "cells.odd={num_hidden_layers: 7}"], "must be of one size"),
        (["ablation/lanes", "seeds=[1,1]"], "must be different values"),
        (["ablation/lanes", "learning_rates=[]"], "at least one"),
        (["ablation/lanes", "base.train.step=3"], "did you mean 'steps'?"),
        (["ablation/lanes", "--task", "0/4"], "an array's tasks need --phase tune"),
        (["ablation/lanes", "--task", "4/4", "--phase", "tune"], "task: '4/4' must be I/N"),
        (["ablation/lanes", "--phase", "seed"], "did you mean 'seeds'?"),
    ],
)
def test_refusals(capsys, tmp_path, args, part):
    assert main(["ablate", *args, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_it_and_leaves_the_rest_to_do(corpus, tmp_path, monkeypatch, capsys):
    import train.loop

    begun = []

    def stopped(config, out):
        begun.append(out)
        return train.loop.Result(out, 2, 1.0, None, 143)

    monkeypatch.setattr(train.loop, "train", stopped)
    one = ablation(corpus, tmp_path)
    path = tmp_path / "toy.yaml"
    path.write_text(settings.to_yaml(one.config))
    assert main(["ablate", str(path), "--out", str(tmp_path)]) == 143
    assert begun == [one.path(one.tuning()[0])]
    begun[0].mkdir(parents=True)
    capsys.readouterr()
    assert main(["ablate", str(path), "--out", str(tmp_path), "--list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "not tuned at learning rate" in out[0]
    assert [line.split()[0] for line in out[1:]] == ["begun"] + ["to"] * 5


@pytest.mark.slow
def test_two_cells_from_the_command_line(corpus, tmp_path, capsys):
    """All phases for real; the second time nothing is done again, and array tasks do the same."""
    one = ablation(corpus, tmp_path, cells={k: CELLS[k] for k in ("dense", "ladder")})
    path = tmp_path / "toy.yaml"
    path.write_text(settings.to_yaml(one.config))
    out = tmp_path / "out"
    command = ["ablate", str(path), "--out", str(out)]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.err.count("run ") == 4 + 4
    stamps = {p: p.stat().st_mtime_ns for p in out.glob(f"runs/*/{RESULT}")}
    assert len(stamps) == 8
    assert main(command) == 0
    second = capsys.readouterr()
    assert "run " not in second.err
    assert second.out == first.out
    assert {p: p.stat().st_mtime_ns for p in out.glob(f"runs/*/{RESULT}")} == stamps
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    compared = [row for row in rows if row["role"] == "compare"]
    assert len(compared) == 4
    assert all(max(row["drift"]) < 1e-6 for row in compared)  # dense and ladder lanes are equal
    # One run lost: only it is done again, by the task whose share it is in, to the same loss.
    lost = out / "runs" / compared[0]["key"] / RESULT
    before = json.loads(lost.read_text())
    lost.unlink()
    assert main([*command, "--phase", "seeds", "--task", "1/4"]) == 0
    assert not lost.exists()
    assert main([*command, "--phase", "seeds", "--task", "0/4"]) == 0
    assert json.loads(lost.read_text())["eval_loss"] == before["eval_loss"]

"""The runs of an ablation: which there are, which are done, and doing the next one.

Folder of an ablation:

    tokenizer/tokenizer.model      when the base names none
    runs/<key>/                    a training run's folder, and result.json once it is complete

A run is named by what decides its result. So it is found again whatever its cell is called, and a
changed setting makes a new one beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file, read_json
from train.ablate.config import AblationConfig, Run, expand, make_run

RESULT = "result.json"
RUNS = "runs"
_DRIFT_ROWS = 4


@dataclass(frozen=True)
class Ablation:
    """An ablation in its folder."""

    config: AblationConfig
    folder: Path

    @property
    def tokenizer(self) -> Path:
        given = self.config.base.get("tokenizer")
        return Path(given) if given else self.folder / "tokenizer" / "tokenizer.model"

    def train_tokenizer(self) -> None:
        """Train the tokenizer when the base names none and there is none yet."""
        if self.config.base.get("tokenizer") or self.tokenizer.exists():
            return
        from data import training_texts
        from laneformer_jax.tokenizer import train_tokenizer

        run = self.run(self.config.baseline, self.config.learning_rates[0], 0)
        assert run.config.model is not None
        vocabulary = run.config.model.build().vocab_size
        print(f"tokenizer: {vocabulary} entries", file=sys.stderr)
        train_tokenizer(training_texts(run.config.data), vocabulary, self.tokenizer)

    def run(self, cell: str, learning_rate: float, seed: int) -> Run:
        return make_run(self.config, cell, learning_rate, seed, self.tokenizer)

    def tuning(self) -> list[Run]:
        """Every cell at every learning rate; one rate needs no tuning."""
        rates = self.config.learning_rates
        if len(rates) == 1:
            return []
        return [
            self.run(cell, rate, self.config.tune_seed)
            for cell in expand(self.config)
            for rate in rates
        ]

    def comparison(self) -> list[Run]:
        """Every cell at its best learning rate with every seed.

        Raises UserError naming the first tuning run that is missing.
        """
        return [
            self.run(cell, self.best_rate(cell), seed)
            for seed in self.config.seeds
            for cell in expand(self.config)
        ]

    def best_rate(self, cell: str) -> float:
        """The learning rate with the lowest held-out loss of `tune_seed`. Raises UserError."""
        rates = self.config.learning_rates
        if len(rates) == 1:
            return rates[0]
        losses = {}
        for rate in rates:
            result = self.result(self.run(cell, rate, self.config.tune_seed))
            if result is None:
                raise UserError(
                    f"cell {cell!r}: not tuned at learning rate {rate:g} yet; --phase tune first"
                )
            losses[rate] = result["eval_loss"]
        return min(losses, key=lambda rate: losses[rate])

    def path(self, run: Run) -> Path:
        return self.folder / RUNS / run.key

    def result(self, run: Run) -> dict[str, Any] | None:
        """What a complete run left, under this ablation's name for its cell; None when it is not."""
        path = self.path(run) / RESULT
        if not path.is_file():
            return None
        found = read_json(path)
        return {"cell": run.cell, "learning_rate": run.learning_rate, "seed": run.seed, **found}

    def do(self, runs: Iterable[Run]) -> int:
        """Do the runs that are not done, one after another; 0, or the exit code of a signal."""
        runs = list({run.key: run for run in runs}.values())
        for number, run in enumerate(runs, 1):
            if self.result(run) is not None:
                continue
            print(
                f"run {number} of {len(runs)}: {run.cell}, learning rate {run.learning_rate:g}, "
                f"seed {run.seed} ({run.key})",
                file=sys.stderr,
            )
            code = self._do(run)
            if code:
                return code
        return 0

    def _do(self, run: Run) -> int:
        import jax

        from train.loop import train

        jax.clear_caches()  # every run compiles its own step, and sixty would stay in memory
        began = time.perf_counter()
        out = self.path(run)
        done = train(run.config, out)
        if done.exit_code:
            return done.exit_code
        found = _measure(run, out)
        found["seconds_of_last_process"] = round(time.perf_counter() - began, 1)
        with atomic_file(out / RESULT) as file:
            json.dump(found, file)
        return 0


def _measure(run: Run, out: Path) -> dict[str, Any]:
    """Held-out loss along the run, and how far lanes are apart after each layer."""
    from train.metrics import JSONL, read_jsonl

    tokens = run.config.train.batch_size * run.config.train.seq_len
    curve = [
        [record["step"] * tokens, record["eval_loss"]]
        for record in read_jsonl(out / JSONL)
        if "eval_loss" in record
    ]
    if not curve:
        raise UserError(
            f"cell {run.cell!r}: no held-out loss; base needs eval.interval and heldout"
        )
    assert run.config.model is not None
    return {
        "key": run.key,
        "eval_loss": curve[-1][1],
        "curve": curve,
        "drift": _drift(run, out),
        "parameters": run.config.model.build().num_parameters(),
        "model": run.config.model.build().to_dict(),
        "run": settings.to_dict(run.config),
    }


def _drift(run: Run, out: Path) -> list[float]:
    """By layer: Σ_l |x_l − mean|² / Σ_l |x_l|² of the streams on held-out rows; 0 when all are equal."""
    import numpy as np

    from data import build_eval_dataset, closing
    from laneformer_jax.checkpoint.load import load_checkpoint
    from laneformer_jax.tokenizer import Tokenizer

    assert run.config.tokenizer is not None
    dataset = build_eval_dataset(
        run.config.data,
        Tokenizer.load(run.config.tokenizer),
        seq_len=run.config.train.seq_len,
        batch_size=min(_DRIFT_ROWS, run.config.train.batch_size),
        max_batches=1,
    )
    with closing(dataset) as batches:
        batch = next(batches)
    model = load_checkpoint(out).model
    _, hidden_NBSLD = model(
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        return_hidden=True,
    )
    hidden_NBSLD = np.asarray(hidden_NBSLD, np.float64)
    mean_NBSD = hidden_NBSLD.mean(axis=3)
    lanes = hidden_NBSLD.shape[3]
    shared_N = lanes * (mean_NBSD**2).sum(axis=(1, 2, 3))
    drift_N = 1 - shared_N / (hidden_NBSLD**2).sum(axis=(1, 2, 3, 4))
    return [round(max(0.0, float(value)), 6) for value in drift_N]

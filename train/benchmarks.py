"""Benchmarks of saved checkpoints beside training: one evaluation at a time, in a process of its own."""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from pathlib import Path

import jax

from eval.inloop import BackgroundEvaluation
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from train.config import RunConfig
from train.metrics import MetricsWriter, Unwritten
from train.signals import StopRequest

FOLDER = "evaluations"
SECONDS = "benchmark_seconds"  # in every record, beside the scores
_POLL_S = 0.2


class Benchmarks:
    """Evaluates checkpoints as `RunConfig.benchmarks` says and writes the scores to the metrics.

    A record's `step` is that of the checkpoint, whenever its evaluation ends. An evaluation that
    fails is a warning: training goes on. Only the first process of a run evaluates.

    Args:
        config: the run.
        out: its folder; answers, verdicts and reports go to `evaluations/<step>` in it.
        checkpoints: the run's; one that is being evaluated is held.
        metrics: where scores go.
        step: the run starts at. Evaluations that an earlier process did not finish are taken up.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        checkpoints: TrainingCheckpoints,
        metrics: MetricsWriter | Unwritten,
        step: int,
    ):
        self._config, self._out = config.benchmarks, out / FOLDER
        self._chat, self._last = config.phase == "sft", config.train.steps
        self._checkpoints, self._metrics = checkpoints, metrics
        self._waiting: list[int] = []
        self._running: BackgroundEvaluation | None = None
        self._step, self._began = 0, 0.0
        self._known: set[int] = set()
        if not self._active:
            return
        for folder in self._out.glob("[0-9]*"):
            if int(folder.name) > step:  # of updates that are made again
                shutil.rmtree(folder)
        for saved in checkpoints.steps():
            if metrics.has(saved, SECONDS):
                self._known.add(saved)
            elif self.due(saved) or saved == self._last:
                self._queue(saved)

    @property
    def _active(self) -> bool:
        return self._config.interval is not None and jax.process_index() == 0

    def due(self, step: int) -> bool:
        """Whether the checkpoint of `step` is to be saved and evaluated."""
        every = self._config.interval
        return every is not None and step > 0 and step % every == 0

    def saved(self, step: int) -> None:
        """Evaluate the checkpoint of `step`, unless an earlier one still is; `finish` has the last."""
        if not self._active or not self.due(step) or step in self._known or step == self._last:
            return
        if self._running or self._waiting:
            earlier = self._step if self._running else self._waiting[0]
            warnings.warn(
                f"benchmarks of step {step} are left out: those of step {earlier} still run",
                stacklevel=2,
            )
            return
        self._queue(step)

    def poll(self) -> None:
        """Write down what is done, start what waits; takes no time."""
        if self._running is not None and not self._running.running():
            self._finished(self._running)
        if self._running is None and self._waiting and self._committed(self._waiting[0]):
            self._start(self._waiting.pop(0))

    def finish(self, step: int, stop: StopRequest) -> None:
        """At the end of a run: evaluate its last checkpoint too; returns when all is done."""
        if not self._active:
            return
        if step > 0 and step not in self._known:
            self._queue(step)
        if self._running or self._waiting:
            print(f"training is done; benchmarks of step {step} follow", file=sys.stderr)
        while (self._running or self._waiting) and not stop:
            self.poll()
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the evaluation that runs. The next process of this run takes it up."""
        if self._running is not None:
            self._running.stop()

    def _queue(self, step: int) -> None:
        self._known.add(step)
        self._waiting.append(step)
        self._checkpoints.held.add(step)

    def _committed(self, step: int) -> bool:
        return step in self._checkpoints.steps()  # saved in the background

    def _start(self, step: int) -> None:
        self._step, self._began = step, time.perf_counter()
        options = ["--max-new-tokens", str(self._config.max_new_tokens)]
        if not self._chat:
            options.append("--base")
        try:
            self._running = BackgroundEvaluation(
                self._checkpoints.folder / str(step),
                self._config.suites,
                self._out / str(step),
                limit=self._config.limit,
                options=options,
                environment=self._config.environment,
            )
        except OSError as error:
            self._failed(error)

    def _finished(self, evaluation: BackgroundEvaluation) -> None:
        self._running = None
        try:
            scores = evaluation.wait()
        except (RuntimeError, OSError, ValueError) as error:
            self._failed(error)
            return
        self._checkpoints.held.discard(self._step)
        seconds = round(time.perf_counter() - self._began, 3)
        self._metrics.write({"step": self._step, **scores, SECONDS: seconds})

    def _failed(self, error: Exception) -> None:
        self._checkpoints.held.discard(self._step)
        told = str(error).strip().splitlines()[-1]
        log = self._out / str(self._step) / "log.txt"
        warnings.warn(
            f"benchmarks of step {self._step} failed, training goes on: {told} ({log})",
            stacklevel=2,
        )

"""The training loop: from a RunConfig to a trained model, through kills and resumes."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from data import merge_states
from laneformer_jax import costs, settings
from laneformer_jax.checkpoint import native
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.checkpoint.workplace import claim
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file
from laneformer_jax.progress import Progress, Quiet, progress
from train.batches import Feed, local_rows, place
from train.benchmarks import Benchmarks
from train.clock import Clock, memory
from train.config import RunConfig
from train.metrics import MetricsWriter, Unwritten
from train.processes import Processes, largest, leaving_on_errors
from train.profile import Profile
from train.setup import Setup, prepare
from train.signals import StopRequest, stop_on_signals
from train.step import Batch, Metrics, State

CONFIG, PROFILE = "config.yaml", "profile"
Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        out: its folder.
        step: updates made.
        loss: of the last update's batch before it, nats per token; None when none was made.
        eval_loss: of the last evaluation of this process.
        exit_code: 0 when complete; 128 + the signal's number when one ended it, saved.
    """

    out: Path
    step: int
    loss: float | None
    eval_loss: float | None
    exit_code: int


def train(
    config: RunConfig,
    out: str | Path,
    resume: Resume = "auto",
    restart_data: bool = False,
    profile: bool = False,
) -> Result:
    """Train one phase into the folder `out`.

    Leaves there: `config.yaml` (resolved), `metrics.jsonl`, `checkpoints/<step>/`, and with
    benchmarks `evaluations/<step>/`. A run that was killed continues bit for bit on the same JAX,
    devices and CPU affinity. With several processes (`train.processes.join`) every one calls this
    with the same arguments and a folder that all of them see.

    Args:
        config: the run.
        out: its folder; made when missing.
        resume: continue from the newest complete checkpoint in `out`: `auto` if there is one,
            `must` or fail, `never`: fail if there is one.
        restart_data: on resume start the data afresh, which allows another mixture.
        profile: trace a few updates of the first process into `profile/` (`train.profile`).

    Raises:
        UserError: what the config names cannot be had, `resume` does not fit what is in `out`, or
            another process is training there. Of several processes, all end when one has any other
            error (`train.processes.leaving_on_errors`).
    """
    out, processes = Path(out), Processes()
    new = processes.first and not out.exists()
    with stop_on_signals() as asked, ExitStack() as stack:
        try:
            with leaving_on_errors():
                with processes.agreed():
                    if out.exists() and not out.is_dir():
                        raise UserError(f"--out: {out} is a file; the run needs a folder")
                    if processes.first:
                        out.mkdir(parents=True, exist_ok=True)
                        stack.enter_context(_claimed(out))
                with processes.agreed():
                    if not out.is_dir():
                        raise UserError(f"{out}: not seen by all processes; name a shared folder")
                loop = _loop(config, out, resume, restart_data, profile, processes, asked)
                stack.callback(loop.close)
                return loop.run()
        finally:
            stack.close()
            if new and out.exists() and not any(out.iterdir()):  # nothing began
                out.rmdir()


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    try:
        with claim(out):
            yield
    except BlockingIOError:
        raise UserError(f"{out}: another process is training in this folder") from None


def _loop(
    config: RunConfig,
    out: Path,
    resume: Resume,
    restart_data: bool,
    profile: bool,
    processes: Processes,
    asked: StopRequest,
) -> _Loop:
    checkpoints = TrainingCheckpoints(
        out / native.CHECKPOINTS, config.checkpoint.keep, config.checkpoint.keep_every
    )
    with processes.agreed():
        _check_resume(out, checkpoints.steps(), resume)
    setup = prepare(config, checkpoints, restart_data, processes)
    if processes.first:
        with atomic_file(out / CONFIG) as file:
            file.write(settings.to_yaml(config))
    tracer = Profile(out / PROFILE if profile and processes.first else None)
    return _Loop(config, out, setup, checkpoints, processes, asked, tracer)


def _check_resume(out: Path, steps: list[int], resume: Resume) -> None:
    if resume == "must" and not steps:
        raise UserError(f"{out}: --resume must, but there is no checkpoint to resume from")
    if resume == "never" and steps:
        raise UserError(
            f"{out}: holds checkpoints up to step {steps[-1]}; name a new folder, or --resume auto"
        )


class _Loop:
    def __init__(
        self,
        config: RunConfig,
        out: Path,
        setup: Setup,
        checkpoints: TrainingCheckpoints,
        processes: Processes,
        asked: StopRequest,
        profile: Profile,
    ):
        self._config, self._out, self._setup = config, out, setup
        self._checkpoints, self._processes = checkpoints, processes
        # A signal to one process stops all of them, once they agree on the step.
        self._asked, self._stop = asked, asked if processes.count == 1 else StopRequest()
        self._state: State = setup.state
        self._step = int(setup.state.step)
        self._saved = self._step if setup.restored else None
        first = processes.first
        self._metrics = MetricsWriter(config, out, self._step) if first else Unwritten()
        self._benchmarks = Benchmarks(config, out, checkpoints, self._metrics, self._step)
        self._feed = Feed(
            setup.batches, setup.plan.batch_sharding(), processes, self._asked, self._stop
        )
        self._pending: tuple[int, Metrics, Batch] | None = None
        self._profile = profile
        self._compiled: Callable[[State, Batch], tuple[State, Metrics]] | None = None
        self._once: dict[str, float] = {}  # figures for the next line only
        self._loss: float | None = None
        self._eval_loss: float | None = None
        sizes = config.train
        self._tokens = sizes.batch_size * sizes.seq_len
        flops = costs.training_flops(setup.plan.config, sizes.seq_len) * self._tokens
        self._clock = Clock(self._tokens, flops, *self._metrics.earlier)

    def run(self) -> Result:
        steps = self._config.train.steps
        if self._eval_due():
            missing = not self._metrics.has(self._step, "eval_loss")
            if self._processes.of_first(missing):
                self._evaluate()  # a stop came between this step and its evaluation
        with self._progress() as self._bar:
            while self._step < steps and not self._stop:
                batch = self._feed.next()
                if batch is None:
                    self._report(last=not self._stop)
                    break
                metrics = self._update(batch)
                self._step += 1
                # The device works on this update while the one before it is written down.
                self._report()
                self._pending = (self._step, metrics, batch)
                if self._eval_due():
                    self._report()
                    self._evaluate()
                if self._save_due() and not self._stop:
                    self._report()  # a kill right after the save must not cost this line
                    self._save()
                    self._benchmarks.saved(self._step)
                self._checkpoints.check()  # a disk that is full must not cost another update
                self._benchmarks.poll()
            self._report()
        self._profile.close(self._state)
        if self._step < steps and not self._stop and self._processes.first:
            warnings.warn(
                f"the data ended after {self._step} of {steps} steps; set `epochs` higher or null",
                stacklevel=2,
            )
            if not self._eval_due():
                self._evaluate()
        self._save()
        self._checkpoints.wait()
        if not self._stop:
            self._benchmarks.finish(self._step, self._asked)
        self._processes.exchange(None)  # none leaves while another still needs it
        code = self._stop.exit_code if self._stop and self._step < steps else 0
        if code and self._processes.first:
            print(f"saved step {self._step} in {self._out}; run again to go on", file=sys.stderr)
        return Result(self._out, self._step, self._loss, self._eval_loss, code)

    def _update(self, batch: Batch) -> Metrics:
        """Have the devices make the next update; returns before they have."""
        if self._compiled is None:
            with self._clock.paused():
                began = time.perf_counter()
                lowered = self._setup.train_step.lower(self._state, batch)
                self._compiled = lowered.compile()
                self._once["compile_s"] = time.perf_counter() - began
        with self._profile.update(self._step + 1, self._state):
            self._state, metrics = self._compiled(self._state, batch)
        return metrics

    def _progress(self) -> AbstractContextManager[Progress]:
        if not self._processes.first:
            return nullcontext(Quiet())
        return progress(
            self._config.train.steps, self._config.phase, unit="steps", start=self._step
        )

    def close(self) -> None:
        with ExitStack() as stack:  # each, also where one before it fails
            for part in (self._checkpoints, self._metrics, self._feed, self._benchmarks):
                stack.callback(part.close)

    def _report(self, last: bool = False) -> None:
        """Write down the pending update, which waits until the device has made it.

        last: of the run, which is logged whatever the interval.
        """
        if self._pending is None:
            return
        step, metrics, batch = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        loss = self._loss = values["loss"]
        self._bar.advance(loss=loss, lr=values["lr"])
        self._clock.tick()
        last = last or step == self._config.train.steps
        stuck = values["skipped_in_row"] >= self._config.optimizer.stop_after_skips
        last = last or stuck
        if step % self._config.log.interval and not last:
            return
        self._metrics.write(
            {
                "step": step,
                "tokens": step * self._tokens,
                "loss": loss,
                "perplexity": _exp(loss),
                "grad_norm": values["grad_norm"],
                "lr": values["lr"],
                "loss_weight": values["weight"],
                "skipped": int(values["skipped"]),
                **{name: value for name, value in values.items() if "/" in name},
                **self._clock.lap(self._feed.waited),
                **memory(),
                **self._once,
            }
        )
        self._once.clear()
        if stuck:
            self._give_up(step, batch, values)

    def _give_up(self, step: int, batch: Batch, values: Mapping[str, float]) -> NoReturn:
        """Too many updates in a row were skipped: leave the last batch for inspection."""
        part = "" if self._processes.count == 1 else f"-{jax.process_index()}"
        file = self._out / f"skipped-{step}{part}.npz"
        with atomic_file(file, "wb") as out:
            rows: dict[str, Any] = {name: local_rows(value) for name, value in batch.items()}
            np.savez(out, **rows)
        raise UserError(
            f"step {step}: {int(values['skipped_in_row'])} updates in a row were skipped, the last"
            f" with gradient norm {values['grad_norm']:g} (optimizer.stop_after_skips); its batch is"
            f" in {file}"
        )

    def _eval_due(self) -> bool:
        every = self._config.eval.interval
        if every is None or self._step == 0:
            return False
        return self._step % every == 0 or self._step == self._config.train.steps

    def _evaluate(self) -> None:
        """Mean loss per predicted token of the held-out documents; given up when a stop comes."""
        if self._setup.eval_batches is None:
            return
        average = self._state.opt_state.average
        total = of_average = weight = 0.0
        with self._clock.paused(), self._setup.eval_batches() as batches:
            while True:
                with self._processes.agreed() as told:
                    batch = next(batches, None)
                    told.mine = self._asked.signum
                if batch is None:
                    break
                if self._processes.count > 1:
                    self._stop.signum = largest(told.all)
                if self._stop:
                    return
                placed = place(batch, self._setup.plan.batch_sharding())
                sums = jax.device_get(self._setup.eval_step(self._state.params, placed))
                total, weight = total + float(sums[0]), weight + float(sums[1])
                if average is not None:
                    of_average += float(self._setup.eval_step(average, placed)[0])
        self._eval_loss = total / weight if weight else 0.0
        record = {
            "step": self._step,
            "eval_loss": self._eval_loss,
            "eval_perplexity": _exp(self._eval_loss),
            "eval_weight": weight,
        }
        if average is not None:
            record["eval_loss_ema"] = of_average / weight if weight else 0.0
        self._metrics.write(record)

    def _save_due(self) -> bool:
        every = self._config.checkpoint.interval
        return self._step % every == 0 or self._benchmarks.due(self._step)

    def _save(self) -> None:
        if self._saved == self._step:
            return
        self._saved = self._step
        with self._clock.paused():
            data_state = merge_states(self._processes.exchange(self._feed.state))
            self._metrics.sync()  # a checkpoint must not outlive the lines before it
            self._checkpoints.save(
                self._step,
                self._state.params,
                {"opt_state": self._state.opt_state, "rng": self._state.rng},
                self._setup.plan.config,
                {
                    "phase": self._config.phase,
                    "run": settings.to_dict(self._config),
                    "data_state": data_state,
                },
                self._setup.tokenizer_path,
                self._setup.chat_template,
            )


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None

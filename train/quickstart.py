"""Train, stop, resume, tune, sample and export a small model on this machine's own Python.

    laneformer quickstart --out runs/quickstart

An 8-lane model learns the standard library's source in three phases (pretraining, midtraining,
instruction tuning), is stopped by a signal and resumed half-way, answers three prompts, and is
exported as safetensors. Everything stays in DIR with a report. The same command again continues
where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.config import RunConfig

PHASES = ("pretrain", "midtrain", "sft")
VOCAB_SIZE = 4096
NEW_TOKENS = 64


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a user's message to answer."""

    title: str
    text: str
    chat: bool


PROMPTS = (
    Prompt(
        "continue code", 'def read_lines(path):\n    """Return the lines of a file."""\n', False
    ),
    Prompt(
        "answer a request",
        "Write a Python function `is_empty(self)`.\n\nReturn True if the queue is empty.",
        True,
    ),
    Prompt(
        "answer a request",
        "Write a Python function `close(self)`.\n\nClose the file and release its buffer.",
        True,
    ),
)


@dataclass
class Story:
    """What happened, for the table and the report."""

    seconds: dict[str, float] = field(default_factory=dict)
    eval_loss: dict[str, float] = field(default_factory=dict)
    stopped_at: int | None = None
    samples: list[tuple[Prompt, str]] = field(default_factory=list)
    parameters: int = 0
    lanes: int = 0
    delay: int = 0
    peak_bytes: int = 0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


class Stopped(Exception):
    """A signal from outside ended a phase, whose state is saved."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for everything it makes"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiply every phase's steps; 0.02 tries the whole path in about a minute (default 1)",
    )


def run(args: argparse.Namespace) -> int:
    from laneformer_jax.errors import UserError

    if not 0 < args.scale <= 1000:
        raise UserError(f"--scale: {args.scale} must be above 0 and at most 1000")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out: {args.out} is a file; name a folder")
    args.out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before the work
    from train import report

    story = Story()
    try:
        _train(args.out, args.scale, story)
    except Stopped as stopped:
        return stopped.exit_code
    _sample(args.out, story)
    _export(args.out, story)
    story.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.write(args.out, story)
    report.print_summary(args.out, story)
    return 0


def _train(out: Path, scale: float, story: Story) -> None:
    tokenizer = out / "tokenizer" / "tokenizer.model"
    overrides = {"pretrain": f"tokenizer={tokenizer}"}
    for before, phase in itertools.pairwise(PHASES):
        overrides[phase] = f"init_from={out / before}"
    for phase in PHASES:
        if phase == "pretrain":
            with story.timed("tokenizer"):
                _train_tokenizer(tokenizer)
        config = _config(phase, scale, overrides[phase])
        with story.timed(phase):
            _run_phase(phase, config, out / phase, story)


def _config(phase: str, scale: float, override: str) -> RunConfig:
    """The shipped config of a phase, its steps multiplied by `scale`."""
    from laneformer_jax import settings
    from train.config import RunConfig

    path = settings.find_config(f"quickstart/{phase}")
    config = settings.load(RunConfig, path, [override])
    steps = max(4, round(config.train.steps * scale))
    factor = steps / config.train.steps
    scaled = {
        "train.steps": steps,
        "schedule.warmup_steps": int(config.schedule.warmup_steps * factor),
        "schedule.decay_steps": int(config.schedule.decay_steps * factor),
        "checkpoint.interval": max(1, round(config.checkpoint.interval * factor)),
        "eval.interval": max(1, round((config.eval.interval or steps) * factor)),
        "eval.batches": max(2, round((config.eval.batches or 1) * min(factor, 1))),
    }
    return settings.load(RunConfig, path, [override, *(f"{k}={v}" for k, v in scaled.items())])


def _train_tokenizer(path: Path) -> None:
    from data import training_texts
    from laneformer_jax.tokenizer import train_tokenizer

    if path.exists():
        return
    config = _config("pretrain", 1.0, f"tokenizer={path}")
    print(f"tokenizer: {VOCAB_SIZE} entries from the standard library", file=sys.stderr)
    train_tokenizer(training_texts(config.data), VOCAB_SIZE, path)


def _run_phase(phase: str, config: RunConfig, out: Path, story: Story) -> None:
    """Train one phase; the first is stopped by a signal half-way and resumed, if it is new."""
    from train.loop import train
    from train.metrics import JSONL, read_jsonl

    if phase == "pretrain":
        model = config.model.build() if config.model else None
        assert model is not None
        story.parameters, story.lanes = model.num_parameters(), model.num_lanes
        story.delay = model.broadcast_delay
        if not (out / "checkpoints").exists():
            with _signal_at(config.train.steps // 2, out / JSONL) as sent:
                result = train(config, out)
            if sent.is_set() and result.exit_code:
                story.stopped_at = result.step
                print(f"stopped on purpose at step {result.step}; resuming", file=sys.stderr)
            else:
                _go_on(result.exit_code)
    result = train(config, out)
    _go_on(result.exit_code)
    losses = [r["eval_loss"] for r in read_jsonl(out / JSONL) if "eval_loss" in r]
    story.eval_loss[phase] = losses[-1]


def _go_on(exit_code: int) -> None:
    if exit_code:
        raise Stopped(exit_code)


@contextmanager
def _signal_at(step: int, metrics: Path) -> Iterator[threading.Event]:
    """Send this process SIGTERM, as a cluster would, once the run in the block has made `step` updates."""
    from train.metrics import read_jsonl

    sent, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if any(record["step"] >= step for record in read_jsonl(metrics)):
                sent.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


def _sample(out: Path, story: Story) -> None:
    import numpy as np

    import decode
    from laneformer_jax.checkpoint.load import load_checkpoint

    with story.timed("samples"):
        loaded = load_checkpoint(out / PHASES[-1])
        model, tokenizer = loaded.model, loaded.tokenizer
        for prompt in PROMPTS:
            messages = [{"role": "user", "content": prompt.text}]
            ids = loaded.prompt_ids(messages if prompt.chat else prompt.text)
            tokens = decode.generate(
                model, np.asarray([ids]), NEW_TOKENS, eos_token_id=tokenizer.eos_id
            ).tokens[0]
            ended = tokens.tolist().index(tokenizer.eos_id) if tokenizer.eos_id in tokens else None
            story.samples.append((prompt, tokenizer.decode(tokens[:ended].tolist())))


def _export(out: Path, story: Story) -> None:
    import shutil

    from laneformer_jax.checkpoint import convert

    with story.timed("export"):
        if (out / "hf").exists():
            shutil.rmtree(out / "hf")
        convert.export(out / PHASES[-1], out / "hf", check=True)

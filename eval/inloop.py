"""Evaluation beside training: checkpoints are scored in another process while the trainer goes on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_NICE = 10  # training's own threads come first


def check_suites(suites: Sequence[str]) -> None:
    """Whether these are suites that can be evaluated.

    Raises:
        UserError: an unknown name, or `ppl` without text.
    """
    from eval.run import parse_suite

    for suite in suites:
        parse_suite(suite, None)


@dataclass
class BackgroundEvaluation:
    """`laneformer evaluate` of one checkpoint in a process of its own, which dies with this one.

    Args:
        checkpoint: a complete checkpoint; it must not be removed while this runs.
        suites: as `--suite`, such as `("humaneval+", "ppl=heldout.jsonl")`.
        out: folder of the results; `log.txt` in it holds what the process prints.
        limit: first tasks or documents only.
        data: as `--data`.
        options: more command-line options, such as `("--base",)`.
        environment: variables for the process. By default it leaves the accelerator to the trainer.
    """

    checkpoint: str | Path
    suites: Sequence[str]
    out: Path
    limit: int | None = None
    data: str | Path | None = None
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"JAX_PLATFORMS": "cpu"})

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "eval.inloop", str(os.getpid())]
        command += ["evaluate", str(self.checkpoint)]
        for suite in self.suites:
            command += ["--suite", suite]
        if self.limit is not None:
            command += ["--limit", str(self.limit)]
        if self.data is not None:
            command += ["--data", str(self.data)]
        command += ["--out", str(self.out), "--workers", "1", *self.options]
        with open(self.out / "log.txt", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                # Signals to the trainer's group (Ctrl-C, preemption) are the trainer's to pass on.
                start_new_session=True,
            )

    def running(self) -> bool:
        """Whether the process still works."""
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> dict[str, float]:
        """Scores as flat numbers, such as `humaneval+/plus/pass@1` and `ppl/bits_per_byte`.

        Raises:
            RuntimeError: the process failed; the message ends its log.
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        code = self._process.wait(timeout)
        if code:
            log = (self.out / "log.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"evaluation of {self.checkpoint} failed ({code}):\n{log[-2000:]}")
        return flat(json.loads((self.out / "results.json").read_text(encoding="utf-8")))

    def stop(self) -> None:
        """End the process; started again with the same folder, an evaluation goes on."""
        self._process.terminate()
        self._process.wait()


def flat(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a `results.json` under one-line names."""
    found = {
        f"{suite}/{part}/{metric}": float(value["value"])
        for suite, result in results["suites"].items()
        for part, scores in result["scores"].items()
        for metric, value in scores.items()
        if metric != "solved"
    }
    if "perplexity" in results:
        for name in ("perplexity", "bits_per_byte"):
            found[f"ppl/{name}"] = float(results["perplexity"][name])
    return found


def main(parent: int, arguments: list[str]) -> int:
    """The process itself: the command line, ended when `parent` ends however that happens."""
    from laneformer_jax.cli import main as command_line

    os.nice(_NICE)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it ended before we asked
    return command_line(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

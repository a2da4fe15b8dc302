"""Train one phase from a config file.

    laneformer train --config quickstart/pretrain --out runs/pretrain train.steps=200

CONFIG is a YAML file, or the name of a shipped one. Settings are overridden by name=value. The same
command again continues a run that was stopped. Exit codes: 0 complete, 2 bad input, 143 after SIGTERM
(130 SIGINT, 138 SIGUSR1) with the state saved; a second signal exits at once without saving.
On several hosts start the same command on each (`docs/multihost.md`).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from laneformer_jax.errors import UserError

if TYPE_CHECKING:
    from train.config import RunConfig

_LEAVE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="CONFIG", help="YAML file or its name")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder")
    parser.add_argument(
        "--resume",
        choices=("auto", "never", "must"),
        default="auto",
        help="continue from a checkpoint in DIR: if there is one (auto), or fail if there is"
        " (never) or is not (must)",
    )
    parser.add_argument(
        "--restart-data",
        action="store_true",
        help="on resume start the data afresh; needed when the mixture changed",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="trace updates 3 to 5 into DIR/profile, for Perfetto or TensorBoard",
    )
    group = parser.add_argument_group("only tell what the run would take")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="compile the step from shapes alone; memory, FLOPs, a bound on speed, days",
    )
    group.add_argument("--devices", type=int, default=8, metavar="N", help="default: 8")
    group.add_argument("--hardware", default="h200", metavar="NAME", help="default: h200")
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--distributed",
        choices=("auto", "none", "slurm", "openmpi"),
        default="auto",
        help="find the others from what srun or mpirun set; auto (default): whichever of the two"
        " says that there are several",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="or by hand: process 0's address")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="from 0 to N - 1")
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings to replace")


def run(args: argparse.Namespace) -> int:
    from laneformer_jax import settings
    from train.config import RunConfig

    overrides = args.overrides
    if (
        args.dry_run
    ):  # which reads no text: the recipes that are given their tokenizer need none here
        overrides = ["tokenizer=unread", *overrides]
    config = settings.load(RunConfig, settings.find_config(args.config), overrides)
    if args.dry_run:
        return _dry_run(config, args.devices, args.hardware)
    if args.out is None:
        raise UserError("--out: the run needs a folder")

    from train import processes

    processes.join(args.distributed, args.coordinator, args.num_processes, args.process_id)
    first = processes.Processes().first
    if first:
        print(settings.to_yaml(config), end="", flush=True)

    from train.loop import train

    result = train(config, args.out, args.resume, args.restart_data, args.profile)
    if result.exit_code:
        _leave_in(_LEAVE_S, result.exit_code)
    if result.exit_code == 0 and first:
        shown = "" if result.loss is None else f", loss {result.loss:.4f}"
        if result.eval_loss is not None:
            shown += f", held-out loss {result.eval_loss:.4f}"
        print(f"{config.phase}: {result.step} steps{shown}; {args.out}")
    return result.exit_code


def _leave_in(seconds: float, code: int) -> None:
    """At the end of Python, do not wait longer for threads of libraries, which may wait for data."""

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=leave, daemon=True).start()


def _dry_run(config: RunConfig, devices: int, hardware: str) -> int:
    from laneformer_jax.hardware import find_device

    device = find_device(hardware)
    if devices < 1:
        raise UserError(f"--devices {devices}: must be at least 1")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from train.dry_run import dry_run, text

    print(text(dry_run(config, devices, device)))
    return 0

"""Compare models by training them: cells of a grid, a tuned learning rate each, several seeds.

    laneformer ablate ablation/lanes --out runs/ablate

CONFIG is a YAML file, or the name of a shipped one. The same command again goes on where an earlier
one stopped; runs that are done are not done again. On a cluster, two array jobs and a report:

    sbatch --array=0-9 --wrap 'laneformer ablate ablation/lanes --out DIR --phase tune'
    sbatch --array=0-9 --dependency=… --wrap 'laneformer ablate ablation/lanes --out DIR --phase seeds'
    laneformer ablate ablation/lanes --out DIR --phase report
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from laneformer_jax.errors import UserError

if TYPE_CHECKING:
    from train.ablate.runs import Ablation

PHASES = ("all", "tune", "seeds", "report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file or its name")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder for all runs"
    )
    parser.add_argument(
        "--phase",
        choices=PHASES,
        default="all",
        help="tune learning rates, run the seeds at the best ones, or only write what there is",
    )
    parser.add_argument(
        "--task",
        metavar="I/N",
        help="do every N-th run from the I-th on, I from 0; default: what a SLURM array sets",
    )
    parser.add_argument(
        "--list", action="store_true", help="show the runs and whether they are done"
    )
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings to replace")


def run(args: argparse.Namespace) -> int:
    from laneformer_jax import settings
    from train.ablate.config import AblationConfig, check_cells
    from train.ablate.runs import Ablation

    config = settings.load(AblationConfig, settings.find_config(args.config), args.overrides)
    task = _task(args.task)
    if task != (0, 1) and args.phase == "all":
        raise UserError("phase: an array's tasks need --phase tune, then --phase seeds")
    ablation = Ablation(config, args.out)
    check_cells(config, ablation.tokenizer)
    if args.list:
        _list(ablation)
        return 0
    if args.phase != "report":
        if task[0] == 0 or not ablation.tokenizer.exists():
            ablation.train_tokenizer()
        for phase in ("tune", "seeds") if args.phase == "all" else (args.phase,):
            runs = ablation.tuning() if phase == "tune" else ablation.comparison()
            code = ablation.do(runs[task[0] :: task[1]])
            if code:
                return code
    if task == (0, 1):
        from train.ablate import report

        print(report.write(ablation), end="")
    return 0


def _task(given: str | None) -> tuple[int, int]:
    """This process's share of the runs: (number, of how many)."""
    if given is None:
        number, count = (os.environ.get(f"SLURM_ARRAY_TASK_{name}") for name in ("ID", "COUNT"))
        if number is None or count is None:
            return 0, 1
        first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", 0))
        given = f"{int(number) - first}/{count}"
    parts = re.fullmatch(r"(\d+)/(\d+)", given)
    if parts is None or not int(parts[1]) < int(parts[2]):
        raise UserError(f"task: {given!r} must be I/N with I from 0 to N - 1, such as 0/10")
    return int(parts[1]), int(parts[2])


def _list(ablation: Ablation) -> None:
    runs = ablation.tuning()
    try:
        runs += ablation.comparison()
    except UserError as error:
        print(f"seeds: {error}")
    for one in runs:
        if ablation.result(one) is not None:
            state = "done"
        else:
            state = "begun" if ablation.path(one).exists() else "to do"
        print(f"{state:<6} {one.key}  {one.cell}, lr {one.learning_rate:g}, seed {one.seed}")

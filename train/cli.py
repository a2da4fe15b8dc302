"""Train one phase from a config file.

    laneformer train --config quickstart/pretrain --out runs/pretrain train.steps=200

CONFIG is a YAML file, or the name of a shipped one. Settings are overridden by name=value. The same
command again continues a run that was stopped. Exit codes: 0 complete, 2 bad input, 143 after SIGTERM
(130 SIGINT, 138 SIGUSR1) with the state saved; a second signal exits at once without saving.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="CONFIG", help="YAML file or its name")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the run's folder")
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
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings to replace")


def run(args: argparse.Namespace) -> int:
    from laneformer_jax import settings
    from train.config import RunConfig

    config = settings.load(RunConfig, settings.find_config(args.config), args.overrides)
    print(settings.to_yaml(config), end="", flush=True)

    from train.loop import train

    result = train(config, args.out, args.resume, args.restart_data)
    if result.exit_code == 0:
        shown = "" if result.loss is None else f", loss {result.loss:.4f}"
        if result.eval_loss is not None:
            shown += f", held-out loss {result.eval_loss:.4f}"
        print(f"{config.phase}: {result.step} steps{shown}; {args.out}")
    return result.exit_code

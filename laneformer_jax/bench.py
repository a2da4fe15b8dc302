"""Measure speed on this machine."""

from __future__ import annotations

import argparse
import importlib

# Module with `add_arguments` and `run`, cheap to import, and what it measures.
BENCHES: dict[str, tuple[str, str]] = {
    "data": ("data.bench", "reading, tokenising, packing: tokens per second, start-up, memory"),
    "decode": (
        "decode.bench",
        "decoding beside PyTorch's: first token, tokens per second, share of the memory's read rate",
    ),
    "train": (
        "train.bench",
        "a training step beside PyTorch's: tokens per second, lanes against one",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer bench`."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, (module, help_) in BENCHES.items():
        one = benches.add_parser(name, help=help_, description=help_)
        importlib.import_module(module).add_arguments(one)


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement."""
    return int(importlib.import_module(BENCHES[args.bench][0]).run(args))

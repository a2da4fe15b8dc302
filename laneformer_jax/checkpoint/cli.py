"""Checkpoints to and from Hugging Face folders of safetensors."""

import argparse
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from laneformer_jax.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn Hugging Face safetensors into a checkpoint for training and decoding."
    )
    parser.add_argument("source", metavar="SRC", help="folder or Hub repository id")
    parser.add_argument("target", metavar="DST", help="new checkpoint folder")
    parser.add_argument("--lanes", type=int, metavar="L", help="split a dense model into L lanes")
    parser.add_argument(
        "--delay", type=int, metavar="N", help="broadcast delay of the lanes in layers (default: 2)"
    )
    parser.add_argument(
        "--layout",
        choices=("contiguous", "affinity"),
        help="affinity: strongly coupled neurons and kv heads share a lane (default: contiguous)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="text on which affinity measures the coupling"
    )
    _add_common(parser)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as a Hugging Face folder of safetensors."
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint, or a training run's folder")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument(
        "--as",
        dest="as_",
        choices=("lanes", "llama"),
        default="lanes",
        help="llama: one dense model for plain transformers, where the lanes are mathematically dense",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="entries of the vocabulary to keep (default: those the tokenizer knows; all, if imported)",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the running mean of the parameters that training kept (optimizer.ema)",
    )
    parser.add_argument(
        "--shard-size", metavar="SIZE", help="most bytes in a file, as 500MB (default: 5GB)"
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: keep)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read everything back; compare tensors and probe logits (needs room for the model)",
    )


def run_import(args: argparse.Namespace) -> int:
    from laneformer_jax.checkpoint import convert, dense, hf

    with _termination_interrupts():
        folder = hf.find_folder(args.source)
        common: dict[str, Any] = dict(dtype=args.dtype, check=args.verify, name=args.source)
        if dense.is_dense(folder):
            if args.lanes is None:
                raise UserError(
                    f"{args.source}: is a dense model; name the lanes, as in `--lanes 8 --delay 2`"
                )
            delay = 2 if args.delay is None else args.delay
            order = _order(folder, args, delay)
            report = convert.import_dense(
                folder, args.target, lanes=args.lanes, delay=delay, order=order, **common
            )
        else:
            for name in ("lanes", "delay", "layout", "calibration"):
                if getattr(args, name) is not None:
                    raise UserError(f"--{name}: {args.source} is no dense model to split")
            report = convert.import_lanes(folder, args.target, **common)
    _print(report)
    return 0


def _order(folder: Path, args: argparse.Namespace, delay: int) -> Any:
    """The order of the units that --layout asks for; None: as they are."""
    if (args.layout == "affinity") != (args.calibration is not None):
        raise UserError(
            "--calibration: goes with --layout affinity, which needs a text file to measure on"
        )
    if args.layout != "affinity":
        return None
    from laneformer_jax.checkpoint import affinity, dense, verify
    from laneformer_jax.tokenizer import Tokenizer

    split = dense.DenseFolder(folder, args.lanes, delay)
    ids = affinity.calibration_ids(args.calibration, Tokenizer.load(folder), split.config)
    return affinity.affinity_order(split.config, verify.read_all(split), ids)


def run_export(args: argparse.Namespace) -> int:
    from laneformer_jax.checkpoint import convert

    shard_bytes = None if args.shard_size is None else parse_size(args.shard_size)
    with _termination_interrupts():
        report = convert.export(
            args.checkpoint,
            args.target,
            layout=args.as_,
            dtype=args.dtype,
            vocab_size=args.vocab_size,
            shard_bytes=shard_bytes,
            average=args.ema,
            check=args.verify,
        )
    _print(report)
    return 0


def parse_size(text: str) -> int:
    """`500MB` -> 500,000,000. Raises UserError."""
    match = re.fullmatch(r"(\d+)\s*([KMG]B)?", text.strip().upper())
    if not match or int(match[1]) == 0:
        raise UserError(f"shard-size: {text!r} must be a number of bytes, as 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2] or ""]


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """A termination signal interrupts, so that nothing is left behind."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(report: Any) -> None:
    rate = report.nbytes / 1e6 / max(report.seconds, 1e-9)
    print(
        f"{report.folder}: {report.tensors} tensors, {report.nbytes:,} bytes in {report.seconds:.1f} s "
        f"({rate:.0f} MB/s)"
    )
    for text in report.checks:
        print(f"verified: {text}")
    for text in report.notes:
        print(f"note: {text}")

"""Options that `laneformer generate` and `laneformer serve` share, and the checkpoint behind them."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laneformer_jax.kernels.names import KERNELS

if TYPE_CHECKING:
    from decode.engine import Engine
    from decode.request import Sampling
    from laneformer_jax.checkpoint.load import Loaded


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """What to load, and how it is laid out."""
    parser.add_argument(
        "checkpoint", help="Hugging Face folder or repository, native checkpoint, or run folder"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--weights",
        choices=("native", "int8"),
        default="native",
        help="int8 rounds each output channel to 8 bits (default native)",
    )
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="xla",
        help="of the decode step: plain JAX (default); GPU kernels with five launches a layer, one, or one "
        "for all layers; the best there is; or those interpreted on a CPU, to test them",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="spread the lanes over this many devices (default: 1)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="most tokens of prompt and answer (default: the model's)",
    )
    parser.add_argument(
        "--burst", type=int, default=8, metavar="N", help="tokens that come at once (default 8)"
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn; see `decode.request.Sampling`."""
    group = parser.add_argument_group("sampling")
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    group.add_argument(
        "--temperature", default=0.0, help="0 takes the likeliest token (default)", **number
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="of the K likeliest tokens"
    )
    group.add_argument(
        "--top-p", default=1.0, help="of the likeliest that make up this probability", **number
    )
    group.add_argument(
        "--min-p", default=0.0, help="of those at least this share as likely as the first", **number
    )
    group.add_argument(
        "--repetition-penalty",
        default=1.0,
        help="above 1: against what stands in prompt or answer",
        **number,
    )
    group.add_argument(
        "--presence-penalty", default=0.0, help="against what stands in the answer", **number
    )
    group.add_argument(
        "--frequency-penalty", default=0.0, help="the same, each time it stands there", **number
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to a token's logit; may be given several times",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="same seed, same text (default %(default)s)"
    )


def sampling(args: argparse.Namespace) -> Sampling:
    """The options of `add_sampling` and `--logprobs`. Raises UserError."""
    from decode.request import Sampling
    from laneformer_jax.errors import UserError

    bias = {}
    for item in args.logit_bias:
        token, _, value = item.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit-bias: {item!r} must be ID=NUMBER, such as 13=-100") from None
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=bias,
        seed=args.seed,
        logprobs=args.logprobs,
    )


@contextmanager
def without_collector() -> Iterator[None]:
    """For loading and tracing: they leave little garbage, and Python's search for it would take a sixth of
    the time until the first token."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load(args: argparse.Namespace) -> tuple[Loaded, Engine]:
    """The checkpoint of `args` and an engine for it. Compiled programs are kept for the next time.

    Raises:
        UserError: no such checkpoint, or an option it cannot take.
    """
    from laneformer_jax import compile_cache

    compile_cache.enable()
    from decode.engine import Engine
    from laneformer_jax.checkpoint.load import load_checkpoint
    from laneformer_jax.sharding import make_mesh

    mesh = make_mesh(lane=args.lanes) if args.lanes is not None and args.lanes != 1 else None
    loaded = load_checkpoint(args.checkpoint, dtype=args.dtype, mesh=mesh)
    engine = Engine(
        loaded.model,
        vocab_size=loaded.tokenizer.vocab_size,
        context=args.context,
        burst=args.burst,
        weights=args.weights,
        kernels=args.kernels,
    )
    return loaded, engine


def name_of(checkpoint: str) -> str:
    """What to call a checkpoint: the folder's name, or `owner/name` of a repository."""
    path = Path(checkpoint)
    name = path.resolve().name if path.exists() else checkpoint
    # A file system may know names that are not UTF-8.
    return name.encode("utf-8", "replace").decode("utf-8")

"""`laneformer evaluate`: HumanEval(+), MBPP(+) and held-out text, for checkpoints, servers, samples.

Answers, programs, verdicts, scores and an HTML report are written to --out. A run that is stopped
goes on where it was when started again with the same options.

  laneformer evaluate CKPT --suite humaneval+ --suite mbpp+
  laneformer evaluate --endpoint http://localhost:8000/v1 --model NAME --suite humaneval+
  laneformer evaluate --samples samples.jsonl --suite mbpp+
  laneformer evaluate CKPT --suite ppl --data heldout.jsonl
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `laneformer evaluate`."""
    source = parser.add_argument_group("what is evaluated (one of)")
    source.add_argument("checkpoint", nargs="?", help="a checkpoint, run or Hugging Face folder")
    source.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server")
    source.add_argument(
        "--samples", metavar="FILE", type=Path, help="programs in EvalPlus's samples format"
    )
    parser.add_argument(
        "--suite",
        action="append",
        metavar="NAME[=PATH]",
        help="humaneval, humaneval+, mbpp, mbpp+ or ppl; may be repeated; PATH: local data",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="local data for suites without a PATH of their own; the text for ppl",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: evaluations/NAME")
    parser.add_argument("--limit", type=int, metavar="N", help="first N tasks or documents only")

    answers = parser.add_argument_group("answers")
    answers.add_argument("--base", action="store_true", help="continue the prompt, without chat")
    answers.add_argument("--model", default="default", help="model name for --endpoint")
    answers.add_argument("--n", type=int, default=1, help="answers per task (default 1)")
    answers.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    answers.add_argument("--max-new-tokens", type=int, default=768, metavar="N")
    answers.add_argument("--seed", type=int, default=0)
    answers.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the parameters")

    judging = parser.add_argument_group("judging")
    judging.add_argument(
        "--extract", action="store_true", help="--samples holds answers, not bare programs"
    )
    judging.add_argument("--workers", type=int, default=_cores(), help="default: all cores")
    judging.add_argument(
        "--unsafe-no-sandbox",
        action="store_true",
        help="run programs even where Landlock and seccomp do not hold",
    )
    text = parser.add_argument_group("held-out text")
    text.add_argument("--context", type=int, help="tokens a window holds (default: the longest)")
    text.add_argument("--stride", type=int, help="new tokens per window (default: half)")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the scores, write the results; 0 when done."""
    from eval.run import Request, evaluate, parse_suite
    from laneformer_jax.errors import UserError

    if sum(x is not None for x in (args.checkpoint, args.endpoint, args.samples)) != 1:
        raise UserError("give one of a checkpoint, --endpoint or --samples")
    for name, least in (("n", 1), ("workers", 1), ("max_new_tokens", 1), ("limit", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} = {value}: must be at least {least}")
    if args.temperature < 0:
        raise UserError(f"--temperature = {args.temperature}: must be 0 or more")
    if args.n > 1 and args.temperature == 0:
        raise UserError("--n above 1 needs --temperature above 0: greedy answers are all the same")
    suites = [parse_suite(text, args.data) for text in args.suite or ["humaneval+", "mbpp+"]]
    name = args.checkpoint or args.model if not args.samples else args.samples.stem
    evaluate(
        Request(
            suites=dict(suites),
            out=args.out or Path("evaluations") / Path(str(name)).name,
            checkpoint=args.checkpoint,
            endpoint=args.endpoint,
            samples=args.samples,
            extract=args.extract,
            model=args.model,
            chat=not args.base,
            n=args.n,
            temperature=args.temperature,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            dtype=args.dtype,
            limit=args.limit,
            workers=args.workers,
            unsafe=args.unsafe_no_sandbox,
            context=args.context,
            stride=args.stride,
        )
    )
    return 0


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

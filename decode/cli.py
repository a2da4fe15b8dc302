"""`laneformer generate`: continue a prompt, or answer chat messages.

The text comes as it is made. On a terminal a line below it shows the speed: tokens per second of this
answer after its first burst, and how long the first token took, loading aside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode import options

if TYPE_CHECKING:
    from decode.complete import Ask, Step, Token
    from laneformer_jax.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_checkpoint(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue (default: standard input)")
    source.add_argument("--file", type=Path, help="a file that holds it")
    source.add_argument(
        "--messages",
        metavar="FILE",
        help="chat messages to answer, JSON as in OpenAI's API; - is standard input",
    )
    parser.add_argument(
        "--chat", action="store_true", help="the text is a user's message; the assistant answers"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: what the assistant is told first"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="(default 128)"
    )
    options.add_sampling(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--stop-token",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="end before this id",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end token")
    parser.add_argument("--n", type=int, default=1, help="answers to the same prompt (default 1)")
    parser.add_argument(
        "--speculate",
        choices=("ngram",),
        help="propose what followed the same words before; the same answer, sooner where text repeats",
    )
    parser.add_argument(
        "--overflow",
        choices=("refuse", "cut"),
        default="refuse",
        help="when prompt and new tokens exceed the context: refuse (default), or fewer new tokens",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities of the tokens and of the N likeliest in their place",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    from laneformer_jax.errors import UserError

    if args.logprobs is not None and not args.json:
        raise UserError("--logprobs: needs --json")
    prompt = _prompt(args)
    with options.without_collector():
        sampling = options.sampling(args)  # what is wrong with it is told before the model loads
        began = time.perf_counter()
        loaded, engine = options.load(args)

        from decode.complete import ask, complete

        asked = ask(
            loaded,
            engine,
            prompt,
            args.max_new_tokens,
            stop=args.stop,
            stop_token_ids=args.stop_token,
            ignore_eos=args.ignore_eos,
            sampling=sampling,
            n=args.n,
            speculate=args.speculate,
            overflow=args.overflow,
        )
        told = _Told(asked, time.perf_counter() - began)
        later = complete(engine, loaded.tokenizer, asked)
        first = next(later)
    steps = itertools.chain([first], later)
    if args.json:
        for step in steps:
            told.add(step)
        print(json.dumps(told.record(loaded.tokenizer), ensure_ascii=False, allow_nan=False))
        return 0

    from decode import terminal

    if terminal.is_terminal(sys.stdout):
        with terminal.Screen(sys.stdout) as screen:
            for step in steps:
                screen.write(told.add(step))
                screen.status(told.figures())
            screen.write("\n" + told.rest())
        print(told.figures(), file=sys.stderr)
        return 0
    for step in steps:
        print(told.add(step), end="", flush=True)
    print("\n" + told.rest(), end="")
    return 0


class _Told:
    """What has come of a request so far."""

    def __init__(self, asked: Ask, load_seconds: float):
        self._asked, self._load = asked, load_seconds
        n = asked.request.n
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._tokens: list[list[Token]] = [[] for _ in range(n)]
        self._finish: list[str | None] = [None] * n
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._drawn = self._later = 0  # of the first sample; those after the first burst
        self._proposed = self._accepted = 0

    def add(self, step: Step) -> str:
        """Take in a step; the text it adds to the first answer."""
        self._proposed += step.proposed
        self._accepted += step.accepted
        new = ""
        for piece in step.pieces:
            self._texts[piece.sample].append(piece.text)
            self._tokens[piece.sample] += piece.tokens
            self._finish[piece.sample] = piece.finish
            if piece.sample == 0 and piece.drawn:
                self._last = time.perf_counter()
                self._later += piece.drawn if self._first is not None else 0
                self._first = self._first or self._last
                self._drawn += piece.drawn
                new = piece.text
            elif piece.sample == 0:
                new = piece.text
        return new

    @property
    def _rate(self) -> float | None:
        if self._first is None or not self._later:
            return None
        return self._later / (self._last - self._first)

    def figures(self) -> str:
        """One line for a person."""
        parts = [f"{self._drawn} tokens"]
        if self._rate is not None:
            parts.append(f"{self._rate:.1f} tok/s")
        if self._first is not None:
            parts.append(f"first after {self._first - self._began:.2f} s")
        parts.append(f"loaded in {self._load:.1f} s")
        if self._proposed:
            parts.append(f"{self._accepted / self._proposed:.0%} of {self._proposed} drafts right")
        return " · ".join(parts)

    def rest(self) -> str:
        """The other answers, after the first has been shown."""
        n = len(self._texts)
        return "".join(
            f"\n--- {i + 1} of {n}\n{''.join(texts)}\n" for i, texts in enumerate(self._texts) if i
        )

    def record(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Everything, for a machine. Times in seconds."""
        with_logprobs = self._asked.request.sampling.logprobs is not None
        samples = []
        for texts, tokens, finish in zip(self._texts, self._tokens, self._finish, strict=True):
            sample: dict[str, Any] = {
                "text": "".join(texts),
                "tokens": [token.id for token in tokens],
                "finish_reason": finish,
            }
            if with_logprobs:
                sample["logprobs"] = [_logprobs(token, tokenizer) for token in tokens]
            samples.append(sample)
        first = None if self._first is None else round(self._first - self._began, 4)
        return {
            "samples": samples,
            "prompt_tokens": len(self._asked.request.prompt_ids),
            "load_seconds": round(self._load, 4),
            "time_to_first_token": first,
            "decode_tokens_per_second": None if self._rate is None else round(self._rate, 2),
            "seconds": round(time.perf_counter() - self._began, 4),
            "draft_tokens": self._proposed,
            "accepted_draft_tokens": self._accepted,
        }


def _logprobs(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    def shown(token_id: int, logprob: float | None) -> dict[str, Any]:
        known = token_id < tokenizer.vocab_size
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace") if known else ""
        finite = None if logprob is None or logprob == float("-inf") else logprob
        return {"id": token_id, "token": text, "logprob": finite}

    return {**shown(token.id, token.logprob), "top": [shown(i, lp) for i, lp in token.top]}


def _prompt(args: argparse.Namespace) -> Any:
    """Text to continue, or chat messages."""
    from laneformer_jax.errors import UserError
    from laneformer_jax.files import parse_json

    if args.messages is not None:
        if args.chat or args.system:
            raise UserError("--messages: says who speaks; leave out --chat and --system")
        path = None if args.messages == "-" else Path(args.messages)
        name, text = _read(path)
        messages = parse_json(text, name)
        messages = messages.get("messages") if isinstance(messages, dict) else messages
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise UserError(f"{name}: must hold a JSON array of messages, or an object with one")
        if not messages:
            raise UserError(f"{name}: holds no messages")
        return messages
    text = args.prompt if args.prompt is not None else _read(args.file)[1]
    if not text:
        raise UserError("prompt: is empty; give --prompt, --file or text on standard input")
    if not args.chat:
        if args.system:
            raise UserError("--system: needs --chat")
        return text
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": text}]


def _read(path: Path | None) -> tuple[str, str]:
    """What errors call the source, and its text."""
    from laneformer_jax.errors import UserError

    name = str(path) if path else "standard input"
    if path is None and sys.stdin.isatty():
        print("type the prompt; Ctrl-D at the start of a line ends it", file=sys.stderr)
    try:
        data = path.read_bytes() if path else sys.stdin.buffer.read()
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    try:
        return name, data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}") from None

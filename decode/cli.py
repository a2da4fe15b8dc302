"""`laneformer generate`: continue a prompt, or answer a chat message."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="Hugging Face folder or repository, native checkpoint, or run folder"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue (default: standard input)")
    source.add_argument("--file", type=Path, help="a file that holds it")
    parser.add_argument(
        "--chat", action="store_true", help="the text is a user's message; the assistant answers"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end token")
    parser.add_argument(
        "--overflow",
        choices=("refuse", "cut"),
        default="refuse",
        help="when prompt and new tokens exceed the context: refuse (default), or fewer new tokens",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    text = _prompt(args)
    import numpy as np

    import decode
    from laneformer_jax.checkpoint.load import load_checkpoint
    from laneformer_jax.errors import UserError

    model, tokenizer, chat = load_checkpoint(args.checkpoint, dtype=args.dtype)
    if args.chat:
        message: list[dict[str, Any]] = [{"role": "user", "content": text}]
        ids = chat.encode(message, tokenizer, add_generation_prompt=True).ids.tolist()
    else:
        ids = tokenizer.encode(text, bos=True)
    if not text and not args.chat:
        raise UserError("prompt: is empty; give --prompt, --file or text on standard input")
    stops = set() if args.ignore_eos else {tokenizer.eos_id}

    decoder = tokenizer.stream()
    answer: list[int] = []
    pieces: list[str] = []
    started = time.perf_counter()
    finished = "length"
    for burst in decode.stream(
        model,
        np.asarray([ids], np.int32),
        args.max_new_tokens,
        args.temperature,
        eos_token_id=None if args.ignore_eos else tokenizer.eos_id,
        seed=args.seed,
        overflow=args.overflow,
    ):
        for token in burst[0].tolist():
            if token in stops:
                finished = "stop"
                break
            answer.append(token)
            pieces.append(decoder.push(token))
            if not args.json:
                print(pieces[-1], end="", flush=True)
        if finished == "stop":
            break
    pieces.append(decoder.flush())
    if not args.json:
        print(pieces[-1])
        return 0
    record = {
        "text": "".join(pieces),
        "tokens": answer,
        "prompt_tokens": len(ids),
        "finish_reason": finished,
        "seconds": round(time.perf_counter() - started, 3),
    }
    print(json.dumps(record, ensure_ascii=False))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    from laneformer_jax.errors import UserError

    if args.prompt is not None:
        return args.prompt
    name = str(args.file) if args.file else "standard input"
    try:
        data = args.file.read_bytes() if args.file else sys.stdin.buffer.read()
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}") from None

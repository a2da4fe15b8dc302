"""The `laneformer` command: a table of subcommands, each imported only when it is chosen."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import laneformer_jax
from laneformer_jax.errors import UserError, nearest, refusal

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_plain_format = warnings.formatwarning


class Command(NamedTuple):
    """A subcommand: `module` has `add_arguments(parser)` and `run(args) -> int`, or other names."""

    module: str
    help: str
    add_arguments: str = "add_arguments"
    run: str = "run"


COMMANDS: dict[str, Command] = {
    "quickstart": Command("train.quickstart", "train, resume, sample and export a small model"),
    "train": Command("train.cli", "train one phase from a config file"),
    "generate": Command("decode.cli", "continue a prompt, or answer chat messages"),
    "serve": Command("decode.server.cli", "answer over HTTP, as OpenAI's interface, with a page"),
    "evaluate": Command("eval.cli", "HumanEval+, MBPP+ and perplexity of a checkpoint"),
    "export": Command(
        "laneformer_jax.checkpoint.cli",
        "write a training checkpoint as Hugging Face safetensors",
        add_arguments="add_export_arguments",
        run="run_export",
    ),
    "import": Command(
        "laneformer_jax.checkpoint.cli",
        "turn Hugging Face safetensors into a training checkpoint",
        add_arguments="add_import_arguments",
        run="run_import",
    ),
    "tokenizer": Command("data.cli", "train or try a tokenizer"),
    "data": Command(
        "data.cli",
        "tokenise, check and describe the data of a config",
        add_arguments="add_data_arguments",
        run="run_data",
    ),
    "bench": Command("laneformer_jax.bench", "measure speed on this machine"),
    "tune": Command("laneformer_jax.kernels.tune", "measure the GPU kernels' block sizes"),
    "ablate": Command("train.ablate.cli", "compare models by training them over a grid"),
    "latency": Command("laneformer_jax.latency.cli", "project the decode speed on a node of GPUs"),
    "info": Command("laneformer_jax.info", "parameters, memory and FLOPs of a model"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations, whose errors are UserErrors with suggestions."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        # An empty name, of a shell variable that is not set say, would be the current folder.
        self.register("type", Path, _path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # Overridden because this is where each nested parser still knows its own options.
        parsed, extra = super().parse_known_args(args, namespace)
        for text in extra:
            if re.match(r"--?[A-Za-z]", text):
                name = text.partition("=")[0]
                self.error(f"unknown option {name}{nearest(name, self._option_string_actions)}")
        return parsed, extra

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            message += nearest(choice[1], re.findall(r"[^\s,']+", choice[2]))
        raise UserError(f"{message}; see `{self.prog} --help`")


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must name a file or folder, is empty")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    2 for a UserError, 130 when interrupted, 141 when the reader of stdout went away; other errors
    are ours and keep their traceback. With LANEFORMER_DEBUG=1 every error does. A UserWarning is
    one line on stderr.
    """
    # Not showwarning: whoever records warnings replaces that.
    warnings.formatwarning = _format_warning
    try:
        return _main(argv)
    finally:
        warnings.formatwarning = _plain_format


def _main(argv: Sequence[str] | None) -> int:
    if os.environ.get("LANEFORMER_DEBUG") == "1":
        return _dispatch(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (OSError, ValueError) as error:
        refused = refusal(error)
        if refused is None:
            raise
        return _fail(refused)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _format_warning(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> str:
    if issubclass(category, UserWarning):
        return f"warning: {' '.join(str(message).split())}\n"
    return _plain_format(message, category, *args, **kwargs)


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER_ERROR


def _dispatch(argv: Sequence[str]) -> int:
    name, rest = (argv[0], list(argv[1:])) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"laneformer {laneformer_jax.__version__}")
        return 0
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        allowed = ["--help", "--version"] if what == "option" else [*COMMANDS]
        hint = nearest(name, allowed) or f"; {what}s: {', '.join(allowed)}"
        raise UserError(f"unknown {what} {name!r}{hint}")
    try:
        parser, run = build(name)
        return int(run(_parse(parser, rest)))
    except SystemExit as exit:  # argparse after printing help
        return int(exit.code or 0)


def build(name: str) -> tuple[Parser, Any]:
    """The parser of a subcommand and the function that runs its arguments; imports its module."""
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(
        prog=f"laneformer {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    getattr(module, command.add_arguments)(parser)
    return parser, getattr(module, command.run)


def _parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    try:
        # So that `train --out a x=1 --seed 3 y=2` collects both overrides.
        return parser.parse_intermixed_args(argv)
    except TypeError:  # not possible for a parser with subparsers
        return parser.parse_args(argv)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: laneformer COMMAND [options]",
            "",
            "Laneformer in JAX: residual lanes with delayed tensor parallelism.",
            "",
            "commands:",
            *lines,
            "",
            "`laneformer COMMAND --help` shows the options of a command, `--version` the version.",
            "LANEFORMER_DEBUG=1 shows the traceback of an error.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())

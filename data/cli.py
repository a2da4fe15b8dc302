"""Train a tokenizer, or measure one on files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.config import DataConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer tokenizer`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="train a byte-pair tokenizer that round-trips any text",
        description="Train a sentencepiece tokenizer on the training documents of a data config, or"
        " on files. Documents that a config holds out are not seen.",
    )
    train.add_argument("paths", nargs="*", help="text files, folders or globs")
    train.add_argument("--pattern", default="*", help="which files of a folder (default: all)")
    train.add_argument("--config", help="take the sources of this config's `data` section instead")
    train.add_argument("--vocab-size", type=int, default=32000)
    train.add_argument("--out", required=True, help="folder for tokenizer.model, or a .model file")
    train.add_argument("--max-bytes", type=int, help="train on the first so many bytes of text")

    stats = commands.add_parser("stats", help="tokens, bytes per token and round trip of files")
    stats.add_argument("tokenizer", help="tokenizer.model, tokenizer.json, or their folder")
    stats.add_argument("paths", nargs="+", help="text files, folders or globs")
    stats.add_argument("--pattern", default="*", help="which files of a folder (default: all)")


def run(args: argparse.Namespace) -> int:
    """Do what `add_arguments` parsed; 0 when it worked."""
    return _train(args) if args.command == "train" else _stats(args)


def _train(args: argparse.Namespace) -> int:
    from data.config import DataConfig, SourceConfig
    from data.pipeline import training_texts
    from laneformer_jax.errors import UserError
    from laneformer_jax.tokenizer import train_tokenizer

    if bool(args.paths) == bool(args.config):
        raise UserError("tokenizer train: give either text files or --config, not both")
    if args.config:
        config = read_config(args.config)
    else:
        files = SourceConfig("text", args.paths, args.pattern, on_error="skip")
        config = DataConfig({"files": files})
    texts = _first(training_texts(config), args.max_bytes)
    tokenizer = train_tokenizer(texts, args.vocab_size, args.out)
    print(f"{args.out}: {tokenizer.vocab_size} tokens, sha256 {tokenizer.sha256}")
    return 0


def _stats(args: argparse.Namespace) -> int:
    from data.config import SourceConfig
    from data.sources.opening import open_source
    from laneformer_jax.errors import UserError
    from laneformer_jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(args.tokenizer)
    source = open_source("files", SourceConfig("text", args.paths, args.pattern), "all")
    documents = size = tokens = exact = unreadable = 0
    for index in range(len(source)):
        try:
            text = source[index]["text"]
        except UserError:
            unreadable += 1
            continue
        ids = tokenizer.encode(text)
        documents, tokens = documents + 1, tokens + len(ids)
        size += len(text.encode())
        exact += tokenizer.decode(ids) == text
    print(f"documents       {documents}  ({unreadable} not UTF-8 or unreadable)")
    print(f"tokens          {tokens}")
    print(f"bytes per token {size / max(tokens, 1):.3f}")
    print(f"exact           {exact} of {documents} round trips")
    return 0 if exact == documents else 1


def read_config(path: str) -> DataConfig:
    """The `data` section of a run's config file, or a file that holds nothing but one."""
    from data.config import DataConfig
    from laneformer_jax import settings, yaml12

    file = settings.find_config(path)
    whole = yaml12.read_mapping(file)
    return settings.from_dict(DataConfig, whole.get("data", whole), str(file))


def _first(texts: Iterator[str], limit: int | None) -> Iterator[str]:
    left = limit
    for text in texts:
        yield text
        if left is not None:
            left -= len(text.encode())
            if left <= 0:
                return

"""Train and measure tokenizers; tokenise, check and describe data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
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


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer data`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    tokenize = commands.add_parser(
        "tokenize",
        help="write a source's documents as token ids",
        description="Write one source of a data config as shards of token ids, read afterwards as"
        " `kind: tokenized`. A stopped run goes on where it was. Held-out documents are left out.",
    )
    tokenize.add_argument("config", help="a data config, or a run's config with a `data` section")
    tokenize.add_argument(
        "overrides", nargs="*", metavar="name=value", help="such as sources.x.path=…"
    )
    tokenize.add_argument("--tokenizer", required=True, help="file or folder of the tokenizer")
    tokenize.add_argument("--out", required=True, help="folder for the shards")
    tokenize.add_argument("--source", help="which source (default: the only one)")
    tokenize.add_argument("--documents-per-shard", type=int, default=20_000)
    tokenize.add_argument("--workers", type=int, default=0, help="processes that encode")
    tokenize.add_argument(
        "--near-duplicates",
        type=float,
        metavar="SIMILARITY",
        help="leave out documents at least so similar to an earlier one, such as 0.8",
    )

    check = commands.add_parser("check", help="compare a tokenised folder with its checksums")
    check.add_argument("folder")

    report = commands.add_parser(
        "report",
        help="tokens, documents, shares, duplicates and lengths of a mixture",
        description="Read every source of a data config once and print what it holds.",
    )
    report.add_argument("config", help="a data config, or a run's config with a `data` section")
    report.add_argument("overrides", nargs="*", metavar="name=value")
    report.add_argument("--tokenizer", required=True, help="file or folder of the tokenizer")
    report.add_argument("--seq-len", type=int, default=1024, help="tokens of a row (default 1024)")
    report.add_argument("--max-documents", type=int, help="read only so many of each source")
    report.add_argument("--out", help="folder for report.json, report.txt and report.png")


def run_data(args: argparse.Namespace) -> int:
    """Do what `add_data_arguments` parsed; 0 when it worked."""
    return {"tokenize": _tokenize, "check": _check, "report": _report}[args.command](args)


def _tokenize(args: argparse.Namespace) -> int:
    from data.tokenize import tokenize_source
    from laneformer_jax.errors import UserError, nearest
    from laneformer_jax.tokenizer import Tokenizer

    config = read_config(args.config, args.overrides)
    name = args.source or (next(iter(config.sources)) if len(config.sources) == 1 else None)
    if name is None:
        raise UserError(f"--source: required; the config has {', '.join(config.sources)}")
    if name not in config.sources:
        raise UserError(f"--source {name}: not in the config{nearest(name, config.sources)}")
    manifest = tokenize_source(
        name,
        config,
        Tokenizer.load(args.tokenizer),
        Path(args.out),
        documents_per_shard=args.documents_per_shard,
        near_duplicates=args.near_duplicates,
        num_workers=args.workers,
    )
    left_out = ", ".join(f"{k} {v:,}" for k, v in manifest["skipped"].items()) or "none"
    print(
        f"{args.out}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens"
        f" ({manifest['dtype']}), {len(manifest['shards'])} shards; left out: {left_out}"
    )
    return 0


def _check(args: argparse.Namespace) -> int:
    from data.tokenize import check_folder

    print(f"{args.folder}: {check_folder(Path(args.folder))} files are as they were written")
    return 0


def _report(args: argparse.Namespace) -> int:
    from data.report import measure, table, write
    from laneformer_jax.tokenizer import Tokenizer

    config = read_config(args.config, args.overrides)
    report = measure(config, Tokenizer.load(args.tokenizer), args.seq_len, args.max_documents)
    print(table(report))
    if args.out:
        write(report, Path(args.out))
        print(f"written: {args.out}/report.json, report.txt, report.png")
    return 0


def read_config(path: str, overrides: Sequence[str] = ()) -> DataConfig:
    """The `data` section of a run's config file, or a file that holds nothing but one.

    Overrides are named as in the section, with or without `data.` in front.
    """
    from data.config import DataConfig
    from laneformer_jax import settings, yaml12

    file = settings.find_config(path)
    whole = yaml12.read_mapping(file)
    plain = [text.removeprefix("data.") for text in overrides]
    config = settings.from_dict(DataConfig, whole.get("data", whole), str(file))
    return settings.replace(config, plain)


def _first(texts: Iterator[str], limit: int | None) -> Iterator[str]:
    left = limit
    for text in texts:
        yield text
        if left is not None:
            left -= len(text.encode())
            if left <= 0:
                return

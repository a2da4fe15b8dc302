"""Speed and footprint of the data pipeline: tokens per second, start-up, memory."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SEQ_LEN, BATCH = 1024, 8
PARTS = ("text", "tokenized", "files", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer bench data`."""
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what is measured (default: all): speed from text, speed from tokenised shards beside"
        " grain alone, start-up with many files, memory with a large file",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="measured per figure and round")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is reported")
    parser.add_argument("--files", type=int, default=100_000, help="files of the start-up test")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the memory test")
    parser.add_argument("--folder", help="where the test data is made (default: a temporary one)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measured = measure(
            Path(folder), args.parts, args.seconds, args.rounds, args.files, args.gigabytes
        )
        figures = {}
        for part in measured:
            figures.update(part)
            for name, value in part.items():
                print(f"{name:<62} {value:,.3f}", flush=True)
    if args.json:
        from laneformer_jax.files import atomic_file

        with atomic_file(args.json) as file:
            json.dump(figures, file, indent=1)
    return 0


def measure(
    folder: Path,
    parts: Sequence[str],
    seconds: float,
    rounds: int,
    files: int,
    gigabytes: float,
) -> Iterator[dict[str, float]]:
    """The figures of each of `parts` by name. Test data is written to `folder`.

    Rates are of tokens that are not padding, at 1,024 tokens a row and 8 rows a batch; of the
    figures that are compared, the rounds take turns.
    """
    from laneformer_jax.tokenizer import train_tokenizer

    text = _stdlib_jsonl(folder / "stdlib.jsonl")
    tokenizer = train_tokenizer(text, 32_000, folder / "tokenizer")
    if "text" in parts:
        yield _from_text(folder, tokenizer, seconds, rounds)
    if "tokenized" in parts:
        yield _against_grain(folder, tokenizer, seconds, rounds)
    if "files" in parts:
        yield _start_up(folder, tokenizer, files)
    if "memory" in parts:
        yield _memory(folder, tokenizer, gigabytes)


def _from_text(folder: Path, tokenizer: Any, seconds: float, rounds: int) -> dict[str, float]:
    """Read, clean (as by default), tokenise, pack and batch the standard library."""
    from data import DataConfig, SourceConfig

    source = {"code": SourceConfig("jsonl", str(folder / "stdlib.jsonl"))}
    figures = {}
    for packing in ("concat", "best_fit"):
        for workers in (0, 2):
            config = DataConfig(source, packing=packing, num_workers=workers)
            rate = statistics.median(
                _rate(_ours(config, tokenizer), seconds) for _ in range(rounds)
            )
            how = f"{workers} workers" if workers else "in this process"
            figures[f"text to {packing} rows, {how}: M tokens/s"] = rate / 1e6
    return figures


def _ours(config: Any, tokenizer: Any) -> Any:
    from data import build_dataset

    return build_dataset(config, tokenizer, seq_len=SEQ_LEN, batch_size=BATCH, seed=0)


def _rate(dataset: Any, seconds: float) -> float:
    """Tokens per second, after the first batches."""
    from data import closing

    with closing(dataset) as batches:
        for _ in range(8):
            next(batches)
        tokens, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            tokens += int((next(batches)["segment_ids"] > 0).sum())
        return tokens / (time.perf_counter() - begin)


def _against_grain(folder: Path, tokenizer: Any, seconds: float, rounds: int) -> dict[str, float]:
    """Tokenised shards through this pipeline, and the same arrays through grain alone."""
    import grain
    import numpy as np
    from grain.experimental import BestFitPackIterDataset, ConcatThenSplitIterDataset

    from data import DataConfig, SourceConfig
    from data.tokenize import tokenize_source

    # Documents of 1,024 tokens: 1,023 of text and the end. They are cut from real ones.
    ids = np.concatenate(
        [tokenizer.encode_array(t) for t in _texts(folder / "stdlib.jsonl", 8 << 20)]
    )
    pieces = [tokenizer.decode(ids[i : i + 1000].tolist()) for i in range(0, len(ids) - 1000, 1000)]
    documents = [tokenizer.encode(p, bos=True, eos=True) for p in pieces]
    with open(folder / "pieces.jsonl", "w", encoding="utf-8") as file:
        for ids_ in documents:
            even = (ids_ * 2)[1:1024]
            file.write(json.dumps({"text": tokenizer.decode(even)}) + "\n")
    config = DataConfig({"t": SourceConfig("jsonl", str(folder / "pieces.jsonl"))})
    out = folder / "tokenized"
    tokenize_source("t", config, tokenizer, out)
    tokens = np.memmap(out / "shard-00000.tokens", "uint16", mode="r")
    offsets = np.fromfile(out / "shard-00000.offsets", "int64")

    class Plain(grain.sources.RandomAccessDataSource):
        def __len__(self) -> int:
            return len(offsets) - 1

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": tokens[offsets[index] : offsets[index + 1]].astype(np.int32)}

    def bare(packing: str) -> Any:
        rows = grain.MapDataset.source(Plain()).seed(0).shuffle().repeat()
        stream = rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if packing == "concat":
            packed = ConcatThenSplitIterDataset(stream, length_struct={"tokens": SEQ_LEN})
        else:
            cut = stream.map(lambda d: {"tokens": d["tokens"][:SEQ_LEN]})
            packed = BestFitPackIterDataset(
                cut, length_struct={"tokens": SEQ_LEN}, num_packing_bins=64
            )
        return packed.batch(BATCH, drop_remainder=True).map(
            lambda b: {**b, "segment_ids": b["tokens_segment_ids"]}
        )

    figures = {}
    for packing in ("concat", "best_fit"):
        config = DataConfig(
            {"t": SourceConfig("tokenized", str(out))},
            packing=packing,
            read_threads=0,
            prefetch_batches=0,
        )
        pairs = [
            (_rate(_ours(config, tokenizer), seconds), _rate(bare(packing), seconds))
            for _ in range(rounds)
        ]
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        figures[f"tokenised to {packing} rows: M tokens/s"] = ours / 1e6
        figures[f"grain alone, {packing}: M tokens/s"] = theirs / 1e6
        figures[f"tokenised to {packing} rows / grain alone"] = statistics.median(
            a / b for a, b in pairs
        )
    return figures


def _start_up(folder: Path, tokenizer: Any, files: int) -> dict[str, float]:
    from data import DataConfig, SourceConfig, closing

    root = folder / "many"
    for i in range(files):
        if i % 1000 == 0:
            (root / f"{i // 1000:03d}").mkdir(parents=True)
        (root / f"{i // 1000:03d}" / f"{i}.py").write_text(f"x_{i} = {i}\n" * (i % 40 + 1))
    config = DataConfig({"many": SourceConfig("text", str(root))})
    begin = time.perf_counter()
    with closing(_ours(config, tokenizer)) as batches:
        next(batches)
        return {f"first batch of {files:,} files: s": time.perf_counter() - begin}


def _memory(folder: Path, tokenizer: Any, gigabytes: float) -> dict[str, float]:
    from data import DataConfig, SourceConfig, closing

    path = folder / "large.jsonl"
    lines = (folder / "stdlib.jsonl").read_bytes().splitlines(keepends=True)
    with open(path, "wb") as file:
        documents = 0
        while file.tell() < gigabytes * 1e9:
            for line in lines:  # no two alike, or all but one copy were left out
                documents += 1
                file.write(line.replace(b'{"text": "', b'{"text": "# %d\\n' % documents, 1))
    config = DataConfig(
        {"large": SourceConfig("jsonl", str(path))}, cache_dir=str(folder / "cache")
    )
    before, begin = _anonymous_bytes(), time.perf_counter()
    with _Peak() as peak, closing(_ours(config, tokenizer)) as batches:
        next(batches)
        first = time.perf_counter() - begin
        for _ in range(200):
            next(batches)
    begin = time.perf_counter()
    with closing(_ours(config, tokenizer)) as batches:
        next(batches)
        again = time.perf_counter() - begin
    path.unlink()
    size = f"{gigabytes:g} GB"
    return {
        f"first batch of one file of {size}, indexed and deduplicated: s": first,
        "first batch of the same file a second time: s": again,
        f"anonymous memory that {size} add at most: MB": (peak.bytes - before) / 1e6,
        "peak resident memory of this process: MB": _peak_bytes() / 1e6,
    }


class _Peak:
    """The most anonymous memory of this process inside a `with` block, looked at every 50 ms."""

    def __enter__(self) -> _Peak:
        self.bytes, self._end = _anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.bytes = max(self.bytes, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs; where the system does not tell, all of it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return _peak_bytes()
    line = next(x for x in status.splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _stdlib_jsonl(path: Path) -> Iterator[str]:
    """Write the standard library as JSON lines; its texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    with open(path, "w", encoding="utf-8") as file:
        for name in sorted(root.rglob("*.py")):
            if "site-packages" in name.parts:
                continue
            try:
                text = name.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text:
                file.write(json.dumps({"text": text}) + os.linesep)
    return _texts(path, 16 << 20)


def _texts(path: Path, limit: int) -> Iterator[str]:
    """Texts of the first `limit` bytes of a JSON lines file."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]
            limit -= len(line)
            if limit < 0:
                return

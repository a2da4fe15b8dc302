"""`laneformer data tokenize`: a source's documents as token ids in shards, written once.

Shards hold fixed ranges of documents, so a run that was stopped goes on with the first that is
missing, and any number of worker processes writes the same bytes. The manifest is written last: a
folder without one is not finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig
from data.documents import IGNORE, SKIP_REASONS, Encoder
from data.pipeline import open_encoders
from data.processes import Processes
from data.sources.tokenized import FORMAT, MANIFEST, PARTS
from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_file
from laneformer_jax.progress import progress
from laneformer_jax.tokenizer import Tokenizer


def tokenize_source(
    name: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    out: Path,
    *,
    documents_per_shard: int = 20_000,
    near_duplicates: float | None = None,
    num_workers: int = 0,
) -> dict[str, Any]:
    """Write one source of `config` to the folder `out`; return its manifest.

    Held-out documents are left out, so that the folder can only be trained on.

    Args:
        name: of the source in `config`, whose deduplication, decontamination and template apply.
        config: the mixture.
        tokenizer: encodes the documents; its hash goes into the manifest.
        out: new, or what an earlier run with the same settings left unfinished.
        documents_per_shard: documents of the source per shard, skipped ones included.
        near_duplicates: leave out documents whose estimated Jaccard similarity of 5-word sequences
            to an earlier one is at least this; None: only exact repeats.
        num_workers: processes that encode; 0 for this one.

    Raises:
        UserError: a bad document, or `out` holds shards of other settings.
    """
    if config.sources[name].streaming:
        raise UserError(
            f"source {name!r}: a stream has no order to resume in; set streaming: false"
        )
    alone = dataclasses.replace(
        config, sources={name: config.sources[name]}, schedule=[], packing="concat"
    )
    (encoder,) = open_encoders(alone, tokenizer, "train", None)
    source: Any = encoder.source
    near: list[int] = []
    if near_duplicates is not None:
        from data.near_duplicates import find_near_duplicates

        near = find_near_duplicates(encoder, near_duplicates)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    about = {
        "format": FORMAT,
        "dtype": dtype,
        "masked": config.sources[name].row_format != "text",
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "source": settings.to_dict(config.sources[name]),
        "revision": source.revision(),
        "deduplicate": config.deduplicate,
        "decontaminate": config.decontaminate,
        "near_duplicates": near_duplicates,
        "documents_per_shard": documents_per_shard,
        "chat_template_sha256": hashlib.sha256(encoder.template.source.encode()).hexdigest(),
    }
    _claim(out, about)
    ranges = [
        (i, start, min(start + documents_per_shard, len(source)))
        for i, start in enumerate(range(0, len(source), documents_per_shard))
    ]
    writer = _ShardWriter(encoder, out, about, frozenset(near))
    shards = []
    with progress(len(source), f"tokenise {name}", "documents") as bar:
        for shard in _mapped(writer, ranges, num_workers):
            bar.advance(shard["end"] - shard["start"])
            shards.append(shard)
    skipped: dict[str, int] = {"exact_duplicate": source.duplicates, "near_duplicate": len(near)}
    for shard in shards:
        for reason, n in shard["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + n
    manifest = {
        **about,
        "documents": sum(s["documents"] for s in shards),
        "tokens": sum(s["tokens"] for s in shards),
        "bytes": sum(s["bytes"] for s in shards),
        "skipped": {k: v for k, v in skipped.items() if v},
        "shards": [s for s in shards if s["documents"]],
    }
    with atomic_file(out / MANIFEST) as file:
        json.dump(manifest, file, indent=1)
    return manifest


def check_folder(folder: Path) -> int:
    """Read a tokenised folder through and compare every checksum; the number of files checked.

    Raises:
        UserError: naming the first file that is not as it was written.
    """
    from data.sources.tokenized import TokenizedSource

    manifest = TokenizedSource.open(str(folder), "tokenized").manifest
    checked = 0
    for shard in manifest["shards"]:
        for name, expected in shard["sha256"].items():
            if _file_sha256(folder / name) != expected:
                raise UserError(f"{folder / name}: its checksum differs; tokenise it again")
            checked += 1
    return checked


def _claim(out: Path, about: dict[str, Any]) -> None:
    """Make `out` ours, or find that it is already."""
    settings_file = out / "settings.json"
    if settings_file.is_file():
        before = json.loads(settings_file.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(about))
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise UserError(
                f"{out}: was begun with other settings ({', '.join(changed)} differ); name a new"
                " folder or delete this one"
            )
    elif out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: exists and is not empty; name a new folder")
    else:
        with atomic_file(settings_file) as file:
            json.dump(about, file, indent=1)


def _mapped(
    writer: _ShardWriter, ranges: list[tuple[int, int, int]], num_workers: int
) -> Iterator[dict[str, Any]]:
    if num_workers == 0:
        yield from map(writer, ranges)
        return
    with contextlib.closing(Processes(writer, num_workers)) as processes:
        yield from processes.map(ranges, ahead=2 * num_workers)


@dataclasses.dataclass(frozen=True)
class _ShardWriter:
    encoder: Encoder
    out: Path
    about: dict[str, Any]
    near: frozenset[int]

    def __call__(self, task: tuple[int, int, int]) -> dict[str, Any]:
        """Write one shard unless it is there; what the manifest tells of it."""
        number, start, end = task
        name = f"shard-{number:05d}"
        record = self.out / f"{name}.json"
        if record.is_file():
            shard: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
            return shard
        examples, sizes, skipped = [], [], dict[str, int]()
        for index in range(start, end):
            if index in self.near:
                continue
            encoded = self.encoder(index)
            if encoded["skip"]:
                reason = SKIP_REASONS[encoded["skip"]]
                skipped[reason] = skipped.get(reason, 0) + 1
            else:
                examples.append(encoded["example"])
                sizes.append(encoded["bytes"])
        arrays = self._arrays(examples, sizes)
        shard = {
            "name": name,
            "start": start,
            "end": end,
            "documents": len(examples),
            "tokens": sum(map(len, examples)),
            "bytes": sum(sizes),
            "skipped": skipped,
            "sizes": {},
            "sha256": {},
        }
        for part, array in arrays.items():
            with atomic_file(self.out / f"{name}.{part}", "wb") as file:
                file.write(array.tobytes())
            shard["sizes"][f"{name}.{part}"] = array.nbytes
            shard["sha256"][f"{name}.{part}"] = hashlib.sha256(array.tobytes()).hexdigest()
        # The record says that the shard is whole, so it comes last.
        with atomic_file(record) as file:
            json.dump(shard, file)
        return shard

    def _arrays(self, examples: list[np.ndarray], sizes: list[int]) -> dict[str, np.ndarray]:
        dtype = np.dtype(self.about["dtype"])
        ids, masks = [], []
        for example in examples:
            inputs, targets = example[:, 0], example[:, 1]
            # The last target is in no input; where it has no loss its id is not known.
            last = targets[-1] if targets[-1] != IGNORE else self.encoder.tokenizer.eos_id
            ids.append(np.append(inputs, last).astype(dtype))
            masks.append(np.append([False], targets != IGNORE).astype(np.uint8))
        arrays = {
            "tokens": np.concatenate([np.zeros(0, dtype), *ids]),
            "offsets": np.cumsum([0, *map(len, ids)]).astype(PARTS["offsets"]),
            "bytes": np.asarray(sizes, PARTS["bytes"]),
        }
        if self.about["masked"]:
            arrays["mask"] = np.concatenate([np.zeros(0, np.uint8), *masks])
        return arrays


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""What a folder holds, told from its JSON files and tensor headers; no tensor is read, JAX is not loaded."""

from collections import Counter
from pathlib import Path
from typing import Any

from laneformer_jax.checkpoint.tensorfile import INDEX, SINGLE, TensorFolder
from laneformer_jax.files import read_json

METADATA, MANIFEST, CHECKPOINTS = "metadata.json", "MANIFEST.json", "checkpoints"
TOKENIZERS = ("tokenizer.model", "tokenizer.json")


def contents(folder: Path) -> dict[str, Any] | None:
    """What `folder` holds, as facts by name; None for a folder that is neither checkpoint nor weights.

    `holds` is a sentence's worth, `kind` one of run, training, inference, lanes, dense; then what is known of
    dtype, step, tensors, bytes, tokenizer, `ema` (the decay of the running mean of the parameters that is
    there, too, for `export --ema`), and `complete`: whether every file is there with the size it was
    written with (checksums are not looked at).

    Raises:
        UserError: damaged weights of a Hugging Face folder.
    """
    steps = _steps(folder)
    if steps:
        newest = steps[-1]
        facts = _native(newest)
        count = f"{len(steps)} checkpoint{'s' if len(steps) > 1 else ''}"
        where = {"checkpoints": [int(p.name) for p in steps], "newest": str(newest)}
        return {**facts, "holds": f"a training run with {count}", "kind": "run", **where}
    if (folder / METADATA).exists() or (folder / MANIFEST).exists():
        return _native(folder)
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return _hugging_face(folder)
    return None


def _steps(folder: Path) -> list[Path]:
    for parent in (folder / CHECKPOINTS, folder):
        if parent.is_dir() and not (parent / METADATA).exists():
            found = [p for p in parent.iterdir() if p.name.isdecimal() and p.is_dir()]
            if found:
                return sorted(found, key=lambda p: int(p.name))
    return []


def _native(folder: Path) -> dict[str, Any]:
    metadata = _json(folder / METADATA)
    manifest = _json(folder / MANIFEST).get("files", {})
    kind = metadata.get("kind", "inference")
    optimizer = "with the optimizer's state" if kind == "training" else "without optimizer"
    sizes = {
        name: (folder / name).stat().st_size if (folder / name).is_file() else None
        for name in manifest
    }
    complete = bool(manifest) and all(
        sizes[name] == entry.get("size") for name, entry in manifest.items()
    )
    facts = {
        "holds": f"a native {kind} checkpoint, {optimizer}",
        "kind": kind,
        "dtype": metadata.get("dtype"),
        "step": metadata.get("step"),
        "source": metadata.get("source", {}).get("name"),
        "bytes": sum(size or 0 for size in sizes.values()),
        "tokenizer": _tokenizer(folder),
        "ema": metadata.get("run", {}).get("optimizer", {}).get("ema"),
        "complete": complete,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _hugging_face(folder: Path) -> dict[str, Any]:
    config = _json(folder / "config.json")
    family = config.get("model_type")
    lanes = family is None or "laneformer" in family
    tensors = TensorFolder(folder)
    dtypes = Counter(str(spec.dtype) for spec in tensors.specs.values())
    files = len(set(tensors.files.values()))
    layout = "in the lane layout" if lanes else f"of a dense or other model ({family})"
    facts = {
        "holds": f"a Hugging Face folder {layout}",
        "kind": "lanes" if lanes else "dense",
        "dtype": ", ".join(sorted(dtypes)),
        "tensors": len(tensors.specs),
        "files": files,
        "bytes": sum(spec.nbytes for spec in tensors.specs.values()),
        "tokenizer": _tokenizer(folder),
        "complete": True,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _tokenizer(folder: Path) -> str | None:
    return next((name for name in TOKENIZERS if (folder / name).is_file()), None)


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    found = read_json(file)
    return found if isinstance(found, dict) else {}

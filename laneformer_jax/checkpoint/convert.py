"""Conversions between Hugging Face folders and native checkpoints, one layer in memory at a time.

Everything is written to a temporary folder that is renamed at the end, so that a conversion is there
whole or not at all; what a killed one left is removed when it is run again.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from laneformer_jax.checkpoint import assets, dense, families, hf, native, slices, verify
from laneformer_jax.checkpoint.sources import (
    EMBEDDING,
    LaneFolder,
    NativeCheckpoint,
    Params,
    Source,
    groups,
    read_ahead,
)
from laneformer_jax.checkpoint.tensorfile import (
    INDEX,
    SHARD_BYTES,
    TensorSpec,
    TensorWriter,
)
from laneformer_jax.checkpoint.workplace import claim, sweep
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_dir
from laneformer_jax.progress import progress

CONFIG = "config.json"


@dataclass(frozen=True)
class Report:
    """What a conversion wrote: `nbytes` of tensors, `checks` that --verify passed, `notes` for its user."""

    folder: Path
    tensors: int
    nbytes: int
    seconds: float
    checks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Hugging Face -> native


def import_lanes(
    source: str | Path,
    target: str | Path,
    *,
    dtype: Any = None,
    check: bool = False,
    name: str | None = None,
) -> Report:
    """Turn a Hugging Face folder or Hub repository in the lane layout into an inference checkpoint.

    config.json, the shard layout, tokenizer files and chat template come along, so that `export`
    gives the same files back.

    Args:
        source: a folder or a repository id.
        target: a new folder.
        dtype: of the parameters; None keeps the files'.
        check: read everything back and compare tensors and the logits of a probe before the folder appears.
        name: of the source, for the record; None: its path.

    Raises:
        UserError: a source that is damaged or not what its config says, or a target that is taken.
    """
    folder = hf.find_folder(source)
    lanes = LaneFolder(folder, _dtype(dtype))
    files = assets.carried(folder)
    if dtype is not None:
        files[CONFIG] = hf.config_text(lanes.config, str(dtype)).encode()
    else:
        files[CONFIG] = (folder / CONFIG).read_bytes()
        if lanes.tensors.index is not None:
            files[INDEX] = lanes.tensors.index
    metadata = {"source": {"name": name or str(source), "layout": "lanes"}}
    return write_native(lanes, target, metadata, files, check)


def import_dense(
    source: str | Path,
    target: str | Path,
    *,
    lanes: int,
    delay: int,
    dtype: Any = None,
    order: list[slices.LayerOrder] | None = None,
    check: bool = False,
    name: str | None = None,
) -> Report:
    """Split a dense Llama, Mistral or Qwen3 folder into lanes, as an inference checkpoint.

    With δ ≥ N its logits are the dense model's; with a smaller delay it is where retraining starts.

    Args:
        source: a folder or a Hub repository id.
        target: a new folder.
        lanes, delay: L and δ.
        dtype: of the parameters; None keeps the files'.
        order: of each layer's neurons and kv heads over the lanes (see `affinity`); None: as they are.
        check: as in `import_lanes`; the probe's logits under δ = N are compared with one lane's.
        name: as in `import_lanes`.

    Raises:
        UserError: a source that is damaged or cannot be split, or a target that is taken.
    """
    folder = hf.find_folder(source)
    split = dense.DenseFolder(folder, lanes, delay, _dtype(dtype), order)
    files = assets.carried(folder)
    files.pop(assets.CARD, None)  # it describes the dense model
    files[CONFIG] = hf.config_text(split.config, str(split.specs[EMBEDDING].dtype)).encode()
    metadata = {"source": {"name": name or str(source), "layout": hf.model_type(folder)}}
    return write_native(split, target, metadata, files, check)


def write_native(
    source: Source,
    target: str | Path,
    metadata: Mapping[str, Any],
    files: Mapping[str, bytes],
    check: bool = False,
) -> Report:
    """Write a source as an inference checkpoint; arguments as `import_lanes` and `native.new_checkpoint`."""
    began = time.monotonic()
    sweep(target)
    dtype = str(source.specs[EMBEDDING].dtype)
    checks: tuple[str, ...] = ()
    new = native.new_checkpoint(target, source.config, dtype, metadata=metadata, files=files)
    with new as writer, claim(writer.folder):
        _stream(source, "import", writer.add)
        if check:
            checks = verify.native_folder(source, writer.folder)
            if isinstance(source, dense.DenseFolder):
                checks += verify.split(source)
    return _report(target, source.specs, began, checks)


# Native -> Hugging Face


def export(
    checkpoint: str | Path,
    target: str | Path,
    *,
    layout: Literal["lanes", "llama"] = "lanes",
    dtype: Any = None,
    vocab_size: int | None = None,
    shard_bytes: int | None = None,
    average: bool = False,
    check: bool = False,
) -> Report:
    """Write a native checkpoint, of a run the newest complete one, as a Hugging Face folder.

    Args:
        checkpoint: a checkpoint, a folder of them, or a run's folder.
        target: a new folder.
        layout: `lanes`, the public lane layout, or `llama`, one dense model for plain transformers, where the
            lanes are mathematically dense. With q/k norms that is a Qwen3, with sliding windows a Mistral.
        dtype: of the tensors; None keeps the checkpoint's.
        vocab_size: entries to keep; None: what `real_vocabulary` says.
        shard_bytes: most tensor bytes in a file; None: as imported, else 5 GB.
        average: the running mean of the parameters that training kept (`optimizer.ema`).
        check: as in `import_lanes`.

    Raises:
        UserError: no complete checkpoint, or none with a running mean, a target that is taken, a vocabulary
            that cannot be cut, lanes that are not dense where layout is `llama`; each field in the way is
            named.
    """
    source, folder, metadata = open_native(checkpoint, dtype, vocab_size, average)
    llama = layout == "llama"
    form = _as_llama(source) if llama else _as_lanes(source)
    tokenizer = assets.load_tokenizer(folder)
    text_dtype = str(source.specs[EMBEDDING].dtype)
    card = assets.model_card(
        Path(target).name, source.config, metadata, text_dtype, tokenizer, llama
    )
    files = assets.export_files(assets.carried(folder), source.config, tokenizer, card)
    files[CONFIG] = form.config_text.encode()
    weight_map = None
    if not llama and "source" in metadata and source.as_stored:
        files[CONFIG] = (folder / CONFIG).read_bytes()
        if shard_bytes is None and (folder / INDEX).exists():
            index = (folder / INDEX).read_bytes()
            weight_map = _weight_map(index, form.specs)
            if weight_map is not None:
                files[INDEX] = index
    notes = [] if llama else [assets.LANE_NOTE]
    if tokenizer is not None and assets.is_llama2(tokenizer):
        notes.append(assets.LLAMA2_NOTE)
    return write_folder(
        source, target, form, files, shard_bytes or SHARD_BYTES, weight_map, check, notes
    )


@dataclass(frozen=True)
class Form:
    """What a source becomes in a Hugging Face folder.

    Attributes:
        specs: shape and dtype by tensor name.
        rename: turns the parameters of one group into tensors.
        config_text: config.json.
        compare: checks a written folder against the source; what it found to be equal.
    """

    specs: Mapping[str, TensorSpec]
    rename: Callable[[Params], Mapping[str, np.ndarray]]
    config_text: str
    compare: Callable[[Path], tuple[str, ...]]


def _as_lanes(source: Source) -> Form:
    return Form(
        {hf.tensor_name(path): spec for path, spec in source.specs.items()},
        lambda params: {hf.tensor_name(path): value for path, value in params.items()},
        hf.config_text(source.config, str(source.specs[EMBEDDING].dtype)),
        lambda written: verify.lane_folder(source, written),
    )


def _as_llama(source: Source) -> Form:
    config = source.config
    families.check_dense(config)
    copies = dense.removable_copies(source)
    dtypes = {slices.dense_name(path): spec.dtype for path, spec in source.specs.items()}
    shapes = slices.dense_shapes(config, copies)
    kv_heads = config.num_key_value_heads // copies
    return Form(
        {name: TensorSpec(shape, dtypes[name]) for name, shape in shapes.items()},
        lambda params: slices.merge_group(config, params, copies),
        families.dense_config_text(config, kv_heads, str(source.specs[EMBEDDING].dtype)),
        lambda written: verify.dense_folder(source, written, copies),
    )


def open_native(
    checkpoint: str | Path,
    dtype: Any = None,
    vocab_size: int | None = None,
    average: bool = False,
) -> tuple[NativeCheckpoint, Path, dict[str, Any]]:
    """The newest complete checkpoint as a source, its folder, its metadata; as in `export`."""
    if not native.is_native(checkpoint) and (Path(checkpoint) / CONFIG).exists():
        raise UserError(
            f"{checkpoint}: is already a Hugging Face folder; export takes a checkpoint"
        )
    folder = native.find(checkpoint)
    metadata = native.read_metadata(folder)
    if vocab_size is None:
        vocab_size = real_vocabulary(native.read_config(folder), metadata, folder)
    return NativeCheckpoint(folder, _dtype(dtype), vocab_size, average), folder, metadata


def real_vocabulary(
    config: LaneformerConfig, metadata: Mapping[str, Any], folder: Path
) -> int | None:
    """How many entries of a checkpoint's vocabulary its tokenizer knows; None where all are to stay.

    An imported checkpoint keeps the vocabulary it came with, and a vocab_parallel head cannot be cut.
    """
    tokenizer = assets.load_tokenizer(folder)
    if tokenizer is None or "source" in metadata or config.lm_head_type == "vocab_parallel":
        return None
    return tokenizer.vocab_size if tokenizer.vocab_size < config.vocab_size else None


def write_folder(
    source: Source,
    target: str | Path,
    form: Form,
    files: Mapping[str, bytes],
    shard_bytes: int,
    weight_map: Mapping[str, str] | None,
    check: bool,
    notes: list[str],
) -> Report:
    """Write a source as safetensors, with `files` beside them; arguments as `export`."""
    began = time.monotonic()
    sweep(target)
    checks: tuple[str, ...] = ()
    with atomic_dir(target) as folder, claim(folder):
        with TensorWriter(folder, form.specs, shard_bytes, weight_map) as writer:

            def put(group: str, params: Params) -> None:
                del group
                for name, value in form.rename(params).items():
                    writer.write(name, value)

            _stream(source, "export", put)
        for name, content in files.items():  # the index as it was imported, for one
            (folder / name).write_bytes(content)
        if check:
            checks = form.compare(folder)
    return _report(target, form.specs, began, checks, tuple(notes))


def _stream(source: Source, what: str, use: Callable[[str, Params], None]) -> None:
    with progress(len(groups(source)), what, "layers") as bar:
        for group, params in read_ahead(source):
            use(group, params)
            bar.advance()


def _report(
    target: str | Path,
    specs: Mapping[str, TensorSpec],
    began: float,
    checks: tuple[str, ...],
    notes: tuple[str, ...] = (),
) -> Report:
    nbytes = sum(spec.nbytes for spec in specs.values())
    return Report(Path(target), len(specs), nbytes, time.monotonic() - began, checks, notes)


def _weight_map(index: bytes, specs: Mapping[str, TensorSpec]) -> dict[str, str] | None:
    """The shard layout of an imported index, if it is one for these tensors."""
    found: dict[str, str] = json.loads(index)["weight_map"]
    return found if found.keys() == specs.keys() else None


def _dtype(dtype: Any) -> np.dtype[Any] | None:
    return None if dtype is None else np.dtype(jnp.dtype(dtype))

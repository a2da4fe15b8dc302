"""The native checkpoint: orbax arrays by parameter group, and a manifest that proves it whole.

A checkpoint is a folder:

    embedding/ layer_000/ … head/   parameters, one orbax item per group, keyed by dotted path
    optimizer/                      training only: whatever tree the trainer gave; a running mean of
                                    the parameters is its part `opt_state/average`
    config.json                     the model, under the Hugging Face names
    metadata.json                   what wrote it, and what the trainer adds (step, data state, …)
    tokenizer.model                 when there is one (or tokenizer.json)
    MANIFEST.json                   size and CRC-32 of every file above; written last

Groups let a conversion hold one layer at a time. A folder without a manifest, or one that
contradicts it, is not complete and is never loaded. `checkpoint.training` writes the numbered
checkpoints of a run.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from laneformer_jax.checkpoint.hf import abstract_model, check_dtype
from laneformer_jax.checkpoint.manifest import (
    MANIFEST,
    Measured,
    json_bytes,
    problems,
    write_side_files,
)
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_dir, read_json
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.sharding import check_mesh, named, parameter_spec

if TYPE_CHECKING:
    # Imported where it is used: it takes a while, and finding out what a path holds does not need it.
    import orbax.checkpoint as ocp

Params = dict[str, Any]  # dotted parameter path -> array (or its shape)

EMBEDDING, HEAD, OPTIMIZER = "embedding", "head", "optimizer"
AVERAGE = ("opt_state", "average")  # where the optimizer's item keeps a mean of the parameters
CONFIG, METADATA = "config.json", "metadata.json"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
CHECKPOINTS = "checkpoints"  # the folder of steps inside a run's folder
_FORMAT = 1
_SHOWN = 4
# Orbax says so of every item that is not OCDBT, as an inference checkpoint's are not.
_NO_OCDBT = "Skipping merge of OCDBT checkpoints"
_NOISE = (_NO_OCDBT, "Metadata file does not exist")  # the latter of an item read by itself
logging.getLogger("absl").addFilter(
    lambda record: not any(noise in record.getMessage() for noise in _NOISE)
)


# Groups


def group_of(path: str) -> str:
    """The group of the parameter at a dotted path: `embedding`, `layer_007`, … or `head`."""
    if path.startswith("layers."):
        return f"layer_{int(path.split('.')[1]):03d}"
    return EMBEDDING if path.startswith("tok_embeddings.") else HEAD


def grouped(params: Mapping[str, Any]) -> dict[str, Params]:
    """Parameters by group, in the order embedding, layers, head."""
    groups: dict[str, Params] = {}
    for path, value in params.items():
        groups.setdefault(group_of(path), {})[path] = value
    order = {EMBEDDING: 0, HEAD: 2}
    return dict(sorted(groups.items(), key=lambda item: (order.get(item[0], 1), item[0])))


def abstract_params(
    config: LaneformerConfig, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every parameter, without any array.

    mesh: spread over it by the rules of `sharding`; None: all on the first device.
    """
    single = SingleDeviceSharding(jax.local_devices()[0])
    return {
        path: jax.ShapeDtypeStruct(
            variable.shape,
            jnp.dtype(dtype),
            sharding=single if mesh is None else named(mesh, parameter_spec(path, config)),
        )
        for path, variable in parameter_paths(nnx.state(abstract_model(config))).items()
    }


def model_of(config: LaneformerConfig, params: Mapping[str, Any], mesh: Mesh | None) -> Laneformer:
    """A model that holds `params` (dotted path -> array)."""
    model = abstract_model(config)
    state = nnx.state(model)
    for path, variable in parameter_paths(state).items():
        variable.set_value(params[path])
    nnx.update(model, state)
    model.mesh = mesh
    return model


# Writing


class Writer:
    """Fills a new inference checkpoint group by group; `folder` is where it grows.

    Attributes:
        written: size and checksum of the files of its arrays, by path.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.written: dict[str, Measured] = {}

    def add(self, group: str, params: Mapping[str, Any]) -> None:
        """Write one group; every path in `params` must belong to it."""
        strays = [path for path in params if group_of(path) != group]
        assert not strays, f"{strays} do not belong to {group}"
        import orbax.checkpoint as ocp

        from laneformer_jax.checkpoint.plain import PlainFiles

        files = PlainFiles()
        # The second, never used, keeps orbax from warning of its absence.
        registry = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, files), (jax.Array, ocp.type_handlers.ArrayHandler())
        )
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            item = ocp.args.PyTreeSave({path: np.asarray(value) for path, value in params.items()})
            checkpointer.save(self.folder.resolve() / group, args=item)
        self.written |= {f"{group}/{name}": found for name, found in files.written.items()}


@contextmanager
def new_checkpoint(
    path: str | Path,
    config: LaneformerConfig,
    dtype: str,
    tokenizer: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Iterator[Writer]:
    """Write an inference checkpoint one group at a time; it appears whole or not at all.

    Args:
        path: a folder that does not exist or is empty.
        dtype: of the weights, such as `float32`.
        tokenizer: a tokenizer file, or a folder that holds one, to copy.
        metadata: added to what `read_metadata` returns.
        files: more files to lay beside the arrays, or in place of config.json, by name.

    Raises:
        UserError: `path` is taken, or there is no tokenizer where one was named.
    """
    side = side_files(config, {"kind": "inference", "dtype": dtype, **(metadata or {})}, tokenizer)
    with atomic_dir(path) as folder:
        writer = Writer(folder)
        yield writer
        write_side_files(folder, {**side, **(files or {})}, writer.written)


def save_inference(
    path: str | Path, model: Laneformer, tokenizer: str | Path | None = None
) -> None:
    """Write parameters, config and tokenizer to a new folder; raises as `new_checkpoint`."""
    params = {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}
    dtype = str(model.tok_embeddings.weight.dtype)
    with new_checkpoint(path, model.config, dtype, tokenizer) as writer:
        for group, values in grouped(params).items():
            writer.add(group, values)


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer file at `path`, itself one or a folder that holds one. Raises UserError."""
    path = Path(path)
    candidates = [path / name for name in TOKENIZER_FILES] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"tokenizer: {path} is no file, nor a folder with {' or '.join(TOKENIZER_FILES)}"
    )


def environment() -> dict[str, Any]:
    """What a bit-identical continuation needs to find unchanged."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "jax_version": jax.__version__,
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "cpu_affinity": sorted(affinity(0)) if affinity else None,
    }


def side_files(
    config: LaneformerConfig, metadata: Mapping[str, Any], tokenizer: str | Path | None
) -> dict[str, bytes]:
    files = {
        CONFIG: json_bytes(config.to_dict()),
        METADATA: json_bytes({"format": _FORMAT, **metadata, "environment": environment()}),
    }
    if tokenizer is not None:
        source = tokenizer_file(tokenizer)
        name = source.name if source.name in TOKENIZER_FILES else TOKENIZER_FILES[0]
        files[name] = source.read_bytes()
    return files


# Finding and checking


def is_native(path: str | Path) -> bool:
    """Whether `path` is a native checkpoint, a folder of them, or a run with some."""
    return bool(candidates(Path(path)))


def find(path: str | Path) -> Path:
    """The newest complete checkpoint at `path`: itself one, a folder of steps, or a run's folder.

    Every file is read once to check it. Warns about each damaged one that is passed over.

    Raises:
        UserError: there is none, or none is complete; says what is wrong with each.
    """
    path = Path(path)
    found = candidates(path)
    if not found:
        what = "no such folder" if not path.exists() else "holds no native checkpoint"
        raise UserError(f"{path}: {what}")
    return newest_complete(path, found)


def newest_complete(path: Path, candidates: list[Path]) -> Path:
    damaged: list[str] = []
    for folder in candidates:
        found = problems(folder)
        if not found:
            for text in damaged:
                warnings.warn(
                    f"checkpoint {text}; falling back to the newest complete one, {folder}",
                    stacklevel=3,
                )
            return folder
        damaged.append(f"{folder} is not complete: {_short(found)}")
    raise UserError(f"{path}: no complete checkpoint: {'; '.join(damaged)}")


def _short(found: list[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def candidates(path: Path) -> list[Path]:
    """Checkpoint folders at `path`, newest first."""
    if (path / MANIFEST).exists() or (path / METADATA).exists():
        return [path]
    for folder in (path / CHECKPOINTS, path):
        if folder.is_dir():
            steps = [p for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()]
            if steps:
                return sorted(steps, key=lambda p: int(p.name), reverse=True)
    return []


# Reading


def read_metadata(path: str | Path) -> dict[str, Any]:
    """metadata.json of one checkpoint folder (see `find`). Raises UserError if unreadable."""
    file = Path(path) / METADATA
    values = read_json(file)
    if not isinstance(values, dict):
        raise UserError(f"{file}: must hold a JSON object, holds {type(values).__name__}")
    return values


def read_config(path: str | Path) -> LaneformerConfig:
    """The model of one checkpoint folder. Raises UserError when it cannot be read."""
    return LaneformerConfig.from_json(Path(path) / CONFIG)


def stored(path: str | Path, group: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of what a group of a checkpoint folder holds, on the first device.

    Raises UserError when the group is missing or cannot be read.
    """
    import orbax.checkpoint as ocp

    single = SingleDeviceSharding(jax.local_devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        tree = _tree(checkpointer, Path(path).resolve() / group)
    return {
        p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single) for p, leaf in tree.items()
    }


def _tree(checkpointer: ocp.StandardCheckpointer, folder: Path) -> dict[str, Any]:
    """Shape and dtype by path of an orbax item. Raises UserError for what is none."""
    found = checkpointer.metadata(folder).item_metadata
    if found is None:
        raise UserError(f"{folder}: is missing, or no whole item of a checkpoint")
    return dict(found.tree)


def read_group(path: str | Path, group: str, target: Mapping[str, Any]) -> dict[str, jax.Array]:
    """One group of a checkpoint folder as arrays.

    target: dotted path -> `jax.ShapeDtypeStruct` with sharding, as `abstract_params` gives it;
    arrays are cast to its dtype. All of the group's paths must be there.

    Raises:
        UserError: the group is missing or lacks a tensor, or one has another shape; names all of them.
    """
    folder = Path(path).resolve() / group
    wanted = {p: t for p, t in target.items() if group_of(p) == group}
    if all(isinstance(t.sharding, SingleDeviceSharding) for t in wanted.values()):
        from laneformer_jax.checkpoint import arrays

        stores = arrays.opened(folder)
        if stores is not None:
            _check_fit(folder, stores, wanted)
            return arrays.read(stores, wanted)
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        _check_fit(folder, _tree(checkpointer, folder), wanted)
        return dict(checkpointer.restore(folder, wanted))


def _check_fit(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wrong = [f"{p} is missing" for p in wanted if p not in stored]
    wrong += [f"unexpected {p}" for p in stored if p not in wanted]
    wrong += [
        f"{p} is {list(stored[p].shape)}, must be {list(t.shape)}"
        for p, t in wanted.items()
        if p in stored and tuple(stored[p].shape) != tuple(t.shape)
    ]
    if wrong:
        raise UserError(f"{folder}: does not fit the config: {'; '.join(wrong)}")


def check_average(path: str | Path) -> None:
    """Raises UserError unless a checkpoint folder holds a running mean of the parameters."""
    run = read_metadata(path).get("run", {})
    if run.get("optimizer", {}).get("ema") is None:
        raise UserError(f"{path}: holds no running mean of the parameters (optimizer.ema)")


def read_average(path: str | Path, group: str, target: Mapping[str, Any]) -> dict[str, jax.Array]:
    """As `read_group`, but of the running mean of the parameters, which must be there."""
    import orbax.checkpoint as ocp

    wanted = {p: t for p, t in target.items() if group_of(p) == group}
    item: Any = wanted
    for key in reversed(AVERAGE):
        item = {key: item}
    with ocp.PyTreeCheckpointer() as checkpointer:
        found: Any = checkpointer.restore(
            Path(path).resolve() / OPTIMIZER,
            args=ocp.args.PyTreeRestore(
                item=item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                partial_restore=True,
            ),
        )
    for key in AVERAGE:
        found = found[key]
    return {p: found[p] for p in wanted}


def read_params(path: str | Path, target: Mapping[str, Any]) -> dict[str, jax.Array]:
    """All parameters of a checkpoint folder; `target` and errors as in `read_group`."""
    out: dict[str, jax.Array] = {}
    for group in grouped(target):
        out |= read_group(path, group, target)
    return {p: out[p] for p in target}


def load_model(path: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Laneformer:
    """The model of the newest complete checkpoint at `path` (see `find`).

    Args:
        dtype: of the parameters; None keeps the checkpoint's.
        mesh: spread the parameters over it.

    Raises:
        UserError: no complete checkpoint there.
    """
    if dtype is not None:
        check_dtype(dtype)
    folder = find(path)
    config = read_config(folder)
    if mesh is not None:
        check_mesh(mesh, config)
    dtype = read_metadata(folder)["dtype"] if dtype is None else dtype
    params = read_params(folder, abstract_params(config, dtype, mesh))
    return model_of(config, params, mesh)

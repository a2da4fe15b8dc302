"""Hugging Face folders in the lane layout: config.json and safetensors under the public names, both ways."""

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from laneformer_jax.checkpoint.memory import Scratch
from laneformer_jax.checkpoint.tensorfile import (
    SHARD_BYTES,
    TensorFolder,
    TensorSpec,
    TensorWriter,
    count_nonfinite,
)
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.files import atomic_dir, read_json
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.sharding import check_mesh, named, parameter_spec

ARCHITECTURE, MODEL_TYPE = "LaneformerTPForCausalLM", "laneformer_tp"
HEAD = "lm_head.weight"
CONFIG = "config.json"
PARAMETER_DTYPES = ("float32", "bfloat16", "float16")
_SHOWN = 8
# Never code, never pickles: what a Hub repository is asked for.
DOWNLOADED = (
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.jinja",
    "merges.txt",
    "LICENSE*",
    "README.md",
)


def tensor_name(path: str) -> str:
    """Public name of the parameter at a dotted path: `model.` in front of all but the head."""
    return path if path.startswith("lm_head.") else f"model.{path}"


def abstract_model(config: LaneformerConfig, dtype: Any = jnp.float32) -> Laneformer:
    """A model whose parameters are shapes only."""
    return nnx.eval_shape(lambda: Laneformer(config, rngs=nnx.Rngs(0), dtype=dtype))


def parameter_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted path."""
    paths = parameter_paths(nnx.state(abstract_model(config)))
    return {path: tuple(variable.shape) for path, variable in paths.items()}


# Reading


def find_folder(path_or_repo: str | Path) -> Path:
    """A local folder as it is, or the downloaded snapshot of a Hub repository id.

    Raises:
        UserError: there is neither; a file where a folder is needed, a pickle above all.
    """
    if not isinstance(path_or_repo, str | os.PathLike):
        raise UserError(f"{path_or_repo!r}: must be the path of a folder, or a Hub repository id")
    folder, name = Path(path_or_repo), str(path_or_repo)
    if not name:
        raise UserError("the path of a model is empty; name a folder or a Hub repository id")
    if folder.is_dir():
        if not (folder / CONFIG).exists():
            raise UserError(f"{name}: holds no model (no {CONFIG}){_nearby(folder)}")
        return folder
    if folder.exists():
        raise UserError(f"{name}: is a file; a folder with config.json and safetensors is needed")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(DOWNLOADED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name}: no such folder, and not to be had from the Hub ({reason})"
        ) from None


def _nearby(folder: Path) -> str:
    """A hint at the models in the folders of `folder`: a quickstart's own folder holds several."""
    inside = [
        p for p in sorted(folder.iterdir()) if (p / CONFIG).exists() or (p / "checkpoints").is_dir()
    ]
    return f"; did you mean {' or '.join(map(str, inside[:_SHOWN]))}?" if inside else ""


def model_type(folder: Path) -> str | None:
    """`model_type` of a folder's config.json; None when that does not say. Raises UserError without one."""
    values = read_json(folder / "config.json")
    found = values.get("model_type") if isinstance(values, dict) else None
    return found if isinstance(found, str) else None


def read_config(folder: Path) -> LaneformerConfig:
    """The config of a folder in the lane layout; raises UserError for another kind of model."""
    kind = model_type(folder)
    if kind is not None and "laneformer" not in kind:
        raise UserError(
            f"{folder / 'config.json'}: model_type {kind!r} is not a Laneformer; dense Llama, Mistral and "
            "Qwen3 models become one with `laneformer import --lanes N`, others need code that is never run"
        )
    return LaneformerConfig.from_json(folder)


def load(path_or_repo: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Laneformer:
    """Build the model of a folder or Hub repository.

    Args:
        dtype: of the parameters; None keeps the files'.
        mesh: spread the parameters over it.

    Raises:
        UserError: a config or file that cannot be read; tensors that are missing, extra or of another
            shape, all of them named.
    """
    if dtype is not None:
        check_dtype(dtype)
    folder = find_folder(path_or_repo)
    config = read_config(folder)
    if mesh is not None:
        check_mesh(mesh, config)
    tensors = TensorFolder(folder)
    model = abstract_model(config)
    params = nnx.state(model)
    paths = parameter_paths(params)
    check_tensors(tensors, config, {tensor_name(p): v.shape for p, v in paths.items()})
    warn_of_untied_head(tensors, config)
    for path, variable in paths.items():
        value = read_tensor(tensors, tensor_name(path), dtype)
        sharding = named(mesh, parameter_spec(path, config)) if mesh is not None else None
        variable.set_value(jax.device_put(value, sharding))
    nnx.update(model, params)
    model.mesh = mesh
    return model


def read_tensor(
    tensors: TensorFolder, name: str, dtype: Any = None, memory: Scratch | None = None
) -> np.ndarray:
    """One tensor, cast to `dtype`. Warns of NaN and infinite values, its own and the cast's.

    memory: where it may be read into.
    """
    value = tensors.read(name, memory)
    if bad := count_nonfinite(value):
        warnings.warn(
            f"{tensors.files[name]}: tensor {name} holds {bad} NaN or infinite values",
            stacklevel=2,
        )
    return cast(value, dtype, name)


def check_dtype(dtype: Any) -> None:
    """Raises UserError unless parameters can have this dtype."""
    try:
        name = str(jnp.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in PARAMETER_DTYPES:
        raise UserError(
            f"dtype: {name!r} must be one of {', '.join(PARAMETER_DTYPES)}"
            f"{nearest(name, PARAMETER_DTYPES)}"
        )


def cast(value: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """`value` in `dtype` (None: its own), rounded to nearest even. Warns of values beyond its range."""
    if dtype is None or value.dtype == (dtype := jnp.dtype(dtype)):
        return value
    with np.errstate(over="ignore"):
        out = value.astype(dtype)
    overflowed = count_nonfinite(out) - count_nonfinite(value)
    if overflowed:
        warnings.warn(
            f"tensor {name}: {overflowed} values exceed the range of {dtype}", stacklevel=2
        )
    return out


def warn_of_untied_head(
    tensors: TensorFolder, config: LaneformerConfig, embedding: str = "model.tok_embeddings.weight"
) -> None:
    """A tied head may be stored all the same and is not read; say so when it is not the embedding."""
    if not config.tie_word_embeddings or HEAD not in tensors.specs:
        return
    if not np.array_equal(tensors.read(HEAD), tensors.read(embedding)):
        warnings.warn(
            f"{tensors.files[HEAD]}: {HEAD} differs from {embedding}, but the config ties them "
            "(tie_word_embeddings): it is ignored",
            stacklevel=2,
        )


def check_tensors(
    tensors: TensorFolder, config: LaneformerConfig, expected: Mapping[str, Iterable[int]]
) -> None:
    """Raises UserError naming every tensor that is missing, extra or of another shape than `expected`."""
    specs: Mapping[str, TensorSpec] = tensors.specs
    extra = specs.keys() - expected.keys()
    if config.tie_word_embeddings:
        extra -= {HEAD}
    found = [
        f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in specs
    ]
    found += [
        f"{name} is {list(specs[name].shape)}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in specs and specs[name].shape != tuple(shape)
    ]
    found += [f"unexpected {name} {list(specs[name].shape)}" for name in sorted(extra)]
    if found:
        shown = found if len(found) <= 2 * _SHOWN else found[:_SHOWN]
        more = f"; and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
        raise UserError(
            f"{tensors.folder}: tensors do not fit the config: {'; '.join(shown)}{more}"
        )


# Writing


def save(model: Laneformer, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and safetensors (several with an index beyond `shard_bytes`) to a new folder.

    Raises:
        UserError: `path` exists and is not an empty folder.
    """
    params = {tensor_name(p): v[...] for p, v in parameter_paths(nnx.state(model)).items()}
    specs = {n: TensorSpec(tuple(v.shape), np.dtype(v.dtype)) for n, v in params.items()}
    with atomic_dir(path) as folder:
        text = config_text(model.config, parameter_dtype(model))
        (folder / "config.json").write_text(text, encoding="utf-8")
        with TensorWriter(folder, specs, shard_bytes) as writer:
            for name, value in params.items():
                writer.write(name, np.asarray(value))


def parameter_dtype(model: Laneformer) -> str:
    """The dtype of the weights, as `float32` or `bfloat16`."""
    return str(model.tok_embeddings.weight.dtype)


def config_text(config: LaneformerConfig, dtype: str) -> str:
    """A config.json for weights of `dtype`: every key it came with, and what loaders look for."""
    values = config.to_dict()
    values.setdefault("architectures", [ARCHITECTURE])
    values.setdefault("model_type", MODEL_TYPE)
    for key in ("torch_dtype", "dtype"):
        if key in values:
            values[key] = dtype
    if "dtype" not in values:
        values["torch_dtype"] = dtype
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"

"""Hugging Face folders: config.json and safetensors under the public names, both ways."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors asks for by name
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_dir
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.sharding import named, parameter_spec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_SHOWN = 8


def tensor_name(path: str) -> str:
    """Public name of the parameter at a dotted path: `model.` in front of all but the head."""
    return path if path.startswith("lm_head.") else f"model.{path}"


def abstract_model(config: LaneformerConfig, dtype: Any = jnp.float32) -> Laneformer:
    """A model whose parameters are shapes only."""
    return nnx.eval_shape(lambda: Laneformer(config, rngs=nnx.Rngs(0), dtype=dtype))


def find_folder(path_or_repo: str | Path) -> Path:
    """A local folder as it is, or the downloaded snapshot of a Hub repository id."""
    folder = Path(path_or_repo)
    if folder.is_dir():
        return folder
    name = str(path_or_repo)
    if folder.exists():
        raise UserError(f"{name}: is a file; a folder with config.json and safetensors is needed")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]  # never code, never pickles
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name}: no such folder, and not to be had from the Hub ({reason})"
        ) from None


def load(path_or_repo: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Laneformer:
    """Build the model of a folder or Hub repository.

    Args:
        dtype: of the parameters; None keeps the files'.
        mesh: spread the parameters over it.

    Raises:
        UserError: a config or file that cannot be read; tensors that are missing, extra or of another
            shape, all of them named.
    """
    folder = find_folder(path_or_repo)
    config = LaneformerConfig.from_json(folder)
    files = _tensor_files(folder)
    model = abstract_model(config)
    params = nnx.state(model)
    paths = parameter_paths(params)
    _check_tensors(folder, config, files, {tensor_name(p): v.shape for p, v in paths.items()})
    loaded: dict[str, jax.Array] = {}
    for file in sorted(set(files.values())):
        with _open(file) as handle:
            for path in paths:
                name = tensor_name(path)
                if files.get(name) != file:
                    continue
                try:
                    value = handle.get_tensor(name)
                except SafetensorError as error:
                    raise UserError(f"{file}: tensor {name} cannot be read ({error})") from None
                value = value if dtype is None else value.astype(jnp.dtype(dtype))
                sharding = named(mesh, parameter_spec(path, config)) if mesh is not None else None
                loaded[path] = jax.device_put(value, sharding)
    for path, variable in paths.items():
        variable.set_value(loaded[path])
    nnx.update(model, params)
    model.mesh = mesh
    return model


def save(model: Laneformer, path: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and safetensors (several with an index beyond `shard_bytes`) to a new folder.

    Raises:
        UserError: `path` exists and is not an empty folder.
    """
    with atomic_dir(path) as folder:
        write_config(model.config, folder, parameter_dtype(model))
        write_tensors(parameter_paths(nnx.state(model)), folder, shard_bytes)


def parameter_dtype(model: Laneformer) -> str:
    """The dtype of the weights, as `float32` or `bfloat16`."""
    return str(model.tok_embeddings.weight.dtype)


def write_config(config: LaneformerConfig, folder: Path, dtype: str) -> None:
    values = config.to_dict()
    values.setdefault("architectures", ["LaneformerTPForCausalLM"])
    values.setdefault("model_type", "laneformer_tp")
    for key in ("torch_dtype", "dtype"):
        if key in values:
            values[key] = dtype
    values.setdefault("torch_dtype", dtype)
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def write_tensors(paths: dict[str, Any], folder: Path, shard_bytes: int) -> None:
    """Write parameters in order, one shard in memory at a time."""
    shards = list(_shards(paths, shard_bytes))
    if len(shards) == 1:
        save_file(_to_host(shards[0]), folder / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(_to_host(shard), folder / file, metadata={"format": "pt"})
        weight_map |= {tensor_name(path): file for path in shard}
    total = sum(v.size * v.dtype.itemsize for v in paths.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(paths: dict[str, Any], shard_bytes: int) -> Iterator[dict[str, Any]]:
    shard: dict[str, Any] = {}
    size = 0
    for path, variable in paths.items():
        bytes_ = variable.size * variable.dtype.itemsize
        if shard and size + bytes_ > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[path] = variable
        size += bytes_
    yield shard


def _to_host(shard: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        tensor_name(path): np.ascontiguousarray(jax.device_get(variable[...]))
        for path, variable in shard.items()
    }


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a complete safetensors file ({error})") from None


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it. Raises UserError for a shard that the index names and is not there."""
    if (folder / INDEX).exists():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = {name: folder / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{folder / INDEX}: not a JSON index with a `weight_map` of tensor names to files"
            ) from None
        for name, file in files.items():
            if not file.exists():
                raise UserError(f"{file}: shard is missing; {INDEX} puts tensor {name} in it")
        return files
    if not (folder / SINGLE).exists():
        found = sorted(p.name for p in folder.iterdir())
        hint = " (pickled weights are never loaded; convert them to safetensors)"
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in found)
        raise UserError(f"{folder}: holds no {SINGLE} or {INDEX}{hint if pickled else ''}")
    with _open(folder / SINGLE) as handle:
        return {name: folder / SINGLE for name in handle.keys()}


def _check_tensors(
    folder: Path, config: LaneformerConfig, files: dict[str, Path], expected: dict[str, Any]
) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(files.values())):
        with _open(file) as handle:
            held = set(handle.keys())
            for name in files:
                if files[name] == file and name in held:
                    found[name] = tuple(handle.get_slice(name).get_shape())
    extra = found.keys() - expected.keys()
    if config.tie_word_embeddings:  # a tied head may be stored all the same
        extra -= {"lm_head.weight"}
    problems = [f"missing {name} {list(expected[name])}" for name in expected if name not in found]
    problems += [
        f"{name} is {list(found[name])}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != tuple(shape)
    ]
    problems += [f"unexpected {name} {list(found[name])}" for name in sorted(extra)]
    if problems:
        shown = "; ".join(problems[:_SHOWN]) if len(problems) > 2 * _SHOWN else "; ".join(problems)
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > 2 * _SHOWN else ""
        raise UserError(f"{folder}: tensors do not fit the config: {shown}{more}")

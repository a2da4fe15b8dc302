"""Reads a written conversion back and compares it with its source, before it gets its final name."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from laneformer_jax.checkpoint import dense, hf, native, slices
from laneformer_jax.checkpoint.sources import LaneFolder, Params, Source, groups
from laneformer_jax.checkpoint.tensorfile import TensorFolder
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError

_PROBE = (2, 64)  # sequences × tokens
_TOLERANCE = 1e-4  # of the largest logit, where the order of sums differs


def native_folder(source: Source, folder: Path) -> tuple[str, ...]:
    """Compare an inference checkpoint that has its arrays, if not yet its manifest."""

    def read(group: str) -> Params:
        stored = native.stored(folder, group)
        return {
            path: np.asarray(value)
            for path, value in native.read_group(folder, group, stored).items()
        }

    return _equal_tensors(source, read), _equal_logits(source, read, source.config)


def lane_folder(source: Source, folder: Path) -> tuple[str, ...]:
    """Compare an exported folder in the lane layout."""
    written = LaneFolder(folder)
    return _equal_tensors(source, written.read), _equal_logits(source, written.read, written.config)


def split(source: dense.DenseFolder) -> tuple[str, ...]:
    """Compare a dense model, as one lane, with its lanes under δ = N; both in float32."""
    whole = dense.DenseFolder(source.folder, 1, 1)
    merged = dataclasses.replace(source.config, broadcast_delay=source.config.num_hidden_layers)
    return (_close_logits(_float32(whole), whole.config, _float32(source), merged),)


def dense_folder(source: Source, folder: Path, copies: int) -> tuple[str, ...]:
    """Compare an exported dense folder: its tensors with merged lanes, its logits with the lanes'."""
    tensors = TensorFolder(folder)
    count = 0
    for group in groups(source):
        for name, value in slices.merge_group(source.config, source.read(group), copies).items():
            if not np.array_equal(_bits(tensors.read(name)), _bits(value)):
                raise UserError(f"verify: tensor {name} was not written as it was read")
            count += 1
    written = dense.DenseFolder(folder, 1, 1)
    close = _close_logits(_float32(written), written.config, _float32(source), source.config)
    return f"{count} tensors equal bit for bit", close


def _float32(source: Source) -> Params:
    return {path: value.astype(np.float32) for path, value in read_all(source).items()}


def _close_logits(
    a: Params, a_config: LaneformerConfig, b: Params, b_config: LaneformerConfig
) -> str:
    one, other = probe_logits(a_config, a), probe_logits(b_config, b)
    gap = float(np.max(np.abs(one - other)))
    if not gap <= _TOLERANCE * max(1.0, float(np.max(np.abs(one)))):
        raise UserError(f"verify: the logits of a probe batch differ by {gap:.2g}")
    return f"logits of a probe batch equal the dense model's within {gap:.1e}"


def probe_logits(config: LaneformerConfig, params: Mapping[str, np.ndarray]) -> np.ndarray:
    """Logits [B,S,V], float32, of fixed random tokens."""
    model = native.model_of(config, {p: jnp.asarray(v) for p, v in params.items()}, None)
    batch, length = _PROBE
    shape = (batch, min(length, config.max_position_embeddings))
    ids = np.random.default_rng(0).integers(config.vocab_size, size=shape, dtype=np.int32)
    return np.asarray(model(jnp.asarray(ids)), np.float32)


def read_all(source: Source) -> Params:
    return {path: value for group in groups(source) for path, value in source.read(group).items()}


def _equal_tensors(source: Source, read: Callable[[str], Params]) -> str:
    count = 0
    for group in groups(source):
        wanted, found = source.read(group), read(group)
        for path, value in wanted.items():
            same = path in found and found[path].dtype == value.dtype
            if not same or not np.array_equal(_bits(found[path]), _bits(value)):
                raise UserError(
                    f"verify: tensor {hf.tensor_name(path)} was not written as it was read"
                )
            count += 1
    return f"{count} tensors equal bit for bit"


def _equal_logits(source: Source, read: Callable[[str], Params], config: LaneformerConfig) -> str:
    wanted = probe_logits(source.config, read_all(source))
    found = probe_logits(config, {p: v for g in groups(source) for p, v in read(g).items()})
    if not np.array_equal(wanted, found, equal_nan=True):
        raise UserError("verify: the logits of a probe batch differ, though all tensors are equal")
    return "logits of a probe batch equal bit for bit"


def _bits(value: np.ndarray) -> np.ndarray:
    """So that NaN equals itself."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)

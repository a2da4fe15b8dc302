"""Where a conversion reads from: a model's parameters, one group at a time.

Groups are those of the native format: embedding, each layer, head.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from laneformer_jax.checkpoint import hf, native
from laneformer_jax.checkpoint.memory import Scratch
from laneformer_jax.checkpoint.plain import plain_arrays
from laneformer_jax.checkpoint.tensorfile import TensorFolder, TensorSpec
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError

Params = dict[str, np.ndarray]  # by dotted path, as `layers.0.attention.wq.weight`
Specs = dict[str, TensorSpec]
EMBEDDING = "tok_embeddings.weight"
VOCABULARY = (EMBEDDING, "lm_head.weight", "lm_head.linear.weight")  # [V, …]


class Source(Protocol):
    """A model to convert.

    Attributes:
        config: the model.
        specs: shape and dtype of every parameter as `read` gives them, by dotted path, in group order.
    """

    config: LaneformerConfig
    specs: Specs

    def read(self, group: str, memory: Scratch | None = None) -> Params:
        """The parameters of one group; some may lie in `memory`."""
        ...


def groups(source: Source) -> list[str]:
    return list(native.grouped(source.specs))


def read_ahead(source: Source) -> Iterator[tuple[str, Params]]:
    """All groups in order, each read while the one before it is used.

    The arrays of a group hold their values until the next is asked for.
    """
    by_group = native.grouped(source.specs)
    names = list(by_group)
    largest = max(sum(spec.nbytes for spec in specs.values()) for specs in by_group.values())
    # Twice, for sources of a wider dtype; room that is never used costs nothing.
    now, then = Scratch(2 * largest), Scratch(2 * largest)
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(source.read, names[0], now)
        for name, following in zip(names, [*names[1:], None], strict=True):
            params = coming.result()
            if following is not None:
                then.clear()
                coming = reader.submit(source.read, following, then)
            yield name, params
            now, then = then, now


def flat_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted path, in group order."""
    by_group = native.grouped(hf.parameter_shapes(config))
    return {path: shape for shapes in by_group.values() for path, shape in shapes.items()}


class LaneFolder:
    """A Hugging Face folder in the lane layout. Raises UserError as `hf.load`."""

    def __init__(self, folder: Path, dtype: np.dtype[Any] | None = None):
        self.config = hf.read_config(folder)
        self.tensors = TensorFolder(folder)
        self._dtype = dtype
        shapes = flat_shapes(self.config)
        expected = {hf.tensor_name(path): shape for path, shape in shapes.items()}
        hf.check_tensors(self.tensors, self.config, expected)
        hf.warn_of_untied_head(self.tensors, self.config)
        self.specs = {
            path: TensorSpec(shape, dtype or self.tensors.specs[hf.tensor_name(path)].dtype)
            for path, shape in shapes.items()
        }

    def read(self, group: str, memory: Scratch | None = None) -> Params:
        return {
            path: hf.read_tensor(self.tensors, hf.tensor_name(path), self._dtype, memory)
            for path in self.specs
            if native.group_of(path) == group
        }


class NativeCheckpoint:
    """A complete native checkpoint folder, such as `native.find` returns.

    Args:
        folder: the checkpoint.
        dtype: cast to it; None keeps each parameter's.
        vocab_size: rows of the embedding and head to keep; None: the config's. The rest is padding.
        average: the running mean of the parameters instead of what was trained last.

    Attributes:
        as_stored: whether `read` gives the very bits of the checkpoint, all of them.

    Raises:
        UserError: a vocabulary that cannot be cut, parameters that do not fit the config, or no running
            mean.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any] | None = None,
        vocab_size: int | None = None,
        average: bool = False,
    ):
        self._folder, self._dtype, self._average = folder, dtype, average
        if average:
            native.check_average(folder)
        self.config = cut_vocabulary(native.read_config(folder), vocab_size)
        shapes = flat_shapes(self.config)
        self._stored = {group: native.stored(folder, group) for group in native.grouped(shapes)}
        held = {path: leaf for leaves in self._stored.values() for path, leaf in leaves.items()}
        wrong = [f"missing {path}" for path in shapes if path not in held]
        wrong += [f"unexpected {path}" for path in held if path not in shapes]
        wrong += [
            f"{path} is {list(held[path].shape)}, must be {list(shape)}"
            for path, shape in shapes.items()
            if path in held and not _fits(path, tuple(held[path].shape), shape)
        ]
        if wrong:
            raise UserError(f"{folder}: parameters do not fit the config: {'; '.join(wrong)}")
        self.specs = {
            path: TensorSpec(shape, dtype or np.dtype(held[path].dtype))
            for path, shape in shapes.items()
        }
        self.as_stored = all(
            spec == (tuple(held[path].shape), held[path].dtype) for path, spec in self.specs.items()
        )

    def read(self, group: str, memory: Scratch | None = None) -> Params:
        stored = self._stored[group]
        plain = None if self._average else plain_arrays(self._folder / group, stored)
        params: Mapping[str, Any]
        if self._average:
            params = native.read_average(self._folder, group, stored)
        elif plain is not None:
            params = {path: array.read(memory) for path, array in plain.items()}
        else:
            params = native.read_group(self._folder, group, stored)
        return {
            path: hf.cast(np.asarray(value)[: self.specs[path].shape[0]], self._dtype, path)
            for path, value in params.items()
        }


def _fits(path: str, held: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if path in VOCABULARY and len(held) == 2:
        return held[0] >= wanted[0] and held[1:] == wanted[1:]
    return held == wanted


def cut_vocabulary(config: LaneformerConfig, vocab_size: int | None) -> LaneformerConfig:
    """`config` with only the first `vocab_size` entries. Raises UserError where that changes the model."""
    if vocab_size is None or vocab_size == config.vocab_size:
        return config
    if vocab_size > config.vocab_size:
        raise UserError(
            f"vocab_size: {vocab_size} exceeds the checkpoint's {config.vocab_size}; it can only be cut"
        )
    if config.lm_head_type == "vocab_parallel":
        raise UserError(
            "vocab_size: the rows of a vocab_parallel head cannot be cut: each lane makes the logits of its "
            "own share of the vocabulary, and a cut would move rows to other lanes"
        )
    return dataclasses.replace(config, vocab_size=vocab_size)

"""A dense Llama-family folder as lanes: the source of a conversion."""

from pathlib import Path
from typing import Any

import numpy as np

from laneformer_jax.checkpoint import hf, native
from laneformer_jax.checkpoint.families import FAMILIES, READ, copies_of, lane_config
from laneformer_jax.checkpoint.memory import Scratch
from laneformer_jax.checkpoint.slices import (
    EMBEDDING_NAME,
    LayerOrder,
    dense_name,
    dense_shapes,
    merge_rows,
    split_group,
)
from laneformer_jax.checkpoint.sources import Params, Source, Specs, flat_shapes, groups
from laneformer_jax.checkpoint.tensorfile import TensorFolder, TensorSpec
from laneformer_jax.errors import UserError, warn_of_misspellings
from laneformer_jax.files import read_json


def is_dense(folder: Path) -> bool:
    """Whether a Hugging Face folder says that it is a dense model of a family we split."""
    return hf.model_type(folder) in FAMILIES


class DenseFolder:
    """A dense Hugging Face folder, split into lanes, as a conversion's source.

    Args:
        folder: config.json and safetensors of a Llama, Mistral or Qwen3 model.
        lanes, delay: L and δ of the result.
        dtype: cast to it; None keeps the files'.
        order: of each layer's units; None: as they are.

    Raises:
        UserError: a model that cannot be split, or a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        lanes: int,
        delay: int,
        dtype: np.dtype[Any] | None = None,
        order: list[LayerOrder] | None = None,
    ):
        values = read_json(folder / "config.json")
        warn_of_misspellings(values, READ, str(folder / "config.json"))
        try:
            self.config = lane_config(values, lanes, delay)
        except UserError as error:
            raise UserError(f"{folder / 'config.json'}: {error}") from None
        self.tensors = TensorFolder(folder)
        for name in [n for n in self.tensors.specs if n.endswith(".rotary_emb.inv_freq")]:
            del self.tensors.specs[name]  # a table that old checkpoints carry along
        hf.check_tensors(
            self.tensors, self.config, dense_shapes(self.config, copies_of(self.config))
        )
        hf.warn_of_untied_head(self.tensors, self.config, EMBEDDING_NAME)
        self.folder, self._dtype, self._order = folder, dtype, order
        self.specs: Specs = {
            path: TensorSpec(shape, dtype or self.tensors.specs[dense_name(path)].dtype)
            for path, shape in flat_shapes(self.config).items()
        }

    def read(self, group: str, memory: Scratch | None = None) -> Params:
        paths = [path for path in self.specs if native.group_of(path) == group]
        flat = {p: hf.read_tensor(self.tensors, dense_name(p), self._dtype, memory) for p in paths}
        order = None
        if self._order is not None and group.startswith("layer_"):
            order = self._order[int(group.removeprefix("layer_"))]
        return split_group(self.config, flat, order)


def removable_copies(source: Source) -> int:
    """How many kv heads of a split model can become one: its copies while they are equal, else 1."""
    copies, head = copies_of(source.config), source.config.head_size
    if copies == 1:
        return 1
    for group in groups(source):
        for path, value in source.read(group).items():
            if path.endswith((".wk.weight", ".wv.weight")):
                heads = merge_rows(value).reshape(-1, copies, head, value.shape[2])
                if not np.array_equal(heads, np.broadcast_to(heads[:, :1], heads.shape)):
                    return 1
    return copies

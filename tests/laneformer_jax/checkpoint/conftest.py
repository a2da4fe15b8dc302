"""What the checkpoint tests share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import goldens
import jax.numpy as jnp
import numpy as np
import pytest

from laneformer_jax.checkpoint import native, sources, verify


@pytest.fixture
def folder(tmp_path) -> Path:
    """A Hugging Face folder of the committed golden weights, all that `tmp_path` holds."""
    return goldens.write_folder(tmp_path / "source", goldens.committed().weights)


@pytest.fixture
def lane_logits() -> Callable[..., np.ndarray]:
    """Logits [S, V] of a conversion's source on ids [S], with fields of its config changed."""

    def logits(source: sources.Source, ids: np.ndarray, **changes) -> np.ndarray:
        params = {p: jnp.asarray(v) for p, v in verify.read_all(source).items()}
        model = native.model_of(dataclasses.replace(source.config, **changes), params, None)
        return np.asarray(model(jnp.asarray(ids)[None]))[0]

    return logits

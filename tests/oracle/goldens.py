"""The folders of golden numbers: one is committed, the others lie in the shared folder."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, the name bfloat16)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

COMMITTED = "l8_d2_replicate"
FLOAT32 = (
    COMMITTED,
    "l1_dense",
    "l2_d3_lanehead",
    "l4_d1_vocab_parallel",
    "l4_delay_ge_layers",
    "l4_unclamped",
    "l8_d2_noearly",
    "l8_nocomm",
    "l8_prenorm",
)
BFLOAT16 = "l8_d2_replicate_bf16"


@dataclass(frozen=True)
class Golden:
    folder: Path  # config.json, model.safetensors: loads as a checkpoint
    config: dict
    weights: dict[str, np.ndarray]
    want: dict[str, np.ndarray]  # golden.safetensors


@functools.cache
def load_golden(folder: Path) -> Golden:
    return Golden(
        folder=folder,
        config=json.loads((folder / "config.json").read_text()),
        weights=load_file(folder / "model.safetensors"),
        want=load_file(folder / "golden.safetensors"),
    )


def committed() -> Golden:
    return load_golden(Path(__file__).parents[1] / "golden" / COMMITTED)


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    """The committed folder's config, changed by `config`, with these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**committed().config, **config}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def golden_of(request: pytest.FixtureRequest, name: str) -> Golden:
    """The committed folder always; the others through the `shared` fixture, which may skip."""
    if name == COMMITTED:
        return committed()
    return load_golden(request.getfixturevalue("shared") / "golden" / name)

"""The library through its public face, in the oracle's terms: tensors by Hugging Face name."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from laneformer_jax import Laneformer
from laneformer_jax.checkpoint.hf import tensor_name
from laneformer_jax.model import parameter_paths


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def library_model(config: dict, tensors: dict[str, np.ndarray], mesh=None) -> Laneformer:
    with tempfile.TemporaryDirectory() as folder:
        return Laneformer.from_pretrained(
            write_checkpoint(Path(folder), config, tensors), mesh=mesh
        )


def by_name(state: nnx.State) -> dict[str, np.ndarray]:
    """Parameters or gradients under their Hugging Face names."""
    return {
        tensor_name(path): np.asarray(jax.device_get(leaf[...]))
        for path, leaf in parameter_paths(state).items()
    }


class Results(NamedTuple):
    logits: jax.Array  # [B,S,V]
    hidden: jax.Array  # [N,B,S,L,D]
    loss: jax.Array  # weighted mean of -log softmax(logits)[targets], float32
    grads: dict[str, np.ndarray]  # of that loss


@partial(jax.jit, static_argnums=(0, 1))
def _run(graphdef, mesh, params, inputs, targets, weights):
    def loss_of(params):
        model = nnx.merge(graphdef, params)
        model.mesh = mesh
        logits, hidden = model(**inputs, return_hidden=True)
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * weights) / jnp.sum(weights), (logits, hidden)

    (loss, (logits, hidden)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return logits, hidden, loss, grads


def run(model: Laneformer, inputs: dict, targets: np.ndarray, weights: np.ndarray) -> Results:
    """All that one batch shows, from one compiled function. inputs: the arguments of model(...)."""
    graphdef, params = nnx.split(model)
    weights = np.asarray(weights, np.float32)
    logits, hidden, loss, grads = _run(graphdef, model.mesh, params, inputs, targets, weights)
    return Results(logits, hidden, loss, by_name(grads))


def greatest_error(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest max|Δ| / max|g| of any tensor; the names must be the same."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max()) for n in want)

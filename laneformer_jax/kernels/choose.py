"""Which kernels a model runs with on a device. Imports Pallas only where they would run."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import jax

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.kernels.names import INTERPRETED, KERNELS
from laneformer_jax.kernels.tuning import INTERPRETER, Tuning, for_device


def unsupported(config: LaneformerConfig, launches: str, alone: bool = True) -> str | None:
    """Why launches of this kind cannot run the layers of a model, if they cannot. alone: all lanes are on
    one device."""
    if config.qk_norm:
        return "qk_norm: heads are normalised before RoPE"
    if config.ladder_residual:
        return "ladder_residual: sums arrive one module late"
    if launches == "token":
        if not alone:
            return "lanes on several devices, whose sums lie between launches"
        if any(map(config.sums_now, range(config.num_hidden_layers))):
            return "use_early_comm: layers that sum at once"
    return None


def choose(
    kernels: str,
    config: LaneformerConfig,
    device: Any,
    weights: str = "native",
    alone: bool = True,
) -> str:
    """The implementation behind `kernels`, one of `KERNELS` but for "auto".

    "auto" is what the device's table says, "fused" where the model cannot run that, and "xla" where no
    kernels can run; on a GPU it says why in one line. alone: all lanes are on `device`.

    Raises:
        UserError: an unknown name, or kernels where they cannot run.
    """
    if kernels not in KERNELS:
        raise UserError(
            f"kernels: {kernels!r} must be one of {', '.join(map(repr, KERNELS))}"
            f"{nearest(kernels, KERNELS)}"
        )
    if kernels == "xla":
        return "xla"
    table = tuning(kernels, device)
    wanted = kernels.removeprefix("interpret-")
    if kernels == "auto":
        wanted = "fused"
        if table is not None and unsupported(config, table.auto, alone) is None:
            wanted = table.auto
    reason = unsupported(config, wanted, alone)
    if weights != "native":
        reason = f"weights {weights}: the kernels read the model's own dtype"
    if table is None:
        kind = f"{device.platform} ({device.device_kind})"
        reason = (
            f"device {kind}: there are kernels for NVIDIA from compute capability 8.0 and gfx942"
        )
    reason = reason or _no_backend()
    if kernels == "auto":
        if reason is not None and device.platform == "gpu":
            print(f"kernels: xla, since the fused ones do not support {reason}", file=sys.stderr)
        return "xla" if reason is not None else wanted
    if reason is not None:
        raise UserError(f"kernels: {kernels!r} cannot run: {reason}")
    return kernels


def _no_backend() -> str | None:
    """Why this JAX cannot launch them, if it cannot."""
    try:
        importlib.import_module("laneformer_jax.kernels.backend")
    except ImportError as error:
        return f"JAX {jax.__version__}: its Pallas has no Triton lowering ({error})"
    return None


def tuning(kernels: str, device: Any) -> Tuning | None:
    """The table that `kernels` run with on `device`; None where they cannot.

    Raises:
        UserError: a tuned table that is not one.
    """
    return INTERPRETER if kernels in INTERPRETED else for_device(device)

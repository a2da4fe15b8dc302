"""Which kernels a model runs with on a device. Imports no Pallas."""

from __future__ import annotations

import sys
from typing import Any

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError, nearest

# xla: plain JAX. fused: `step.layers_step`. auto: the best that the device has. interpret: fused, on
# any device, one program after another; to test the kernels and nothing else.
KERNELS = ("auto", "xla", "fused", "interpret")


def table(device: Any) -> str | None:
    """The key of `tuning.TABLES` for a JAX device; None where the kernels cannot run."""
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu":
        return None
    if capability.startswith("gfx"):
        return "gfx942" if capability.startswith("gfx942") else None
    return "sm_90" if float(capability or 0) >= 8 else None


def unsupported(config: LaneformerConfig) -> str | None:
    """Why these kernels cannot run the layers of a model, if they cannot."""
    if config.qk_norm:
        return "qk_norm: heads are normalised before RoPE"
    return None


def choose(kernels: str, config: LaneformerConfig, device: Any, weights: str = "native") -> str:
    """The implementation behind `kernels`: "xla", "fused" or "interpret".

    Prints one line where "auto" on a GPU has to fall back.

    Raises:
        UserError: an unknown name, or "fused" or "interpret" where they cannot run.
    """
    if kernels not in KERNELS:
        raise UserError(
            f"kernels: {kernels!r} must be one of {', '.join(map(repr, KERNELS))}"
            f"{nearest(kernels, KERNELS)}"
        )
    if kernels == "xla":
        return "xla"
    reason = unsupported(config)
    if weights != "native":
        reason = f"weights {weights}: the kernels read the model's own dtype"
    if kernels != "interpret" and table(device) is None:
        kind = f"{device.platform} ({device.device_kind})"
        reason = (
            f"device {kind}: there are kernels for NVIDIA from compute capability 8.0 and gfx942"
        )
    if kernels == "auto":
        if reason is not None and device.platform == "gpu":
            print(f"kernels: xla, since the fused ones do not support {reason}", file=sys.stderr)
        return "xla" if reason is not None else "fused"
    if reason is not None:
        raise UserError(f"kernels: {kernels!r} cannot run: {reason}")
    return kernels

"""Generating text: `Engine` for one request at a time, `generate` and `stream` for batches of ids."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.batch import Generation, generate, stream
    from decode.engine import Engine
    from decode.request import Burst, Request, Sampling

_MODULES = {
    "Burst": "decode.request",
    "Engine": "decode.engine",
    "Generation": "decode.batch",
    "Request": "decode.request",
    "Sampling": "decode.request",
    "generate": "decode.batch",
    "stream": "decode.batch",
}
__all__ = ["Burst", "Engine", "Generation", "Request", "Sampling", "generate", "stream"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line starts without JAX.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

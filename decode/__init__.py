"""Generating text: `generate` for whole answers, `stream` for tokens as they come."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.engine import Generation, generate, stream

__all__ = ["Generation", "generate", "stream"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line starts without JAX.
    if name in __all__:
        return getattr(importlib.import_module("decode.engine"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Compiled programs kept on disk, so that a command that ran before starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_MOST_BYTES = 2 << 30  # the least recently used go first


def folder() -> Path:
    """Where: `$XDG_CACHE_HOME/laneformer/jax`, by default under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "laneformer" / "jax"


def enable() -> None:
    """Keep what this process compiles, however quickly, and use what is kept.

    A cache that was chosen before (JAX_COMPILATION_CACHE_DIR) stays as it is. A folder that cannot be
    written is JAX's to warn of; nothing depends on it.
    """
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

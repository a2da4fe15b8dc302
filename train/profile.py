"""`--profile`: a trace of a few updates, for Perfetto or TensorBoard's profile plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

SKIPPED, TRACED = 2, 3  # of a process's updates, the first are slower


class Profile:
    """Traces updates 3 to 5 of this process into `folder`; with None nothing.

    Below `folder`, `plugins/profile/<time>/` holds `*.xplane.pb` and `*.trace.json.gz`.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._made, self._running = folder, 0, False

    @contextmanager
    def update(self, step: int, state: Any) -> Iterator[None]:
        """Around the call that makes update `step` of `state`."""
        if self._folder is not None:
            if self._made == SKIPPED:
                jax.block_until_ready(state)
                jax.profiler.start_trace(str(self._folder))
                self._running = True
            elif self._made == SKIPPED + TRACED:
                self.close(state)
            self._made += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self, state: Any) -> None:
        """Write what was traced, once the devices have made `state`."""
        if self._running:
            self._running = False
            jax.block_until_ready(state)
            jax.profiler.stop_trace()

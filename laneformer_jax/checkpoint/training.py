"""The numbered checkpoints of a training run: parameters as in `native`, and optimizer state."""

import functools
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

from laneformer_jax.checkpoint import assets, manifest, native
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import refusal

_ORBAX_LOG = logging.getLogger("absl")
_LOOK_S = 0.02
_SWEEP_S = 5.0
_GONE_S = 1.0  # without anything new


@dataclass(frozen=True)
class Restored:
    """A training checkpoint that was read back."""

    step: int
    folder: Path
    params: dict[str, jax.Array]
    optimizer: Any
    metadata: dict[str, Any]


class _Held:
    """A preservation policy: the steps of a set that changes."""

    def __init__(self, steps: set[int]):
        self._steps = steps

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return [checkpoint.step in self._steps for checkpoint in checkpoints]


class _Failure(logging.Filter):
    """What a save in the background failed with in this process.

    Orbax tells its log at once, but its caller only when every process has come to the same point, which
    one that failed alone keeps the others from. What the system refused is told by who raises it, in one
    line, and not in tracebacks of the log's and of tensorstore's as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._hook: Any = None

    def listen(self) -> None:
        _ORBAX_LOG.addFilter(self)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unheard

    def stop(self) -> None:
        _ORBAX_LOG.removeFilter(self)
        if self._hook is not None:
            sys.unraisablehook = self._hook

    def _unheard(self, found: Any) -> None:
        """A write that ends after another has failed finds nobody to tell: tensorstore prints that."""
        if str(found.exc_value) != "Event loop is closed":
            self._hook(found)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if "background save thread" in record.getMessage():
            self.error = error
        return refusal(error) is None


class TrainingCheckpoints:
    """The numbered checkpoints of one run, over orbax's CheckpointManager.

    A save is written to a temporary folder and renamed when it and its manifest are on disk; a
    process that is killed at any moment leaves the checkpoints before it as they were.

    Args:
        folder: where the numbered folders go; made when missing.
        keep: how many of the newest stay.
        keep_every: steps whose multiples stay for good; None: none.

    Attributes:
        held: steps that stay as long as they are in here.
    """

    def __init__(self, folder: str | Path, keep: int = 2, keep_every: int | None = None):
        self.folder = Path(folder).resolve()
        self.held: set[int] = set()
        self._files: dict[str, bytes] = {}
        self._saving: int | None = None
        self._failure = _Failure()
        self._unchecked = False  # whether a save has begun whose end nobody has looked at
        policies: list[Any] = [keep_policy.LatestN(keep), _Held(self.held)]
        if keep_every:
            policies.append(keep_policy.EveryNSteps(keep_every))
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=keep_policy.AnyPreservationPolicy(policies),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._finish),
            enable_background_delete=False,
            cleanup_tmp_directories=True,  # what a killed process was writing
        )

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        # Made by the first save: a run that fails before it leaves no folder behind.
        self._failure.listen()
        return ocp.CheckpointManager(self.folder, options=self._options)

    def steps(self) -> list[int]:
        """Steps with a committed folder, whole or not, ascending."""
        return sorted(int(p.name) for p in native.candidates(self.folder))

    def save(
        self,
        step: int,
        params: Mapping[str, Any],
        optimizer: Any,
        config: LaneformerConfig,
        metadata: Mapping[str, Any],
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Start saving; returns when the arrays may be donated. Waits for an earlier save first.

        Args:
            metadata: added to what `native.read_metadata` returns.
            tokenizer: a tokenizer file, or a folder that holds one, to copy.
            chat_template: the Jinja text that belongs to the model; None: Laneformer's own.

        Raises what an earlier background save failed with (a full or read-only disk, say).
        """
        self.wait()
        dtype = str(next(iter(params.values())).dtype)
        metadata = {"kind": "training", "dtype": dtype, "step": step, **metadata}
        self._files, self._saving = native.side_files(config, metadata, tokenizer), step
        if chat_template is not None:
            self._files[assets.CHAT_TEMPLATE] = chat_template.encode()
        items = {group: ocp.args.StandardSave(v) for group, v in native.grouped(params).items()}
        items[native.OPTIMIZER] = ocp.args.StandardSave(optimizer)
        self._unchecked = True
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def check(self) -> None:
        """Raise what the last save failed with, if it is over; waits for nothing."""
        if self._unchecked:
            self._raise_alone()
            if not self._manager.is_saving_in_progress():
                self.wait()

    def wait(self) -> None:
        """Until the last save is committed; raises what it failed with."""
        if not self._unchecked:
            return
        while self._manager.is_saving_in_progress():
            self._raise_alone()
            time.sleep(_LOOK_S)
        self._unchecked = False
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def _raise_alone(self) -> None:
        """Of several processes, raise what the last save failed with in this one."""
        if self._failure.error is not None and jax.process_count() > 1:
            raise self._failure.error

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None when the folder holds no checkpoint at all.

        Damaged newer ones are renamed out of the way, with a warning.

        Raises:
            UserError: there are checkpoints, but none is complete.
        """
        found = native.candidates(self.folder)
        if not found:
            return None
        folder = native.newest_complete(self.folder, found)
        for damaged in found[: found.index(folder)]:
            if jax.process_index() == 0:
                aside = damaged.with_name(f"{damaged.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                damaged.rename(aside)
        return folder

    def restore(self, folder: Path, params: Mapping[str, Any], optimizer: Any) -> Restored:
        """The checkpoint `folder` on the shardings of the abstract `params` and `optimizer`.

        Raises:
            UserError: a parameter is missing or has another shape.
        """
        restored = native.read_params(folder, params)
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(folder / native.OPTIMIZER, optimizer)
        return Restored(int(folder.name), folder, restored, state, native.read_metadata(folder))

    def close(self) -> None:
        """Finish the last save, or give back what it took of the disk if it failed; release the threads."""
        try:
            if "_manager" in self.__dict__:
                self._manager.close()
        finally:
            self._failure.stop()
            if jax.process_index() == 0 and self._temporary():
                self._sweep()

    def _sweep(self) -> None:
        """Remove what a failed save has written; threads that had not failed yet may still write."""
        until, gone_until = time.monotonic() + _SWEEP_S, time.monotonic() + _GONE_S
        while time.monotonic() < min(until, gone_until):
            if left := self._temporary():
                gone_until = time.monotonic() + _GONE_S
            for temporary in left:
                shutil.rmtree(temporary, ignore_errors=True)
            time.sleep(0.1)

    def _finish(self) -> None:
        """Orbax calls this with the arrays on disk, before the folder gets its final name."""
        if jax.process_index() != 0:
            return
        temporary = self._temporary()
        assert len(temporary) == 1, f"{self.folder}: no single temporary folder: {temporary}"
        manifest.write_side_files(temporary[0], self._files)

    def _temporary(self) -> list[Path]:
        """The folder of the save that is under way."""
        return list(self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*"))

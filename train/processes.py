"""The processes of a run: how they find each other, and how their hosts agree on what to do next."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from laneformer_jax import compat
from laneformer_jax.errors import UserError, refusal
from laneformer_jax.sharding import LANE

_JAX_NAMES = {"slurm": "slurm", "openmpi": "ompi"}
# What says that a launcher started this process as one of several: number, and JAX's own needs.
_COUNTS = {"slurm": "SLURM_NTASKS", "openmpi": "OMPI_COMM_WORLD_SIZE"}
_NEEDED = {
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"),
    "openmpi": ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
_CONNECT_S = 300
_AGREE_S = 24 * 3600  # a process that dies is noticed by JAX's heartbeat, long before
_FAILED, _HEARD = "laneformer/failed/", "laneformer/heard/"
_WATCH_S, _LEAVE_S = 0.5, 10.0


@dataclass
class Told:
    """What processes tell each other at the end of a block: JSON-able, theirs in their order."""

    mine: Any = None
    all: list[Any] = field(default_factory=list)


class Processes:
    """All processes of this run. Every method that talks must be called by all, in the same order.

    They talk through JAX's coordination service, from host to host: no device is involved, and
    none has to be waited for.

    Attributes:
        index: of this process; 0 writes what there is one of.
        count: how many.
    """

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._rounds: dict[str, int] = {}

    @property
    def first(self) -> bool:
        """Whether this is the process that writes what there is one of."""
        return self.index == 0

    def exchange(self, value: Any, channel: str = "main") -> list[Any]:
        """The JSON-able `value` of every process, in their order.

        channel: threads that exchange at the same time use one each.
        """
        if self.count == 1:
            return [value]
        number = self._rounds.get(channel, 0)
        self._rounds[channel] = number + 1
        client, folder = compat.coordination_client(), f"laneformer/{channel}"
        client.key_value_set(f"{folder}/{number}/{self.index}", json.dumps(value))
        client.wait_at_barrier(f"{folder}/{number}", _AGREE_S * 1000)
        found = client.key_value_dir_get(f"{folder}/{number}/")
        if self.first and number:  # everyone who is here has read the round before
            client.key_value_delete(f"{folder}/{number - 1}/")
        by_index = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}
        return [by_index[i] for i in range(self.count)]

    def of_first(self, value: Any) -> Any:
        """The first process's `value`."""
        return self.exchange(value if self.first else None)[0]

    @contextmanager
    def agreed(self, channel: str = "main") -> Iterator[Told]:
        """A block that succeeds on every process or, with a UserError, on none.

        Nothing in it may wait for another process. What it puts into `mine` the others have
        after it, in one exchange.
        """
        failure: UserError | None = None
        told = Told()
        try:
            yield told
        except UserError as error:
            failure = error
        words = self.exchange([None if failure is None else str(failure), told.mine], channel)
        if failure is not None:
            raise failure
        for index, (text, _) in enumerate(words):
            if text is not None:
                raise UserError(f"process {index} of {self.count}: {text}")
        told.all = [word for _, word in words]


def row_share(mesh: Mesh | None) -> tuple[int, int]:
    """Which part of a batch's rows this process feeds: index, and number of parts.

    Processes that hold other lanes of the same rows have the same part.

    Raises:
        UserError: the devices of a process do not hold one equal, connected part.
    """
    if mesh is None or jax.process_count() == 1:
        return 0, 1
    if mesh.size != jax.device_count():
        raise UserError(
            f"mesh: has {mesh.size} devices; {jax.process_count()} processes must use all of their"
            f" {jax.device_count()}"
        )
    lanes_last = np.moveaxis(mesh.devices, mesh.axis_names.index(LANE), -1)
    owners = np.vectorize(lambda device: device.process_index)(lanes_last)
    owners_RL = owners.reshape(-1, owners.shape[-1])  # rows of the batch, in order × lanes
    rows = {
        process: np.flatnonzero((owners_RL == process).any(axis=1))
        for process in range(jax.process_count())
    }
    parts = sorted({tuple(found.tolist()) for found in rows.values()})
    size = len(parts[0])
    expected = [tuple(range(i, i + size)) for i in range(0, len(owners_RL), size)]
    if parts != expected:
        raise UserError(
            f"mesh: {dict(mesh.shape)} cuts the rows unevenly over {jax.process_count()} processes;"
            " let lane, or data × fsdp, be a multiple or a divisor of a process's devices"
        )
    return parts.index(tuple(rows[jax.process_index()].tolist())), len(parts)


def join(
    method: str = "auto",
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connect this process to the others of its run; before JAX has looked for devices.

    Args:
        method: `slurm`, `openmpi`: find them from what srun or mpirun set; `auto`: whichever of
            the two says that there are several processes; `none`.
        coordinator: `host:port` of process 0, instead; and with it
        num_processes, process_id: how many, and which this is, from 0.

    Raises:
        UserError: the options contradict each other, the launcher's variables are not there, or
            the others cannot be reached.
    """
    by_hand = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    missing = [name for name, value in by_hand.items() if value is None]
    if missing and len(missing) < len(by_hand):
        given = next(name for name in by_hand if name not in missing)
        raise UserError(f"{given}: needs {' and '.join(missing)} as well")
    if coordinator is not None:
        assert num_processes is not None
        assert process_id is not None
        _check_by_hand(coordinator, num_processes, process_id)
        _initialize(
            f"coordinator {coordinator}",
            coordinator_address=coordinator,
            num_processes=num_processes,
            process_id=process_id,
            cluster_detection_method="deactivate",
        )
        return
    if method == "auto":
        method = _detect(os.environ)
    if method == "none":
        return
    missing = [name for name in (_COUNTS[method], *_NEEDED[method]) if name not in os.environ]
    if missing:
        raise UserError(
            f"--distributed {method}: {', '.join(missing)} not set; start the command with"
            f" {'srun' if method == 'slurm' else 'mpirun'}, or name --coordinator"
        )
    _initialize(method, cluster_detection_method=_JAX_NAMES[method])


def _detect(environment: Mapping[str, str]) -> str:
    """The launcher that started this process as one of several, else `none`."""
    for method, count in _COUNTS.items():
        several = environment.get(count, "1") not in ("", "0", "1")
        if several and all(name in environment for name in _NEEDED[method]):
            return method
    return "none"


def _check_by_hand(coordinator: str, count: int, index: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator: {coordinator!r} must be HOST:PORT, such as node0:7070")
    if count < 1:
        raise UserError(f"--num-processes: {count} must be at least 1")
    if not 0 <= index < count:
        raise UserError(f"--process-id: {index} must be from 0 to {count - 1}")


def _initialize(how: str, **options: Any) -> None:
    try:
        jax.distributed.initialize(initialization_timeout=_CONNECT_S, **options)
    except (RuntimeError, ValueError) as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(f"cannot join the other processes ({how}): {told}") from None


@contextmanager
def leaving_on_errors() -> Iterator[None]:
    """With several processes, an error that only this one has ends all of them, in a second.

    Nothing is waited for: the others may be waiting for this one. UserErrors are agreed on. Exit
    codes are those of the command line, 2 for what the system refused (`errors.refusal`), else 1.
    """
    if jax.process_count() == 1:
        yield
        return
    failures = _Failures()
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        failures.leave(error)
    finally:
        failures.stop()


class _Failures:
    """Ends this process when another has failed, and the others when this one has."""

    def __init__(self) -> None:
        self._index, self._count = jax.process_index(), jax.process_count()
        self._client = compat.coordination_client()
        self._leaving = threading.Lock()  # who has it leaves, and never gives it back
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="failures", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def leave(self, error: BaseException) -> NoReturn:
        """Tell all processes of an error of this one, and end it."""
        self._leaving.acquire()
        refused = refusal(error)
        if refused is None:
            traceback.print_exception(error)
        else:
            _tell(refused)
        text = refused or f"{type(error).__name__}: {error}"
        code = 1 if refused is None else 2
        with suppress(jax.errors.JaxRuntimeError):  # process 0, which keeps these words, has gone
            self._client.key_value_set(f"{_FAILED}{self._index}", json.dumps([code, text]))
        self._exit(code)

    def _watch(self) -> None:
        while not self._stopped.wait(_WATCH_S):
            try:
                found = self._client.key_value_dir_get(_FAILED)
            except jax.errors.JaxRuntimeError:
                return
            if found:
                self._leaving.acquire()
                key, value = found[0]
                code, text = json.loads(value)
                _tell(f"process {key.rsplit('/', 1)[1]} of {self._count}: {text}")
                self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        # Process 0 serves the others: it stays until they know, and are gone.
        until = time.monotonic() + _LEAVE_S
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_HEARD}{self._index}", "")
            while time.monotonic() < until:
                if len(self._client.key_value_dir_get(_HEARD)) == self._count:
                    break
                time.sleep(0.1)
        time.sleep(1.0 if self._index == 0 else 0)
        os._exit(code)


def _tell(text: str) -> None:
    print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)


def largest(values: Sequence[int | None]) -> int | None:
    """The largest number among `values`; None when there is none."""
    return max((value for value in values if value is not None), default=None)

"""Two processes of four devices each train as one process of eight does, through signals and kills."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from laneformer_jax import settings
from laneformer_jax.checkpoint import native
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.errors import UserError
from laneformer_jax.sharding import make_mesh
from train import processes
from train.config import RunConfig
from train.loop import train
from train.metrics import read_jsonl
from train.step import Plan

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "data.num_shards=2",
    "train.batch_size=8",
    "eval.interval=6",
    "mesh={data: 2, fsdp: 2, lane: 2}",
)
TIMEOUT_S = 600
COUNT = 2
EMPTY: Mapping[int, list[str]] = {}


class Run:
    """Two processes of four virtual devices that train into `out`.

    own, within: by process, more settings, and the beginning of the command that starts it.
    """

    def __init__(
        self,
        corpus: Path,
        out: Path,
        steps: int,
        own: Mapping[int, list[str]] = EMPTY,
        within: Mapping[int, list[str]] = EMPTY,
    ):
        self.metrics, self._out = out / "metrics.jsonl", out
        self._earlier = self._inode()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = {
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        }
        command = [sys.executable, "-m", "laneformer_jax", "train", "--out", str(out)]
        command += ["--config", str(corpus / "run.yaml"), f"train.steps={steps}", *SETTINGS]
        command += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(COUNT)]
        self._logs, self.processes = [], []
        for i in range(COUNT):
            self._logs.append(out.with_name(f"{out.name}-{time.time_ns()}-{i}.log"))
            with open(self._logs[-1], "w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*within.get(i, []), *command, "--process-id", str(i), *own.get(i, [])],
                        env={**os.environ, **env},
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                    )
                )

    def output(self, index: int) -> str:
        return self._logs[index].read_text()

    def end(self) -> list[int]:
        """Exit codes. A process that outlives another's violent end is ended, as launchers do."""
        while any(process.poll() is None for process in self.processes):
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0, 2, 130, 138, 143) for code in codes):
                for process in self.processes:
                    process.kill()
            time.sleep(0.05)
        return [process.wait() for process in self.processes]

    def wait_for_step(self, step: int) -> None:
        """Until these processes, not those before them, have logged the step; or have ended."""
        until = time.monotonic() + TIMEOUT_S
        while all(process.poll() is None for process in self.processes):
            assert time.monotonic() < until, self.output(0)
            if self._inode() != self._earlier and any(
                r["step"] >= step for r in read_jsonl(self.metrics)
            ):
                return
            time.sleep(0.005)

    def _inode(self) -> int | None:
        return self.metrics.stat().st_ino if self.metrics.exists() else None


def in_one_process(corpus: Path, out: Path, steps: int, *overrides: str) -> None:
    overrides = (f"train.steps={steps}", *SETTINGS, *overrides)
    config = settings.load(RunConfig, corpus / "run.yaml", overrides)
    assert train(config, out).exit_code == 0


def results(out: Path) -> dict[tuple[int, str], float]:
    """Numbers that do not depend on the clock, by step and name."""
    names = ("loss", "eval_loss", "grad_norm", "lr", "loss_weight", "eval_weight", "tokens")
    records = read_jsonl(out / "metrics.jsonl")
    return {(r["step"], name): r[name] for r in records for name in names if name in r}


def close(got: dict, expected: dict, rtol: float) -> None:
    assert list(got) == list(expected)
    np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=rtol)


def test_two_processes_a_signal_to_one_and_on_with_one(corpus, tmp_path):
    """Same losses as one process, and what two saved goes on in one, on another mesh."""
    steps = 14
    whole, out = tmp_path / "whole", tmp_path / "out"
    in_one_process(corpus, whole, steps)
    run = Run(corpus, out, steps)
    run.wait_for_step(7)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.end() == [143, 143], run.output(0)
    assert "saved step" in run.output(0)
    assert "saved step" not in run.output(1)
    reached = max(step for step, _ in results(out))
    assert 7 <= reached < steps
    expected = {k: v for k, v in results(whole).items() if k[0] <= reached}
    close(results(out), expected, 1e-6)

    saved = native.find(out)
    metadata = native.read_metadata(saved)
    assert sorted(metadata["data_state"]["shards"]) == ["0", "1"]
    assert metadata["environment"]["process_count"] == 2
    with pytest.warns(UserWarning, match="process_count: 2 then, 1 now"):
        in_one_process(corpus, out, steps, "mesh.data=1", "mesh.fsdp=4", "mesh.lane=1")
    close(results(out), results(whole), 2e-5)
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]


def test_what_one_process_lacks_ends_all(corpus, tmp_path):
    out = tmp_path / "out"
    run = Run(corpus, out, 8, own={1: ["tokenizer=missing/tokenizer.model"]})
    assert run.end() == [2, 2]
    assert "error: tokenizer: missing/tokenizer.model is no file" in run.output(1)
    assert "error: process 1 of 2: tokenizer: missing" in run.output(0)
    assert not out.exists()


@pytest.mark.slow
def test_data_that_one_process_waits_for_in_vain(corpus, workers_of, tmp_path):
    """What the launcher ends, all of it, is saved and over in seconds."""
    out = tmp_path / "out"
    run = Run(corpus, out, 100_000, own={1: ["data.num_workers=1"]})
    run.wait_for_step(5)
    (worker,) = workers_of(run.processes[1].pid)
    os.kill(worker, signal.SIGSTOP)
    time.sleep(10)  # what was ready is used up
    for process in run.processes:
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.end() == [143, 143], run.output(0) + run.output(1)
    assert time.monotonic() - began < 40
    reached = max(step for step, _ in results(out))
    assert f"saved step {reached} in {out}" in run.output(0)


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_disk_that_only_one_process_cannot_write_ends_all(
    broken, signalled, corpus, own_mounts, tmp_path
):
    """One line each, at once, and the same command goes on when it can.

    signalled: what fails is the last save, which a signal asks for.
    """
    out = tmp_path / "out"
    folder = out / "checkpoints"
    folder.mkdir(parents=True)
    within = {broken: [*own_mounts, "sh", "-c", READ_ONLY, str(folder)]}
    own = {i: ["checkpoint.interval=100"] for i in range(COUNT) if signalled}
    run = Run(corpus, out, 12, own, within)
    if signalled:
        run.wait_for_step(2)
        run.processes[1].send_signal(signal.SIGTERM)
    assert run.end() == [2, 2], run.output(0) + run.output(1)
    for i in range(COUNT):
        said = run.output(i)
        [error] = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "Read-only file system" in error
        assert error.startswith(f"error: process {broken} of 2: ") == (i != broken)
        assert "Traceback" not in said
    assert native.candidates(out) == []
    run = Run(corpus, out, 12)
    assert run.end() == [0, 0], run.output(0)
    assert sorted(p.name for p in folder.iterdir()) == ["10", "12"]


def test_what_two_processes_saved_is_restored_by_one_bit_for_bit(tmp_path):
    """Parameters and optimizer state, onto one device and onto a mesh of another form."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("save_in_two.py")
    command = [sys.executable, str(script), str(tmp_path), str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    savers = [subprocess.Popen([*command, str(i)], env=env) for i in range(COUNT)]
    assert [saver.wait(TIMEOUT_S) for saver in savers] == [0, 0]
    config = native.read_config(tmp_path / "1")
    parts = [np.load(tmp_path / f"parts-{i}.npz") for i in range(COUNT)]
    for mesh in (None, make_mesh(1, 2, fsdp=4)):
        plan = Plan(config, mesh)
        shapes = plan.abstract_params()
        restored = TrainingCheckpoints(tmp_path).restore(tmp_path / "1", shapes, {"mean": shapes})
        compared = [0] * COUNT
        for i, part in enumerate(parts):
            for name, saved in part.items():
                item, path, *place = name.split("|")
                whole = restored.params if item == "params" else restored.optimizer["mean"]
                index = tuple(slice(*map(int, side.split(":"))) for side in place)
                np.testing.assert_array_equal(np.asarray(whole[path])[index], saved, err_msg=name)
                compared[i] += saved.size
        # Each had half of the rows' devices, and between them every element of both items.
        size = sum(x.size for x in restored.params.values())
        assert sum(compared) >= 2 * size
        assert min(compared) > 0


@pytest.mark.slow
def test_soak(corpus, tmp_path):
    """Ten kills and ten signals, to either process, at any moment."""
    steps, rng = 200, random.Random()
    whole, out = tmp_path / "whole", tmp_path / "out"
    # In two processes as well: those sum in another order than one, and 200 updates enlarge that.
    undisturbed = Run(corpus, whole, steps)
    assert undisturbed.end() == [0, 0], undisturbed.output(0)
    codes = []
    for blow in rng.sample([signal.SIGKILL] * 10 + [signal.SIGTERM] * 10, 20):
        run = Run(corpus, out, steps)
        if rng.random() < 0.8:
            reached = max([s for s, _ in results(out)], default=0) if out.exists() else 0
            run.wait_for_step(min(reached + rng.randint(1, 9), steps - 1))
        time.sleep(rng.random())
        rng.choice(run.processes).send_signal(blow)
        codes.append(run.end())
        wanted = {-signal.SIGKILL} if blow == signal.SIGKILL else {143, -signal.SIGTERM, 0}
        assert wanted & set(codes[-1]), (codes, run.output(0), run.output(1))
    last = Run(corpus, out, steps)
    assert last.end() == [0, 0], last.output(0)
    close(results(out), results(whole), 1e-5)
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["195", "200"]


def mesh_of(owners: list, names: tuple[str, ...]) -> SimpleNamespace:
    """A mesh whose device at each place belongs to the process given there."""
    place = np.empty(np.shape(owners), object)
    for index, owner in np.ndenumerate(np.array(owners)):
        place[index] = SimpleNamespace(process_index=int(owner))
    shape = dict(zip(names, place.shape, strict=True))
    return SimpleNamespace(devices=place, axis_names=names, shape=shape, size=place.size)


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ([[[0], [0]], [[1], [1]]], [(0, 2), (1, 2)]),  # each has half of the rows
        ([[[0, 0], [1, 1]]], [(0, 2), (1, 2)]),
        ([[[0, 0, 1, 1]]], [(0, 1), (0, 1)]),  # each has half of the lanes of all rows
        ([[[0, 1]], [[2, 3]]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ([[[0], [1]], [[0], [1]]], None),  # rows that are not neighbours
        ([[[0, 0], [0, 1]]], None),
    ],
)
def test_rows_of_a_process(monkeypatch, owners, expected):
    count = int(np.max(owners)) + 1
    mesh = mesh_of(owners, ("data", "fsdp", "lane"))
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "device_count", lambda: mesh.size)
    for index in range(count):
        monkeypatch.setattr(jax, "process_index", lambda i=index: i)
        if expected is None:
            with pytest.raises(UserError, match="cuts the rows unevenly over"):
                processes.row_share(mesh)
        else:
            assert processes.row_share(mesh) == expected[index]


def test_a_mesh_of_some_devices_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="2 processes must use all of their 8"):
        processes.row_share(make_mesh(2, 2))


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def test_launchers_are_told_by_what_they_set():
    assert processes._detect({}) == "none"
    assert processes._detect(SLURM) == "slurm"
    assert processes._detect({**SLURM, "SLURM_NTASKS": "1"}) == "none"
    interactive = {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}  # salloc, without srun
    assert processes._detect(interactive) == "none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "node0:70"}, "--coordinator: needs --num-processes and --process-id"),
        ({"coordinator": "node0", "num_processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator": "node0:x", "num_processes": 2, "process_id": 0}, "must be HOST:PORT"),
        ({"coordinator": "n:1", "num_processes": 0, "process_id": 0}, "--num-processes: 0 must"),
        ({"coordinator": "n:1", "num_processes": 2, "process_id": 2}, "must be from 0 to 1"),
        ({"method": "slurm"}, "--distributed slurm: SLURM_NTASKS, .*start the command with srun"),
    ],
)
def test_bad_options(monkeypatch, options, message):
    for name in SLURM:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=message):
        processes.join(**options)

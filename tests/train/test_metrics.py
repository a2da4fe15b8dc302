"""Metrics files: what a resume keeps, TensorBoard, and wandb without a key, a network or a home."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer_jax.errors import UserError
from train import metrics
from train.config import LogConfig
from train.metrics import JsonlSink, TensorBoardSink, check_sinks, read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.smoke
def test_a_resume_drops_later_lines_and_an_unfinished_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, 0)
    for step in range(1, 8):
        sink.write({"step": step, "loss": step / 2})
    sink.write({"step": 5, "eval_loss": 1.5})
    sink.close()
    with open(path, "a") as file:
        file.write('{"step": 8, "lo')
    assert [r["step"] for r in read_jsonl(path)] == [1, 2, 3, 4, 5, 6, 7, 5]
    sink = JsonlSink(path, 5)
    kept = [{"step": s, "loss": s / 2} for s in range(1, 6)] + [{"step": 5, "eval_loss": 1.5}]
    assert sink.records == lines(path) == kept
    sink.write({"step": 6, "loss": 0.25})
    assert lines(path) == [*kept, {"step": 6, "loss": 0.25}]  # in the file before it is closed
    sink.close()


def test_a_line_that_is_no_record_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n\n{"loss": 1}\n{"step": 2}\n{"step": "3"}\n')
    assert read_jsonl(path) == [{"step": 2}]
    assert read_jsonl(tmp_path / "nowhere") == []


WANDB_RUN = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error", UserWarning)
from laneformer_jax import settings
from train.config import RunConfig
from train.metrics import MetricsWriter
config = settings.load(RunConfig, None, [
    "model.preset=tiny", "tokenizer=x", "log.wandb.mode=offline", "log.wandb.name=some",
    "log.tensorboard=true"])
out, done, until = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
writer = MetricsWriter(config, out, done)
assert len(writer.sinks) == 3
for step in range(done + 1, until + 1):
    writer.write({"step": step, "loss": 1 / step})
    if step % 2 == 0:
        writer.write({"step": step, "eval_loss": 2.0 * step})
writer.close()
"""


def wandb_offline(out: Path, done: int, until: int) -> None:
    """Log updates in a process without network, key or a home that it could write to."""
    drop = ("WANDB_", "HTTP", "http", "ALL_PROXY", "all_proxy")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env |= {
        "HOME": "/proc/no-home",  # root may write to any folder, but not make one here
        "XDG_CONFIG_HOME": "/proc/no-home",
        "XDG_CACHE_HOME": "/proc/no-home",
        "https_proxy": "http://127.0.0.1:9",  # nobody listens
        "http_proxy": "http://127.0.0.1:9",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", WANDB_RUN, str(out), str(done), str(until)]
    ended = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def history(folder: Path) -> list[dict]:
    """The points in an offline wandb run: records of wandb's protobuf in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("run-*.wandb")
    content, records, parts = file.read_bytes(), [], []
    assert content[:4] == b":W&B"
    at, block = 7, 32768
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    points = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {(i.key or ".".join(i.nested_key)): i.value_json for i in record.history.item}
            points.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return points


def scalars(folder: Path) -> dict[tuple[int, str], list[float]]:
    """What TensorBoard shows: by step and name, without what a later process hid."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[tuple[int, str], list[float]] = {}
    for file in sorted(folder.glob("events.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            if event.session_log.status == SessionLog.START:
                shown = {k: v for k, v in shown.items() if k[0] < event.step}
            for value in event.summary.value:
                shown.setdefault((event.step, value.tag), []).append(value.simple_value)
        assert at == len(content)
    return shown


def of_records(records: list[dict]) -> dict[tuple[int, str], list[float]]:
    return {
        (r["step"], k): [pytest.approx(v, rel=1e-6)]
        for r in records
        for k, v in r.items()
        if k != "step" and isinstance(v, int | float)
    }


def test_tensorboard_gets_the_same_records_through_kills(tmp_path):
    """Without a close, which a kill leaves out; and when it is asked for later only."""
    folder = tmp_path / "tensorboard"
    records = [{"step": s, "loss": s / 3, "grad_norm/head": 1.0 * s} for s in range(1, 7)]
    records[1] |= {"perplexity": None, "time": 12345.5}  # too large for a float
    late = TensorBoardSink(folder, 2, records[:2])
    for record in records[2:]:
        late.write(record)
    assert scalars(folder) == of_records(records)
    again = TensorBoardSink(folder, 4, records[:4])  # killed after a checkpoint at step 4
    shown = [*records[:4], {"step": 5, "loss": 0.5}, {"step": 5, "eval_loss": 2.5}]
    for record in shown[4:]:
        again.write(record)
    assert scalars(folder) == of_records(shown)
    for sink in (late, again):
        sink.close()


def test_tensorboard_that_is_not_installed_is_one_line(monkeypatch):
    check_sinks(LogConfig(tensorboard=True))
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    check_sinks(LogConfig())
    with pytest.raises(UserError, match=r"log.tensorboard: needs tensorboardX; pip install .*"):
        check_sinks(LogConfig(tensorboard=True))


def test_wandb_offline_needs_nothing_and_a_resume_keeps_every_point(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    wandb_offline(out, 0, 5)
    wandb_offline(out, 3, 6)  # killed after a checkpoint at step 3
    runs = sorted(
        (p for p in (out / "wandb").glob("offline-run-*") if p.is_dir()),
        key=lambda p: p.stat().st_mtime_ns,
    )
    assert len(runs) == 2
    assert len({p.name.rsplit("-", 1)[1] for p in runs}) == 1  # the same run to wandb
    first = [p for step in range(1, 6) for p in points_of(step)]
    assert history(runs[0]) == first
    assert history(runs[1]) == [p for step in range(1, 7) for p in points_of(step)]
    assert lines(out / "metrics.jsonl") == history(runs[1])
    assert scalars(out / "tensorboard") == of_records(history(runs[1]))


def points_of(step: int) -> list[dict]:
    points = [{"step": step, "loss": 1 / step}]
    return [*points, {"step": step, "eval_loss": 2.0 * step}] if step % 2 == 0 else points

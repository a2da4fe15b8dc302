"""A disk that takes no more ends a run at once, and costs nothing that was saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.clock import TIMED

HERE = Path(__file__).parent
CONFIG = """
model:
  preset: tiny
  overrides: {{vocab_size: 320, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2,
               max_position_embeddings: 32}}
tokenizer: {folder}/tokenizer.model
data: {{sources: {{a: {{kind: text, path: {folder}/texts}}}}}}
train: {{steps: 90, batch_size: 2, seq_len: 16}}
checkpoint: {{interval: 30}}
"""


def untimed(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in TIMED} for r in records]


@pytest.mark.slow
def test_a_full_and_a_read_only_disk(corpus, own_mounts, tmp_path):
    config, disk = tmp_path / "c.yaml", tmp_path / "disk"
    config.write_text(CONFIG.format(folder=corpus))
    disk.mkdir()
    done = subprocess.run(
        [*own_mounts, sys.executable, str(HERE / "full_disk.py"), str(config), str(disk)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    full = found["full"]
    assert full["code"] == 2
    assert len(full["errors"]) == 1
    assert "No space left on device" in full["errors"][0]
    # The second save failed, and not even the third was waited for.
    assert full["saved"] == [30]
    assert full["checkpoints"] == ["30"]  # nothing half-written
    assert 60 <= full["records"][-1]["step"] < 90

    read_only = found["read_only"]
    assert read_only["code"] == 2
    assert len(read_only["errors"]) == 1
    assert "Read-only file system" in read_only["errors"][0]
    assert read_only["checkpoints"] == ["30"]
    assert read_only["records"] == full["records"]

    assert found["after"]["code"] == 0
    assert found["after"]["checkpoints"] == ["60", "90"]
    assert found["after"]["files"] == ["checkpoints", "config.yaml", "metrics.jsonl"]
    assert found["undisturbed"]["code"] == 0
    assert untimed(found["after"]["records"]) == untimed(found["undisturbed"]["records"])
    assert len(found["after"]["records"]) == 90

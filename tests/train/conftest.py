"""A small corpus with its tokenizer."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from laneformer_jax.tokenizer import train_tokenizer

RUN = """
model:
  preset: tiny
  overrides: {{vocab_size: 320, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2,
               sliding_window: 8, swa_layers: [0], max_position_embeddings: 32}}
tokenizer: {folder}/tokenizer.model
data:
  sources:
    a: {{kind: text, path: {folder}/texts, heldout: 0.2}}
    b: {{kind: jsonl, path: {folder}/rows.jsonl, weight: 0.5}}
train: {{batch_size: 4, seq_len: 16}}
schedule: {{warmup_steps: 3, decay_steps: 5}}
checkpoint: {{interval: 5}}
eval: {{interval: 7, batches: 2}}
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with `texts/*.txt`, `rows.jsonl`, `tokenizer.model` of 280 entries, and `run.yaml`, which
    trains a tiny model on them and lacks `train.steps`."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = [f"word{i}" for i in range(60)]
    (folder / "texts").mkdir()
    texts = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(40)]
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    rows = [json.dumps({"text": " ".join(rng.choices(words, k=30))}) for _ in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    train_tokenizer(texts, 280, folder / "tokenizer.model")
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder


@pytest.fixture(scope="session")
def own_mounts() -> list[str]:
    """What starts a command that may mount file systems for itself alone."""
    command = ["unshare", "--map-root-user", "--mount"]
    probe = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs unshare, and a kernel that lets it mount a tmpfs")
    return command


@pytest.fixture(scope="session")
def workers_of() -> Callable[[int], list[int]]:
    """The data workers of a process: children that Python spawned."""

    def found(pid: int) -> list[int]:
        workers = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                words = path.with_name("cmdline").read_text()
            except OSError:
                continue  # it has just ended
            if parent == pid and "spawn_main" in words:
                workers.append(int(path.parent.name))
        return workers

    return found

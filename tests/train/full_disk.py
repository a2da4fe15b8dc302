"""Trains undisturbed; then on a disk that is full, read-only, and neither. Run in a mount namespace of its
own.

full_disk.py CONFIG DISK     prints what happened as JSON
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from laneformer_jax import cli
from laneformer_jax.checkpoint import native
from train.metrics import read_jsonl


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    config, disk = sys.argv[1], Path(sys.argv[2])
    out = disk / "run"
    mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk))

    def run(out: Path) -> dict:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = cli.main(["train", "--config", config, "--out", str(out)])
        return {
            "code": code,
            "errors": [x for x in said.getvalue().splitlines() if x.startswith("error")],
            "records": read_jsonl(out / "metrics.jsonl"),
            "saved": sorted(int(p.name) for p in native.candidates(out)),
            "checkpoints": sorted(p.name for p in (out / "checkpoints").iterdir()),
            "files": sorted(p.name for p in out.iterdir()),
        }

    found = {"undisturbed": run(disk / "whole")}
    files = (p for p in (disk / "whole/checkpoints/90").rglob("*") if p.is_file())
    checkpoint = sum(-(-p.stat().st_size // 4096) * 4096 for p in files)
    shutil.rmtree(disk / "whole")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free - int(1.6 * checkpoint)))
    found["full"] = run(out)
    (disk / "ballast").unlink()
    mount("-o", "remount,ro", str(disk))
    found["read_only"] = run(out)
    mount("-o", "remount,rw", str(disk))
    found["after"] = run(out)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

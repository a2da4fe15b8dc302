"""A peer to measure beside: a script in a process of its own, which may run under another Python.

The script gets a shape as JSON, says on stdout what it is, and then answers every line on stdin with one,
all of them JSON objects.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laneformer_jax.errors import UserError


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a benchmark that has a peer."""
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PATH",
        help="a Python with the extra [peer] (default: this one)",
    )
    parser.add_argument("--no-peer", action="store_true", help="measure without PyTorch")


class PeerProcess:
    """The script `script`, running.

    Attributes:
        about: what it said of itself, `versions` among it.

    Raises:
        UserError: it cannot run under `python`; names `bench`, the benchmark.
    """

    def __init__(self, bench: str, python: str, script: Path, shape: Mapping[str, Any]):
        self._process = subprocess.Popen(
            # -P: modules beside the script must not stand in for the standard library's.
            [python, "-P", str(script), json.dumps(shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.about = self._read()
        if "versions" not in self.about:
            assert self._process.stderr is not None
            told = self._process.stderr.read().strip().splitlines()[-1:]
            raise UserError(
                f"bench {bench}: {python} cannot run the peer ({' '.join(told)}); install the extra"
                " [peer] there, name another Python with --peer-python, or use --no-peer"
            )

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {}

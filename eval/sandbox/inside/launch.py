"""First code in a sandboxed interpreter: take the pipes, read the orders, give up rights, serve."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run as `python -s -P -S -B -c BOOT FOLDER`; see `eval.sandbox.process`."""
    from .channel import READY, Channel

    os.closerange(3, 1024)  # whatever the parent's parents left open
    channel = Channel.take_standard()
    options = channel.receive()
    channel.secret = options.pop("secret")
    # Imported before the files are out of reach.
    if options["role"] == "judge":
        from .judge import run
    else:
        from .serve import run
    from .confine import confine

    layers = confine(options)
    sys.path[:] = [p for p in sys.path if p != sys.argv[1]] + options["path"]
    sys.argv = [""]
    channel.send(READY, " ".join(layers).encode())
    run(channel, options)

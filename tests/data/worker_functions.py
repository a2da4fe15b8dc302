"""What test workers call; a module of its own, so that spawned processes can import it."""

import multiprocessing
import os
import signal
import struct
import time
from typing import Any

from laneformer_jax.errors import UserError


def act(task: tuple[str, Any]) -> Any:
    what, value = task
    return globals()[what](value)


def echo(value):
    time.sleep(value % 3 / 100)
    return value


def pid(_):
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)


def leave(code):
    os._exit(code)


def die(number):
    os.kill(os.getpid(), number)


def die_while_answering(_):
    """Killed after the head and a part of an answer."""
    pipe = multiprocessing.current_process()._args[0]
    os.write(pipe.fileno(), struct.pack("!i", 1 << 20) + b"x" * 100)
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(text):
    raise UserError(text)


def fail(_):
    class Local(Exception):
        """Cannot be pickled."""

    raise Local("deep down")


def answer_badly(_):
    return lambda: None

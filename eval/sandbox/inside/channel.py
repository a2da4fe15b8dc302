"""Messages in and frames out, over two private pipes.

In:  8-byte little-endian length, then a marshalled tuple. The sender is trusted.
Out: 16-byte secret, 1-byte tag, 8-byte length, payload. The receiver trusts nothing.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False  # typing and collections take longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any

READY, VALUE, DIGEST, ERROR, CALL = b"R", b"V", b"D", b"E", b"C"


class Channel:
    """Both pipes, moved away from the descriptors a program would use.

    Args:
        requests: descriptor to read messages from.
        replies: descriptor to write frames to.
    """

    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self.secret = b""

    @classmethod
    def take_standard(cls) -> Channel:
        """Use standard input and output as the pipes and put /dev/null in their place."""
        requests, replies = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        return cls(requests, replies)

    def receive(self) -> Any:
        """The next message. Exits this process when the parent has closed the pipe."""
        length = int.from_bytes(self._read(8), "little")
        return marshal.loads(self._read(length))

    def send(self, tag: bytes, payload: bytes) -> None:
        """Write one frame."""
        head = self.secret + tag + len(payload).to_bytes(8, "little")
        if len(payload) < 65536:
            self._write(memoryview(head + payload))
        else:
            self._write(memoryview(head))
            self._write(memoryview(payload))

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = os.read(self._requests, min(length, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._replies, data) :]

"""Messages between a worker and a confined process: JSON, each preceded by its length."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_LENGTH_BYTES = 8
_MAX_BYTES = 1 << 30


class SandboxChannel:
    """One end of a pair of sockets. `send` and `receive` raise TimeoutError after `limit_s` seconds (None: never), and
    OSError or EOFError if the other end is closed. Confined code can write any bytes to its end. So `receive` raises
    ValueError if the bytes are not a message, or if a message has more than `max_bytes`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any, limit_s: float | None = None) -> None:
        data = json.dumps(message, default=str).encode()
        self._end.settimeout(limit_s)
        self._end.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def receive(self, limit_s: float | None = None, max_bytes: int = _MAX_BYTES) -> Any:
        until = None if limit_s is None else time.monotonic() + limit_s
        length = int.from_bytes(self._read(_LENGTH_BYTES, until), "big")
        if length > max_bytes:
            raise ValueError(f"a message of {length} bytes")
        try:
            return json.loads(self._read(length, until))
        except RecursionError:
            raise ValueError("a message of too many levels") from None

    def shut_down(self) -> None:
        """Close both directions. A thread that waits in `send` or `receive` of this end gets an error."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end is closed already
            return

    def close(self) -> None:
        self._end.close()

    def _read(self, length: int, until: float | None) -> bytes:
        received = bytearray()
        while len(received) < length:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            part = self._end.recv(min(length - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

"""The protocol between client and server: MessagePack maps in frames over a stream socket.

    frame    4 bytes, big-endian: the length of the map; then the map, in MessagePack, with the key "kind"
    arrays   {"dtype": numpy's name, "shape": [...], "data": bytes in C order, little-endian}

    client → server    hello     protocol, version (of the model's own weights), adapter, settings: sent first, once
                       generate  rows: each with an `id` that no other row has
                       abort     ids: forget these rows
                       load      call (a number, which the answer `done` repeats), version, tensors: file and place of
                                 each tensor of the whole model
                       sleep, wake, stats    call
                       close
    server → client    ready     protocol, engine, version, device, facts: the answer to hello
                       row       id, tokens, logprobs, versions: a finished response, sent at once
                       broken    id, error: a row that failed alone
                       done      call (the number of the message that is answered), and the fields of the result
                       failed    error: the last message, at the start or later
                       beat      sent once a second from the start by a thread of its own: the process is alive (but
                                 its loop may hang)

Both sides import this file, each in its own Python environment.
"""

from __future__ import annotations

import contextlib
import operator
import socket
import struct
import threading
from typing import Any

import msgpack
import numpy as np

PROTOCOL = 3
"""Version of this protocol. Client and server must have the same one."""
BEAT_S = 1.0
_LENGTH = struct.Struct(">I")
_TIME = struct.Struct("ll")
"""Layout of the system's `timeval`: seconds, microseconds."""
_LARGEST = 1 << 30
"""Maximum bytes of a message. Rows take kilobytes. A larger length can only come from another protocol."""


class ProtocolError(RuntimeError):
    """The other end sent bytes or a message that the protocol does not allow."""


class Channel:
    """Owns one end of the connection. Any thread may send, but only one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._timeout_s: float | None = None

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises OSError if the other side is gone. Also raises the errors of `frame`."""
        self.send_frame(frame(kind, **fields))

    def send_frame(self, message: bytes) -> None:
        """Send a message that `frame` encoded. Raises OSError if the other side is gone."""
        with self._sending:
            self._connection.sendall(message)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None if the other side has closed the connection. Raises TimeoutError if no byte
        arrives for `timeout_s` seconds, and ProtocolError for bytes that are not a message."""
        self._limit(timeout_s)
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > _LARGEST:
            raise ProtocolError(f"a message of {length} bytes: the other side speaks another protocol")
        body = self._exactly(length)
        if body is None:
            return None
        try:
            message = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"{length} bytes that are not MessagePack: {error!r}") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ProtocolError(f"{length} bytes that are not a message")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side has closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _limit(self, timeout_s: float | None) -> None:
        """Set the time limit for receiving only. Python's own could end a `send` in the middle of a message."""
        if timeout_s != self._timeout_s:
            micros = 0 if timeout_s is None else max(1, int(timeout_s * 1e6))  # 0: no limit
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(*divmod(micros, 10**6)))
            self._timeout_s = timeout_s

    def _exactly(self, size: int) -> bytes | None:
        """Return exactly `size` bytes, or None at the end of the stream. Raises TimeoutError if no byte arrives within
        the time limit that `_limit` has set."""
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._connection.recv(min(size - len(parts), 1 << 20))
            except BlockingIOError as error:
                raise TimeoutError from error
            if not part:
                return None
            parts += part
        return bytes(parts)


def frame(kind: str, **fields: Any) -> bytes:
    """Return an encoded message. Integers may be of any type, such as numpy's. Raises TypeError, ValueError or
    OverflowError if MessagePack cannot encode a value."""
    body: bytes = msgpack.packb({"kind": kind, **fields}, default=operator.index)
    return _LENGTH.pack(len(body)) + body


def pack_array(array: np.ndarray) -> dict[str, Any]:
    """Return an encoded array of numbers."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": np.ascontiguousarray(array).tobytes()}


def unpack_array(message: Any) -> np.ndarray:
    """Return the array that `pack_array` encoded. The array is read-only. Raises ProtocolError if `message` is not an
    encoded array."""
    try:
        return np.frombuffer(message["data"], np.dtype(message["dtype"])).reshape(message["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an array: {error}") from error

"""What client and server say to each other: MessagePack maps in frames over a stream socket.

    frame    4 bytes, big-endian: the length of what follows; one MessagePack map with the key "kind"
    arrays   {"dtype": numpy's name, "shape": [...], "data": bytes in C order, little-endian}

    client → server    hello     protocol, adapter, settings: first, once
                       generate  rows: each with an `id` that no other has
                       abort     ids: nobody waits for these rows any more
                       load      call, version, tensors: the file that each lies in, and where; the whole model
                       sleep, wake, stats    call
                       close
    server → client    ready     protocol, engine, version, device, facts: the answer to hello
                       row       id, tokens, logprobs: a finished response, as soon as it is
                       broken    id, error: a row that failed alone
                       done      call, and what it gives
                       failed    error: the last word, at the start or later
                       beat      once a second, by a thread of its own

Both sides import this file, each in its own Python environment. May import the standard library, numpy and msgpack.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

PROTOCOL = 2
"""Of this page; client and server must agree."""
BEAT_S = 1.0
_LENGTH = struct.Struct(">I")
_LARGEST = 1 << 30
"""Bytes: rows are kilobytes. More is another protocol's bytes, taken for a length."""


class ProtocolError(RuntimeError):
    """Bytes that are not this protocol's."""


class Channel:
    """Owns one end of the connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Raises OSError where the other side is gone."""
        body = msgpack.packb({"kind": kind, **fields})
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message; None where the other side has closed. Raises TimeoutError if nothing at all comes for
        `timeout_s`, ProtocolError for what is no message."""
        self._connection.settimeout(timeout_s)
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
            raise ProtocolError(f"{length} bytes that are not MessagePack: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ProtocolError(f"{length} bytes that are not a message")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other side was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, size: int) -> bytes | None:
        """So many bytes, or None at the stream's end."""
        parts = bytearray()
        while len(parts) < size:
            part = self._connection.recv(min(size - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)


def pack_array(array: np.ndarray) -> dict[str, Any]:
    """An array of numbers, as it travels."""
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": np.ascontiguousarray(array).tobytes()}


def unpack_array(message: Mapping[str, Any]) -> np.ndarray:
    """What `pack_array` made; read only. Raises ProtocolError for anything else."""
    try:
        return np.frombuffer(message["data"], np.dtype(message["dtype"])).reshape(message["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"no array: {error}") from error

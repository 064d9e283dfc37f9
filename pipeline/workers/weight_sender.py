"""Send the bytes of a version of the weights to another host. A separate process sends, and `received` receives.

    worker that has the version       its sender, a process               worker that receives
    ───────────────────────────       ────────────────────                ────────────────────
    listening socket ──inherited────► accepts ◄────TLS, one each───────── stripe 0: pieces 0, 4, 8, …
    board, certificate ──input──────► a thread for each connection        stripe 1: pieces 1, 5, 9, …
                                      sends pieces of the board's file ─► … a thread for each connection
                                                                          yields piece 0, 1, 2, …

The worker's interpreter takes no part in sending, so its gang computes no slower meanwhile. A stripe is the part of a
version that one connection carries. Both ends use the run's certificate, as all Dask connections do. The sender ends
when its standard input ends, so at the latest with its worker.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from storage import codec
from storage.errors import MissingOutput
from storage.host import family_of
from storage.weight_copies import OutgoingVersion
from storage.weights import Manifest, WeightBoard

STRIPES = 4
"""Maximum number of connections over which one version is received."""
PIECE_BYTES = 4 << 20
"""Bytes of a piece: a multiple of every system's page size."""
PROGRAM = "pipeline.workers.weight_sender"
"""Module of the sender's process."""
_PIECES_AHEAD = 2
"""Number of pieces of each stripe that the receiver reads ahead of the piece that it yields."""
_LOOK_S = 0.005
"""Seconds between two checks of how much of a growing file is there."""
_IDLE_S = 60.0
"""Seconds without progress after which a sender closes a connection."""
_REQUEST_BYTES = 4096
"""Maximum length of a request, in bytes."""


@dataclass(frozen=True)
class Stripe:
    """A request for one stripe of a version: pieces at equal distances in the version's file."""

    version: int
    digest: str
    """Digest that the version must have."""
    first: int
    """Offset of the first piece in the file."""
    step: int
    """Bytes from the beginning of a piece to the beginning of the next one."""
    piece_bytes: int


# ---- receiving -------------------------------------------------------------------------------------------------


def received(
    sender: tuple[str, int], context: ssl.SSLContext, manifest: Manifest, start: int, timeout_s: float
) -> Generator[memoryview, None, None]:
    """Yield the bytes of a version's file from `start` on, in pieces and in order. A piece is valid until the next one
    is asked for. Raises OSError if the sender is lost or sends nothing for `timeout_s`."""
    total = manifest.file_bytes
    sizes = [min(PIECE_BYTES, total - offset) for offset in range(start, total, PIECE_BYTES)]
    count = min(STRIPES, len(sizes))
    # Reused, because first writes to new memory are slow. There is one more than are read ahead, since the caller still
    # has the last piece.
    buffers = [np.empty(PIECE_BYTES, np.uint8).data for _ in range(min(len(sizes), _PIECES_AHEAD * count + 1))]
    coming: deque[Future[memoryview]] = deque()
    with ExitStack() as stack:
        stripes: list[tuple[ThreadPoolExecutor, ssl.SSLSocket]] = []
        for index in range(count):
            connection = stack.enter_context(socket.create_connection(sender, timeout_s))
            stream = stack.enter_context(context.wrap_socket(connection))
            stripes.append((stack.enter_context(ThreadPoolExecutor(1, "weights-stripe")), stream))
            stack.callback(_end_reads, stream)
            first = start + index * PIECE_BYTES
            stripe = Stripe(manifest.version, manifest.digest, first, count * PIECE_BYTES, PIECE_BYTES)
            stream.sendall(codec.encode(stripe).encode() + b"\n")
        for number in range(len(sizes) + _PIECES_AHEAD * count):
            if number < len(sizes):
                reader, stream = stripes[number % count]
                coming.append(reader.submit(_piece, stream, buffers[number % len(buffers)][: sizes[number]]))
            if number >= _PIECES_AHEAD * count:
                yield coming.popleft().result()


def _piece(stream: ssl.SSLSocket, piece: memoryview) -> memoryview:
    """Fill a buffer with the next bytes of a connection, and return it."""
    left = piece
    while left:
        count = stream.recv_into(left)
        if not count:
            raise ConnectionError("the sender has closed the connection")
        left = left[count:]
    return piece


def _end_reads(stream: ssl.SSLSocket) -> None:
    """Shut a connection down, so that threads stop waiting for its bytes."""
    with suppress(OSError):  # the sender has closed it already
        socket.socket.shutdown(stream, socket.SHUT_RDWR)


# ---- sending ---------------------------------------------------------------------------------------------------


class WeightSender:
    """Owns the process that sends the versions of a board, and the socket on which it listens. The process is started
    when it is first needed, and again if it has ended."""

    def __init__(self, board: str, host: str, certificate: Mapping[str, str]) -> None:
        """`host`: address at which readers of other hosts connect. `certificate`: the texts `ca_file`, `cert` and
        `key`."""
        self._host = host
        self._settings = json.dumps({"board": board, **certificate}).encode() + b"\n"
        self._starting = threading.Lock()
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def address(self) -> tuple[str, int]:
        """Start the sender unless it runs, and return its address. Raises OSError if it cannot be started, or is
        closed."""
        with self._starting:
            if self._closed:
                raise OSError("the sender of weights is closed")
            if self._listener is None:
                self._listener = socket.create_server((self._host, 0), family=family_of(self._host))
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._process = self._start(self._listener.fileno())
            host, port = self._listener.getsockname()[:2]
            return host, port

    def _start(self, listener: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(listener)],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            pass_fds=[listener],
        )
        assert process.stdin is not None
        process.stdin.write(self._settings)
        process.stdin.flush()
        return process

    def _end(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()

    def close(self) -> None:
        with self._starting:
            self._closed = True
            self._end()
            if self._listener is not None:
                self._listener.close()


def serve(listener: socket.socket, board: WeightBoard, context: ssl.SSLContext) -> None:
    """Answer readers, each in a thread of its own. Ends with an OSError when the listener is closed."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, board, context), daemon=True).start()


def _answer(connection: socket.socket, board: WeightBoard, context: ssl.SSLContext) -> None:
    """Send the stripe of a version that a reader on another host asks for. The connection is closed without an answer
    if the reader lacks the run's certificate, or if this host lacks the version. To learn why a version is missing, the
    reader asks a worker over Dask."""
    connection.settimeout(_IDLE_S)
    with suppress(OSError, MissingOutput), connection, context.wrap_socket(connection, server_side=True) as stream:
        with stream.makefile("rb") as requests:
            stripe = codec.decode(Stripe, requests.readline(_REQUEST_BYTES))
        with OutgoingVersion(board, stripe.version, stripe.digest) as outgoing:
            total = outgoing.manifest.file_bytes
            for offset in range(stripe.first, total, stripe.step):
                num_bytes = min(stripe.piece_bytes, total - offset)
                while outgoing.num_ready() < offset + num_bytes:
                    time.sleep(_LOOK_S)
                stream.sendall(outgoing.read(offset, num_bytes))


def serving_context(certificate: Mapping[str, str]) -> ssl.SSLContext:
    """Return the TLS settings of a sender. Readers without the run's certificate are refused, as Dask refuses them."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=certificate["ca_file"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Dask's certificates lack extensions that Python 3.13 asks for
    with tempfile.TemporaryDirectory() as folder:  # Python reads a key only from a file; the folder is private
        cert, key = Path(folder) / "cert", Path(folder) / "key"
        cert.write_text(certificate["cert"])
        key.write_text(certificate["key"])
        context.load_cert_chain(cert, key)
    return context


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_input, name="weights-sender-end", daemon=True).start()
    serve(socket.socket(fileno=int(sys.argv[1])), WeightBoard(settings["board"]), serving_context(settings))


def _end_with_input() -> None:
    sys.stdin.buffer.read()  # returns when the worker has ended, or has closed the pipe
    os._exit(0)


if __name__ == "__main__":
    main()

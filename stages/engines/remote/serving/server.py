"""The server process: it runs an engine of another project, in that project's Python environment.

    beat thread   ──once a second, from the start───────────────────────────────────────► socket
    reader thread ──messages──► loop.py: rows in, a token for each, finished rows out ──► socket

`process.py` starts the server as `python -m stages.engines.remote.serving.server FD`. FD is the server's end of a
socket pair, so nobody else can connect. The server ends when the client closes the other end. If the server is stuck,
`guard.py` ends it. The server's output goes to a log file.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from stages.engines.remote.wire import BEAT_S, Channel


def _beat(channel: Channel, closed: threading.Event) -> None:
    while not closed.wait(BEAT_S):
        try:
            channel.send("beat")
        except OSError:
            return


def _read(channel: Channel, messages: queue.SimpleQueue[dict[str, Any] | Exception | None]) -> None:
    message: dict[str, Any] | Exception | None = {}
    while isinstance(message, dict):
        try:
            message = channel.receive()
        except OSError:
            message = None
        except Exception as error:  # the loop raises it
            message = error
        messages.put(message)


def main(descriptor: int) -> int:
    """Serve until the client closes its end of the socket pair. `descriptor`: the server's end. Return the exit status,
    which is 1 if the engine could not start or has failed."""
    for of_terminal in (
        signal.SIGINT,
        signal.SIGHUP,
    ):  # the terminal sends them to all its processes; the driver ends the run
        signal.signal(of_terminal, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    closed = threading.Event()
    threading.Thread(target=_beat, args=(channel, closed), daemon=True).start()
    try:
        hello = channel.receive()
        if hello is not None:
            loop = importlib.import_module("stages.engines.remote.serving.loop")  # imports torch, which takes seconds
            messages: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
            threading.Thread(target=_read, args=(channel, messages), daemon=True).start()
            loop.serve(channel, hello, messages)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the client has gone
    except BaseException as error:  # report any error to the client; the log has the traceback
        traceback.print_exc()
        channel.send("failed", error=f"{type(error).__name__}: {error}")
        return 1
    finally:
        closed.set()
        channel.close()
    return 0


if __name__ == "__main__":
    # Exit without waiting for the engine's threads and exit handlers: there is nothing to save.
    sys.stderr.flush()
    status = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

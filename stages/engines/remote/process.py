"""The server's process: started in another Python environment, watched, ended.

May import the standard library and remote.wire.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import stages
from stages.engines.remote.wire import Channel

LAST_LINES = 15
"""Of the server's log, in an error."""
_END_S = 10.0
"""For a process to end that has closed its connection."""
_SERVER = "stages.engines.remote.serving.server"
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


class ServerProcess:
    """Owns the process, our end of the connection to it, and its log."""

    def __init__(self, python: str, log: Path | None, modules: Path | None = None) -> None:
        """`python`: the other environment's interpreter. `log`: where what it prints is appended; None: a file that is
        removed in the end. `modules`: a folder that adapters of one's own are imported from. Raises OSError, naming
        `python`, where it cannot be run."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-engine-")))
            # Of this project `stages` alone, not what happens to be installed beside it here.
            (folder / "stages").symlink_to(Path(stages.__file__).parent)
            path = [str(folder), *([str(modules)] if modules is not None else [])]
            self._log = log or folder / "log"
            output: IO[bytes] = stack.enter_context(self._log.open("ab"))
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            with theirs:
                kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
                self.process = subprocess.Popen(
                    [python, "-u", "-m", _SERVER, str(theirs.fileno()), str(os.getpid())],
                    env=kept | {"PYTHONPATH": os.pathsep.join(path)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that what it starts is ended with it
                )
            self.channel = Channel(ours)
            self._closed = False
            self._stack = stack.pop_all()

    def last_lines(self) -> str:
        """Of what it printed, indented, for an error's text."""
        try:
            with self._log.open(encoding="utf8", errors="replace") as lines:
                return "".join(f"\n    {line.rstrip()}" for line in deque(lines, LAST_LINES))
        except OSError:
            return ""

    def how_it_ended(self) -> str:
        """Its exit status, once it has closed the connection."""
        try:
            return f"with status {self.process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            return "its connection, and goes on"

    def close(self) -> None:
        """Ends it at once, with all that it started; its memory is free when this returns. Twice is harmless."""
        if not self._closed:
            with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
                os.killpg(self.process.pid, signal.SIGKILL)  # also where it has ended itself: its ranks may go on
        self._closed = True
        self.process.wait()
        self.channel.close()
        self._stack.close()

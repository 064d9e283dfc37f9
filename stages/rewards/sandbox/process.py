"""The worker's side of a sandbox, for users' own rewards and for scorers that may evaluate text. A sandbox is a
confined process that answers messages. Its other side is inside.py.

worker                                                    sandbox
  settings ─────────────────────────────────────────────► confine, and load the function that answers
           ◄───────────────────── protections in force ──
  message  ─────────────────────────────────────────────► call the function
           ◄─────────────────────────── the answer ──────

A time limit, a call of `close`, or any end of the worker kills all processes in the sandbox.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.rewards.sandbox.channel import SandboxChannel

START_S = 120.0
"""Time limit in seconds for the start of a sandbox's process. The same limit applies again to the import of the code,
which may load a model. For a user's own reward, the import may take as long as the reward's `timeout_s` if that is
longer."""
USED = ("landlock", "namespaces", "seccomp")
"""Features of the kernel that a sandbox uses if they exist."""
PROTECTIONS = ("files", "network", "processes")
"""Targets that a sandbox can protect: files other than its own, the network, and other processes (memory, keys,
signals)."""
_ROOT = Path(__file__).resolve().parents[3]
_NOTICE_S = 30.0
"""Maximum number of seconds to wait for the end of a process after its channel broke or after it was killed."""
_TIDY_S = 10.0
"""Seconds between the two signals that end a sandbox. SIGTERM asks the keeper of the sandbox (inside.py) to kill all
processes of the sandbox. If the keeper is still running after this time, SIGKILL ends it."""
_PASSED_ON = frozenset(
    (
        "CONDA_PREFIX", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HOME", "HUGGINGFACE_HUB_CACHE", "LANG",
        "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "NLTK_DATA", "PATH", "PYTHONHASHSEED", "SHELL", "SSL_CERT_DIR",
        "SSL_CERT_FILE", "TOKENIZERS_PARALLELISM", "TORCH_HOME", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TZ",
        "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME",
    )
)  # fmt: skip
_PASSED_ON_BEGINNINGS = ("GOMP_", "KMP_", "LC_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_")
"""Environment variables that every sandbox gets. `_PASSED_ON` has names, and `_PASSED_ON_BEGINNINGS` has the beginnings
of further names. None of these variables holds a secret."""


class SandboxEnded(Exception):
    """The process ended, or was ended, before it answered."""


class SandboxExpired(Exception):
    """The process exceeded its time limit, and was killed."""


@dataclass(frozen=True)
class Confinement:
    """Permissions of a sandbox."""

    answers: bool = False
    """True if the sandbox evaluates text that a model sampled. It may then write nothing, and read only the files of
    the system's programs, of Python and of this project's code."""
    network: bool = False
    environment: tuple[str, ...] = ()
    """Further environment variables that the sandbox gets."""
    writes: tuple[str, ...] = ()
    """Files and folders that the sandbox may write, besides a scratch folder of its own."""
    hidden: tuple[str, ...] = ()
    """Folders that look empty in the sandbox, if the host allows namespaces."""


class Sandbox:
    """A confined process that answers messages. One thread at a time may call `ask`; any thread may call `close`."""

    def __init__(self, serve: str, start: Mapping[str, Any], confinement: Confinement) -> None:
        """Start the process. `serve`: `module:name` of a function that the sandbox calls with a `SandboxChannel` and
        `start`. Raises SandboxEnded and SandboxExpired, as `restart` does."""
        self._serve, self._start, self._confinement = serve, start, confinement
        self._child: _Child | None = None
        self._closed = False
        self.protections: Mapping[str, str | None] = {}
        """Target (each of PROTECTIONS) -> the mechanism that protects it, or None if it is not protected."""
        self.restart()

    def restart(self) -> None:
        """End the process, if there is one, and start another.

        Raises:
            SandboxEnded: this sandbox has been closed, or the new process ended before it was ready.
            SandboxExpired: the new process was not ready within `START_S`."""
        if self._child is not None:
            self._child.end()
        if self._closed:
            raise SandboxEnded("it has been closed")
        self._child = _Child(self._confinement)
        if self._closed:  # by another thread, meanwhile
            self._child.end()  # type: ignore[unreachable]
        confinement = self._confinement
        order = {
            "serve": self._serve,
            "start": self._start,
            "root": str(_ROOT),
            "answers": confinement.answers,
            "network": confinement.network,
            "writes": [*confinement.writes, *(_caches() if confinement.network else ())],
            "hidden": confinement.hidden,
            "use": USED,
        }
        self.protections = self.ask(order, START_S)

    def ask(self, message: Any, limit_s: float) -> Any:
        """Send a message and return the answer. If the message is None, send nothing and wait for the next answer.

        Raises:
            SandboxExpired: no answer came within `limit_s`; the process and its children have been killed.
            SandboxEnded: the process ended, or was killed because it sent something that is not a message.
        """
        child = self._child
        assert child is not None
        try:
            if message is not None:
                child.channel.send(message, limit_s)
            return child.channel.receive(limit_s)
        except TimeoutError:
            child.end()
            raise SandboxExpired from None
        except ValueError as error:
            child.end()
            raise SandboxEnded(f"what its process answered is no message ({error})") from None
        except (EOFError, OSError):
            raise SandboxEnded(child.describe_end()) from None

    def close(self) -> None:
        """Kill the process and all that it started. A second call does nothing."""
        self._closed = True
        if self._child is not None:
            self._child.end()


class _Child:
    """The keeper of a sandbox (inside.py), and a thread that starts the keeper, waits for it and reaps it. Linux ends
    the keeper when this thread ends, so no process is left behind, however the worker ends."""

    def __init__(self, confinement: Confinement) -> None:
        ours, theirs = socket.socketpair()
        self.channel = SandboxChannel(ours)
        self.process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(theirs, confinement), name="sandbox", daemon=True)
        self._thread.start()
        self._started.wait()

    def describe_end(self) -> str:
        """Return a text that says how the process ended, or that it does not answer."""
        self._thread.join(_NOTICE_S)
        code = None if self.process is None else self.process.poll()
        if code is None:
            return "its process does not answer"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"its process {how}"

    def end(self) -> None:
        self.channel.shut_down()
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # the keeper may have been stopped
            self._thread.join(_TIDY_S)
            process.kill()
        self._thread.join(_NOTICE_S)

    def _keep(self, theirs: socket.socket, confinement: Confinement) -> None:
        module = ["-m", "stages.rewards.sandbox.inside", str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, *(["-P"] if confinement.answers else []), *module],
                env=_environment(confinement),
                cwd="/" if confinement.answers else None,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
            self._started.set()
        self.process.wait()
        self.channel.shut_down()


def _environment(confinement: Confinement) -> dict[str, str]:
    """Return the environment of a sandbox: the variables that every sandbox gets, the variables that `confinement`
    names, and settings of Python and of libraries."""
    names = {n for n in os.environ if n in _PASSED_ON or n.startswith(_PASSED_ON_BEGINNINGS)}
    environment = {name: os.environ[name] for name in sorted(names | {*confinement.environment}) if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
    if confinement.answers:  # the same score in every process; no threads, since a fork loses them
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return environment


def _caches() -> list[str]:
    """Return the folders of Hugging Face's downloads. A sandbox with network access may write there."""
    home = os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
    return [home, *(os.environ[name] for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if name in os.environ)]

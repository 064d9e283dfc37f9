"""A reward that a user wrote, in a process of its own: `module:function` or `module:Class`.

    worker                                             child (user_main.py)
      start ──kind, args──────────────────────────────► import, look at the arguments ──► ready | refused
      batch ──samples, as JSON────────────────────────► call ──► numbers | what it raised, of which row
      close, or this process ends (however) ──────────► ends

Whatever the function does (crash, hang, fill its memory) is an error of its batch, which names rows; the worker goes
on. A child that was ended from outside is started once more for the same batch: scoring changes nothing.

May import stages.rewards.protocol and the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from stages.rewards.protocol import RewardFailed, Sample, Scored

START_S = 120.0
"""For the child to start and import the user's module, which may load a model; more where a batch may take longer."""
_ROOT = Path(__file__).resolve().parents[2]
_NOTICE_S = 30.0
"""For the end of a process to be noticed, after its pipe broke."""


class _ChildEnded(Exception):
    """The child ended, or was ended, before it answered."""


class UserReward:
    """Owns the process that a user's function runs in."""

    def __init__(self, kind: str, args: dict[str, Any], timeout_s: float) -> None:
        """Starts it and waits until the function is there. `refusal` says what keeps it from being used."""
        self._kind, self._args, self._timeout_s = kind, args, timeout_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.refusal: tuple[str, str] | None = None
        """("kind" or "args", what is wrong with it and what would work)."""
        self.deterministic = True
        self.batch_tokens: int | None = None
        with self._lock:
            self._start()

    def __call__(self, samples: Sequence[Sample]) -> list[float] | Scored:
        """What the function gives. Raises RewardFailed, naming rows."""
        request = json.dumps({"samples": [vars(sample) for sample in samples]}, default=str).encode()
        with self._lock:
            try:
                answer = self._ask(request, self._timeout_s)
            except _ChildEnded as first:
                self._start()
                if self.refusal is not None:
                    raise RewardFailed(f"{self._kind}: {first}, and then: {self.refusal[1]}") from None
                try:
                    answer = self._ask(request, self._timeout_s)
                except _ChildEnded as second:
                    raise RewardFailed(f"{self._kind}: {second}, {self._rows(samples)}; before that, {first}") from None
        if answer is None:
            need = f"took longer than {self._timeout_s:g} s (timeout_s of its part), {self._rows(samples)}"
            raise RewardFailed(f"{self._kind} {need}: its process was ended")
        if "error" in answer:
            where = answer["row"]
            raise RewardFailed(
                f"{self._kind} raised {answer['error']}, "
                + (self._rows(samples) if where is None else self._rows([samples[where]]))
                + f"\n{answer['traceback']}"
            )
        if "parts" not in answer:
            return list(answer["scores"])
        return Scored(answer["parts"], answer["disagreement"], answer.get("measured", {}))

    def close(self) -> None:
        """Ends the process, in the middle of whatever it does. Twice is harmless."""
        child = self._child
        if child is not None:
            child.end()

    def _start(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = _Child()
        start = json.dumps({"kind": self._kind, "args": self._args}, default=str).encode()
        limit_s = max(START_S, self._timeout_s)
        try:
            answer = self._ask(start, limit_s)
        except _ChildEnded as error:
            self.refusal = ("kind", f"its process did not get as far as the function: {error}")
            return
        if answer is None:
            self.refusal = ("kind", f"its module was not imported within {limit_s:g} s")
        elif "refused" in answer:
            self.refusal = (answer["refused"], answer["need"])
            self._child.end()
        else:
            self.deterministic, self.batch_tokens = answer["deterministic"], answer["batch_tokens"]

    def _ask(self, request: bytes, limit_s: float) -> Mapping[str, Any] | None:
        """The child's answer; None where it took longer than the limit, and was ended. Raises _ChildEnded."""
        child = self._child
        assert child is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            child.end()

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            child.pipe.send_bytes(request)
            answer: Mapping[str, Any] = json.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            if expired.is_set():
                return None
            raise _ChildEnded(child.how_it_ended()) from None
        finally:
            timer.cancel()
        return answer

    @staticmethod
    def _rows(samples: Sequence[Sample]) -> str:
        """For a person: which rows a batch had."""
        first = samples[0]
        if len(samples) == 1:
            return f"row {first.row} (prompt {first.prompt[:60]!r}, response {first.response[:60]!r})"
        return f"rows {first.row} to {samples[-1].row} (a batch of {len(samples)})"


class _Child:
    """Owns a child process, and a thread that starts it, waits for it and reaps it: Linux ends the child with that
    thread, so nothing is left behind whatever happens to this process."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(theirs,), name="user-reward", daemon=True)
        self._thread.start()
        self._started.wait()

    def how_it_ended(self) -> str:
        """For a person, once it has."""
        self._thread.join(_NOTICE_S)
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "its process does not answer"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"its process {how}"

    def end(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self._thread.join(_NOTICE_S)

    def _keep(self, theirs: Connection) -> None:
        try:
            path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stages.rewards.user_main", str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
            self._started.set()
        self._process.wait()

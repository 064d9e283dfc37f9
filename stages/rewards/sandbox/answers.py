"""Score sampled text with code that may evaluate it, one answer at a time.

    worker            sandbox: the scorer, loaded once            its fork, with fewer rights
      ask ──fields──►   may the answer run code?
                          no: the fork that such answers share ──►  prepare the problem, score the answer
                          yes: a fork of its own ────────────────►  the same, then end
      ◄───score, or why it was stopped────────────────────────────  a single number

Each answer that may run code gets a new fork of the freshly loaded scorer, so it cannot change the scorer for later
answers. It can forge its own score, up to 1, because it is evaluated in the process that scores it.
"""

from __future__ import annotations

import gc
import math
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from stages.rewards.protocol import RewardFailed
from stages.rewards.sandbox import kernel
from stages.rewards.sandbox.channel import SandboxChannel
from stages.rewards.sandbox.inside import resolve
from stages.rewards.sandbox.process import PROTECTIONS, START_S, Confinement, Sandbox, SandboxEnded, SandboxExpired

ANSWER_S = 10.0
"""Default time limit of one answer, in seconds."""
STOPPED = "stopped"
"""Name of a number that is stored beside each score: 1 if the answer was stopped before it had a valid score, else
0."""
_MEMORY_BYTES = 2 << 30
"""Maximum address space of a process that scores an answer."""
_LONGEST_S = START_S + 10.0
"""Seconds that the worker waits beyond an answer's time limit, for the preparation and the reply. The sandbox itself
stops a slow answer."""
_LONGEST_REASON = 300
_LONGEST_REPLY_BYTES = 1 << 16
_SLOW = "it took too long"
_STRING = re.compile(r"['\"]|__|\.\s*[^\W\d]")
"""Matches the parts of an expression that may be strings: a literal, a name such as `__doc__`, an attribute."""


class UnconfinedAnswers(Exception):
    """This host cannot confine text that is evaluated. The message names the missing protections."""


class AnswerScorer:
    """Scores answers in a sandbox, which it owns. Call the object to score a batch. Thread-safe: one answer is scored
    at a time."""

    def __init__(self, make: str, args: Mapping[str, Any], timeout_s: float, *, trust: bool = True) -> None:
        """Start the process. `make`: `module:name` of a function that is called with `args` in the sandbox and returns
        an `AnswerScoring`. `timeout_s`: limit of one answer's wall time and processor time. Raises ValueError if
        `timeout_s` is not above 0 or if the process does not start. Raises UnconfinedAnswers if this host lacks a
        protection, unless `trust` is true."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s:g}: must be above 0")
        start = {"make": make, "args": args, "timeout_s": timeout_s}
        self._lock = threading.Lock()
        self._timeout_s, self._loaded, self._lost = timeout_s, False, False
        try:
            self._sandbox = Sandbox(f"{__name__}:serve", start, Confinement(answers=True))
        except (SandboxEnded, SandboxExpired) as error:
            raise ValueError(f"the process that scores answers did not start: {str(error) or _SLOW}") from error
        self.protections = self._sandbox.protections
        missing = [name for name in PROTECTIONS if self.protections[name] is None]
        if missing and not trust:
            self.close()
            raise UnconfinedAnswers(f"this host cannot keep an answer that is evaluated from {', '.join(missing)}")

    def __call__(self, answers: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        """Return the answers' scores (0 for a stopped answer), and one flag per answer: 1 if it was stopped, else 0.
        `answers`: for each answer, the fields that the `AnswerScoring` needs, and its number `row` for messages. Raises
        RewardFailed if a problem could not be prepared, or if the process that scores did not start again."""
        scores, stopped = [0.0] * len(answers), [0.0] * len(answers)
        first = ""
        for row, fields in enumerate(answers):
            with self._lock:
                reply = self._reply(fields)
            if "error" in reply:
                raise RewardFailed(reply["error"])
            if "stopped" in reply:
                stopped[row], first = 1.0, first or f"row {fields['row']} {reply['stopped']}"
            else:
                scores[row] = reply["score"]
        if first:
            count = f"{int(sum(stopped))} of {len(answers)} answers"
            print(f"{count} were stopped and count as wrong; the first: {first}", file=sys.stderr, flush=True)
        return scores, stopped

    def close(self) -> None:
        self._sandbox.close()

    def _reply(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sandbox's reply to the fields of one answer. If the answer ends the whole sandbox, the reply says
        that the answer was stopped, and the next call restarts the sandbox. Raises RewardFailed if the sandbox does not
        start."""
        try:
            if self._lost:
                self._sandbox.restart()
                self._lost = self._loaded = False
            if not self._loaded:
                self._sandbox.ask(None, START_S)
                self._loaded = True
        except (SandboxEnded, SandboxExpired) as error:
            self._lost = True
            raise RewardFailed(f"the process that scores answers did not start: {str(error) or _SLOW}") from error
        try:
            answer: Mapping[str, Any] = self._sandbox.ask(fields, self._timeout_s + _LONGEST_S)
        except (SandboxEnded, SandboxExpired) as error:
            self._lost = True
            return {"stopped": f"ended the process that scored it: {str(error) or _SLOW}"}
        return answer


class AnswerScoring(Protocol):
    """The scorer that a sandbox loads."""

    def text_to_evaluate(self, fields: Mapping[str, Any]) -> str:
        """Return the text that the scorer may evaluate as code; "" if it evaluates nothing."""
        ...

    def prepare(self, fields: Mapping[str, Any]) -> Callable[[], float]:
        """Return a function that scores the answer from 0 to 1. If `prepare` raises an error, the call of the
        `AnswerScorer` fails with RewardFailed. If the returned function raises an error, the answer gets score 0 and
        counts as stopped."""
        ...


def serve(channel: SandboxChannel, start: Mapping[str, Any]) -> None:
    """Score the answers that come over the channel, in forks of this process."""
    scorer: AnswerScoring = resolve(start["make"])(**start["args"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # output of evaluated text does not go to the log
        os.dup2(nowhere, output)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that holds an object
    channel.send({})
    shared: _Fork | None = None
    while True:
        fields = channel.receive()
        alone = may_run_code(scorer.text_to_evaluate(fields))
        if alone:
            with suppress(Exception):  # the fork reports what is wrong
                scorer.prepare(fields)  # the scorer caches the problem here, for all forks
        fork = shared if shared is not None and not alone else _Fork(scorer, start["timeout_s"])
        reply = fork.ask(fields)
        channel.send(reply)  # the worker sends the next answer while this fork ends
        done = alone or "score" not in reply
        if done:
            fork.end()
        if not alone:
            shared = None if done else fork


def may_run_code(text: str) -> bool:
    """Return True if Python's `eval` of a text could change anything. A change needs a call or an assignment (in an
    expression: `:=` or a comprehension), and both need a name. Return True also if the text can compose a string,
    because the result may be evaluated again (sympy does that)."""
    if not any(c.isalpha() or c == "_" for c in text):
        return False
    if "(" in text or ":=" in text or ("for" in text and ("[" in text or "{" in text)):
        return True
    return _STRING.search(text) is not None and any(c in text for c in "\\%[{")


class _Fork:
    """A fork of this process that scores answers."""

    def __init__(self, scorer: AnswerScoring, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            _score_all(scorer, theirs, timeout_s)
        theirs.close()
        self._channel = SandboxChannel(ours)

    def ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Score one answer. Return a dictionary with one key: `score`, or `stopped` (why the answer has no valid
        score), or `error` (why the problem could not be prepared)."""
        try:
            self._channel.send(fields, START_S)
            first = self._channel.receive(START_S)  # sent before the answer is evaluated
        except (TimeoutError, EOFError, OSError) as error:
            return {"error": f"row {fields['row']}: its problem could not be made: {_one_line(error)}"}
        if first:
            return {"error": f"row {fields['row']}: {first}"}
        try:
            number = self._channel.receive(self._timeout_s, _LONGEST_REPLY_BYTES)
        except TimeoutError:
            return {"stopped": f"took longer than {self._timeout_s:g} s"}
        except (EOFError, OSError):
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            return {"stopped": f"was ended by {signal.Signals(-code).name}" if code < 0 else "ended its process"}
        except ValueError:
            return {"stopped": "wrote over its score"}
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            return {"stopped": f"came to {ascii(number)[:_LONGEST_REASON]}: not a score from 0 to 1"}
        return {"score": number}

    def end(self) -> None:
        self._channel.close()
        with suppress(ProcessLookupError, ChildProcessError):  # `ask` has waited for it
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _score_all(scorer: AnswerScoring, end: socket.socket, timeout_s: float) -> NoReturn:
    """Score the answers that come over the socket until it is closed, then end this process."""
    os.setsid()
    os.dup2(end.fileno(), 3)
    os.closerange(4, 1 << 16)
    channel = SandboxChannel(socket.socket(fileno=3))
    for what, value in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(what, (value, value))
    if kernel.can_filter_calls():
        kernel.filter_calls(network=False, answers=True)
    with suppress(EOFError, OSError):
        while True:
            fields = channel.receive()
            try:
                score = scorer.prepare(fields)
            except Exception as error:  # any exception of a task's own code; the worker reports it
                channel.send(str(error) if isinstance(error, RewardFailed) else _one_line(error))
                continue
            channel.send("")
            seconds = math.ceil(time.process_time() + timeout_s)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            random.seed(0)  # a scorer may use random numbers
            try:
                answer: float | str = float(score())
            except BaseException as error:  # text may raise anything, SystemExit included
                answer = f"a raised {_one_line(error)}"
            channel.send(answer[:_LONGEST_REASON] if isinstance(answer, str) else answer)
    os._exit(0)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

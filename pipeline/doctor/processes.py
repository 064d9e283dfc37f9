"""Programs that the doctor's tests run in processes of their own. They start together, write result files, and are
killed at a deadline.

test ──► a program per rank or device ──► each writes its results to a file ──► the test compares them
                 └── fails, or is still running at the deadline ──► Fault, with the output of each program
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.doctor.runner import Fault

MAX_OUTPUT_CHARS = 4000
"""Number of characters of a program's output that the report contains, counted from its end."""
_FRAME = re.compile(r'\s*File ".*", line \d+')
"""Pattern of a line of a traceback. The last such line shows which library is broken."""
_STACK_DUMP_S = 5.0
"""Seconds for a hanging program to print the stacks of its threads."""


@dataclass(frozen=True)
class Program:
    """A Python program that a test runs."""

    label: str
    """Name of the program in the report, such as "rank 1 of 2"."""
    arguments: Sequence[str]
    """Arguments of the Python interpreter."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""


def run_together(programs: Sequence[Program], deadline_s: float, advice: str) -> None:
    """Run programs at the same time until all have ended, one has failed, or the deadline has passed.

    When the call returns or raises, all programs and all processes in their sessions have ended.

    Raises:
        Fault: a program failed, or was still running after `deadline_s`. Its facts have the output of every program."""
    with tempfile.TemporaryDirectory(prefix="stageline-doctor-") as folder, contextlib.ExitStack() as stack:
        logs = [Path(folder, f"{index}.log") for index in range(len(programs))]
        running = []
        for program, log in zip(programs, logs, strict=True):
            process = _start(program, log)
            stack.callback(_end, process)
            running.append(process)
        until = time.monotonic() + deadline_s
        while any(process.poll() is None for process in running) and not any(process.poll() for process in running):
            if time.monotonic() > until:
                raise _deadline_fault(programs, running, logs, deadline_s)
            time.sleep(0.05)
        for program, process, log in zip(programs, running, logs, strict=True):
            if process.poll():
                lines = _lines(log) or ["it printed nothing"]
                frames = [line.strip() for line in lines if _FRAME.match(line)]
                where = f" ({frames[-1]})" if frames else ""
                cause = f"{program.label} ended with {process.returncode}: {lines[-1]}{where}"
                raise Fault(cause, advice, outputs=_outputs(programs, logs))


def _start(program: Program, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **program.environment}
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, *program.arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _deadline_fault(
    programs: Sequence[Program], running: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline_s: float
) -> Fault:
    """Return the fault about programs that are still running. Before that, make each of them print the stacks of its
    threads."""
    hanging = [index for index, process in enumerate(running) if process.poll() is None]
    last_lines = {index: _lines(logs[index])[-1:] for index in hanging}
    for index in hanging:
        running[index].send_signal(signal.SIGABRT)
    for index in hanging:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[index].wait(timeout=_STACK_DUMP_S)
    who = "; ".join(" at ".join([programs[index].label, *last_lines[index]]) for index in hanging)
    advice = "the JSON report has the place where each of its threads waits. A slow machine: --deadline SECONDS"
    return Fault(f"no end after {deadline_s:g} s: {who}", advice, outputs=_outputs(programs, logs))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all processes in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process of the session is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()


def _outputs(programs: Sequence[Program], logs: Sequence[Path]) -> dict[str, str]:
    pairs = zip(programs, logs, strict=True)
    return {program.label: log.read_text(errors="replace")[-MAX_OUTPUT_CHARS:] for program, log in pairs}

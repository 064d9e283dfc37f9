"""Tests of a machine, in the order in which the faults of the machine would stop a Stageline run.

    test ──► Finding (measured)         ──► the next test
         ├─► NotApplicable  (not on this machine) ──► the next test
         └─► Fault   (cause, what to do)   ──► stop

Each test assumes that the earlier tests have passed, so only the first fault is meaningful.
"""

from __future__ import annotations

import importlib
import platform
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil


class Status(StrEnum):
    """The status of a test."""

    OK = "ok"
    ABSENT = "not on this machine"
    FAULT = "fault"
    NOT_REACHED = "not reached"


class NotApplicable(Exception):
    """The machine does not have the part that a test is about. The message names the missing part."""


class Fault(Exception):
    """A test found a fault. `cause` describes the fault, and `advice` how to repair it."""

    def __init__(self, cause: str, advice: str, **facts: Any) -> None:
        super().__init__(cause)
        self.cause, self.advice, self.facts = cause, advice, facts


@dataclass(frozen=True)
class Finding:
    """The measurements of a test that found no fault."""

    text: str
    """The result as one line of text."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Name -> measurement. Names contain the unit, and measurements can be written as JSON."""


@dataclass(frozen=True)
class DoctorSettings:
    """Settings of all tests."""

    runs_dir: Path
    """Directory in which runs would be stored."""
    scratch: Path
    """Directory for files of the tests, on the same file system as `runs_dir`."""
    model: str = "random:tiny"
    """Model with which the tests compute."""
    threads: int = 1
    """Number of threads of each computing process."""
    deadline_s: float = 600.0
    """Seconds after which the processes of a test are killed."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """`engine.kind` -> Python interpreter, for engines that have an environment of their own."""


@dataclass(frozen=True)
class DoctorTest:
    """One test of a machine."""

    name: str
    title: str
    """Description of the test in a few words."""
    test: Callable[[DoctorSettings], Finding]
    """The function that runs the test. It raises NotApplicable or Fault if the test does not succeed."""


@dataclass(frozen=True)
class DoctorResult:
    """The outcome of a test."""

    name: str
    title: str
    status: Status
    text: str
    """The measurement, the missing part, or the cause of the fault, depending on the status. Empty if the test was not
    reached."""
    advice: str = ""
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def load_lazily(test_path: str) -> Callable[[DoctorSettings], Finding]:
    """Return a function that runs the test `module:function` of this package.

    The module is imported when the test runs. A broken library is therefore reported by the first test that needs
    it."""
    module, _, name = test_path.partition(":")

    def test(settings: DoctorSettings) -> Finding:
        loaded: Callable[[DoctorSettings], Finding] = getattr(
            importlib.import_module(f"pipeline.doctor.{module}"), name
        )
        return loaded(settings)

    return test


def run_tests(
    tests: Sequence[DoctorTest], settings: DoctorSettings, show: Callable[[DoctorResult], None] = lambda result: None
) -> list[DoctorResult]:
    """Run the tests in order until one finds a fault. Return all results. Tests after a fault are not run, and their
    status is NOT_REACHED. `show` is called with each result."""
    results: list[DoctorResult] = []
    for test in tests:
        if results and results[-1].status in (Status.FAULT, Status.NOT_REACHED):
            result = DoctorResult(test.name, test.title, Status.NOT_REACHED, "")
        else:
            result = _run_test(test, settings)
        results.append(result)
        show(result)
    return results


def _run_test(test: DoctorTest, settings: DoctorSettings) -> DoctorResult:
    began = time.monotonic()
    try:
        finding = test.test(settings)
        outcome: tuple[Status, str, str, Mapping[str, Any]] = (Status.OK, finding.text, "", finding.facts)
    except NotApplicable as error:
        outcome = Status.ABSENT, str(error), "", {}
    except Fault as error:
        outcome = Status.FAULT, error.cause, error.advice, error.facts
    except Exception as error:  # a library may raise any error on an unknown machine
        cause = f"{type(error).__name__}: {error}"
        advice = "Stageline does not know this fault. Send the JSON report, which has the whole traceback"
        outcome = Status.FAULT, cause, advice, {"traceback": traceback.format_exc()}
    status, text, advice, facts = outcome
    return DoctorResult(test.name, test.title, status, text, advice, time.monotonic() - began, facts)


# ---- report ----------------------------------------------------------------------------------------------


def machine_facts() -> dict[str, Any]:
    """Return the facts about the machine with which a report begins."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def result_text(result: DoctorResult) -> str:
    """Return a result as text for the report. If the test found a fault, a second line has the advice."""
    mark = {Status.OK: "ok", Status.ABSENT: "--", Status.FAULT: "FAULT", Status.NOT_REACHED: "  "}[result.status]
    absent, not_reached = f"not on this machine: {result.text}", f"not reached: {result.title}"
    text = {Status.ABSENT: absent, Status.NOT_REACHED: not_reached}.get(result.status, result.text)
    shown = f"{mark:5} {result.name:16} {text}".replace("\n", "\n      ")
    return f"{shown}\n      what to do: {result.advice}" if result.advice else shown


def conclusion_line(results: Sequence[DoctorResult]) -> str:
    """Return the last line of the report: the fault, or the number of tests without a fault."""
    seconds = sum(result.seconds for result in results)
    fault = next((result for result in results if result.status is Status.FAULT), None)
    if fault is not None:
        return f"stopped at {fault.name} ({fault.title}) after {seconds:.0f} s"
    absent = sum(result.status is Status.ABSENT for result in results)
    return f"no fault in {len(results) - absent} tests ({absent} are not for this machine), {seconds:.0f} s"

"""Leftovers of ends that the run cannot choose: its terminal is closed, or all its processes are killed at once. The
tests look at shared memory by the run's own names, since other tests use it too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.journal import EventKind, read_events
from pipeline.workers.attached import board_of_host
from tests.support.leaks import mapped_names
from tests.support.paths import ROOT
from tests.support.runs import QUIET, arguments, configure, finish_in
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.processes

IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def in_terminal(*command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Python command as the leader of a terminal's session; and the descriptor of who looks at that terminal."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    driver = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield driver, ours
    finally:
        driver.kill()
        driver.wait()


def has_published(config: RunConfig, driver: subprocess.Popen[bytes], terminal: int | None = None) -> bool:
    """Return True if the run's board has weights that an update has made."""
    with suppress(BlockingIOError):
        if terminal is not None:
            os.read(terminal, 1 << 16)  # a driver whose terminal is full waits
    assert driver.poll() is None, "the run ended too early"
    paths = RunPaths(config.run_dir)
    finished = (e for e in (read_events(paths.events) if paths.events.exists() else ()) if e.kind is EventKind.FINISHED)
    return any(e.stage == "publish" and e.step > 0 for e in finished)


def in_shared_memory(config: RunConfig) -> list[Path]:
    board = RunPaths(config.run_dir).board(None)
    return sorted(board.parent.glob(f"{board.name}*"))


def named_semaphores(processes: list[psutil.Process]) -> set[str]:
    """Return the semaphores in shared memory that processes use. They would stay if the processes were killed."""
    return {name for one in processes for name in mapped_names(str(one.pid)) if name.startswith("sem.")}


def digests(config: RunConfig) -> list[str | None]:
    return [commit.digest for commit in open_history(config).ledger.list("update_policy")]


def test_a_closed_terminal_ends_a_run_as_ctrl_c_does(folder: Path) -> None:
    """While the run lives, another run that starts does not take its board, and none of its processes has a named
    semaphore."""
    config = configure(folder, "hung-up", *QUIET, "steps=40")
    with in_terminal("-m", "pipeline.cli", "run", *arguments(folder, "hung-up", *QUIET, "steps=40")) as (
        driver,
        terminal,
    ):
        until(lambda: has_published(config, driver, terminal), "a publication")
        processes = psutil.Process(driver.pid).children(recursive=True)
        assert named_semaphores([psutil.Process(driver.pid), *processes]) == set()
        board = RunPaths(config.run_dir).board(None)
        own = board.stat().st_ino
        with board_of_host(board.with_name(f"stageline-beside-{uuid.uuid4().hex[:12]}")):
            assert board.stat().st_ino == own  # it may hold no version now; a removed one would be made anew
        os.close(terminal)
        assert driver.wait(TIMEOUT_S) == 130
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert alive == []
    assert in_shared_memory(config) == []
    assert RunPaths(config.run_dir).summary.exists()


def test_what_a_killed_run_leaves_goes_with_the_next_one(folder: Path) -> None:
    """All processes of a run are killed with SIGKILL. Another run removes what it left, and the killed run continues
    without the weights that were there."""
    command = [sys.executable, "-m", "pipeline.cli", "run", *arguments(folder, "killed", *QUIET)]
    config = configure(folder, "killed", *QUIET)
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True) as driver:
        until(lambda: has_published(config, driver), "a publication")
        assert len(in_shared_memory(config)) == 2, "a board and its lock"
        processes = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=TIMEOUT_S)
    after = finish_in(folder, "after", *QUIET)
    assert in_shared_memory(config) == []
    assert main(["resume", str(config.run_dir)]) == 0
    assert digests(config) == digests(after)
    assert in_shared_memory(config) == []

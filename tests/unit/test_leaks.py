"""Tests that leave something behind fail, and say what it is."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.leaks import SHARED_MEMORY
from tests.support.processes import run_tests

TIDY = """
import os

def test_tidy():
    for end in os.pipe():
        os.close(end)
"""
OPENS = {
    "descriptor": "os.pipe()",
    "process": "subprocess.Popen(['sleep', '60'])",
    "shared memory": "multiprocessing.get_context('spawn').Semaphore()",
}

GANGS = """
import resource
from pathlib import Path

import pytest

from stages.models.config import ModelConfig
from tests.support.models import opened


@pytest.fixture
def few_descriptors():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_cannot_join(tmp_path, few_descriptors):
    with opened(tmp_path, ModelConfig(path="random:tiny")):
        pass


def test_fails(tmp_path):
    with opened(tmp_path, ModelConfig(path="random:tiny")):
        raise RuntimeError


def test_passes(tmp_path):
    with opened(tmp_path, ModelConfig(path="random:tiny")):
        pass
"""


@pytest.mark.parametrize("kind", OPENS)
def test_a_module_that_leaves_something_open_is_named_with_it(tmp_path: Path, kind: str) -> None:
    imports = "import atexit, multiprocessing, os, subprocess"
    leaks = f"{imports}\n\ndef test_leaks():\n    global LEFT\n    LEFT = {OPENS[kind]}\n"
    if kind == "process":
        leaks += "    atexit.register(LEFT.kill)\n"
    done = run_tests(tmp_path, ends_s=0.5, test_leaks=leaks, test_tidy=TIDY)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed, 1 error" in done.stdout
    lines = done.stdout.partition("test_leaks.py left open:\n")[2].splitlines()
    assert lines[0].startswith(f"  {kind}")


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_suite_that_leaves_something_in_shared_memory_fails(tmp_path: Path, processes: str) -> None:
    """Nobody has it open, as after a process that was killed."""
    left = SHARED_MEMORY / f"sem.mp-{uuid.uuid4().hex[:8]}"
    leaks = f"from pathlib import Path\n\ndef test_leaks():\n    Path({str(left)!r}).touch()\n"
    try:
        done = run_tests(tmp_path, "-n", processes, ends_s=0.5, test_leaks=leaks, test_tidy=TIDY)
    finally:
        left.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(left.name)]
    assert "test_leaks.py" in line
    assert "2 passed" in done.stdout


KILLED = """
import multiprocessing, os, signal

def make_and_die(context):
    held = context.Semaphore()
    os.kill(os.getpid(), signal.SIGKILL)

def test_kills():
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=make_and_die, args=(context,))
    child.start()
    child.join()
    child.close()
"""


def test_what_multiprocessing_removes_in_the_end_is_not_left(tmp_path: Path) -> None:
    done = run_tests(tmp_path, test_kills=KILLED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_gang_that_failed_is_no_obstacle_to_the_next(tmp_path: Path) -> None:
    done = run_tests(tmp_path, test_gangs=GANGS)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Too many open files" in done.stdout

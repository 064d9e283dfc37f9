"""Other interpreters, with the modules of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.paths import ROOT


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Its input and its output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def exit_status(script: str, *arguments: object) -> int:
    """Negative: the signal that ended it."""
    with start_python(script, *arguments) as process:
        process.communicate()
    return process.returncode


def command_line(process: psutil.Process) -> str:
    """Return a process's command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def run_tests(folder: Path, *arguments: str, ends_s: float = 30.0, **modules: str) -> subprocess.CompletedProcess[str]:
    """Run these modules of tests, each given by its source, in a pytest of their own that looks for leaks, and waits up
    to `ends_s` seconds for those to go."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    own = ["-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-p", "tests.support.leaks"]
    files = [str(folder / f"{name}.py") for name in modules]
    # Without pytest-xdist's variables: a suite that finds them does not look into shared memory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *own, *arguments, *files],
        cwd=ROOT, env=environment | {"STAGELINE_LEAKS_END_S": str(ends_s)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

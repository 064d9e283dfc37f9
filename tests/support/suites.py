"""Test files run by another pytest: one whose process must begin with another environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.support.paths import ROOT

_LONGEST_S = 1100
_KEPT = "PYTEST_XDIST_WORKER"
"""Tells the suite that others run beside it: then it does not look for what is left in shared memory (`leaks`)."""


def run_suite(files: Sequence[str], environment: Mapping[str, str], *arguments: str) -> str:
    """Runs test files (paths below the repository's root) to their end, in one process with `environment` beside this
    one's. Returns what it printed; fails the test that called it if one of them fails, or none ran."""
    command = [sys.executable, "-m", "pytest", "-rs", *files, *arguments]
    here = {name: value for name, value in os.environ.items() if name == _KEPT or not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**here, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    if done.returncode != 0 or " passed" not in done.stdout.splitlines()[-1]:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-12000:]}", pytrace=False)
    return done.stdout

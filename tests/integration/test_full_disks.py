"""Real disks that fill up under a run. The error is clear and names the path, the exit code is 3, and nothing is
corrupt. Once there is room, `resume` gives the results of a run that always had it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.driver.results import open_history
from tests.support.paths import ROOT
from tests.support.runs import configure, finish
from tests.support.small_disks import CHANGES, PHASES

pytestmark = [pytest.mark.processes, pytest.mark.root]

NAMED = {
    "board": "/v000000: No space left on device (ENOSPC)",
    "run": ": No space left on device (ENOSPC)",
    "ledger": ".json: No space left on device (ENOSPC)",
    "journal": "cannot write to {run}/events.jsonl: No space left on device",
    "checkpoints": ": No space left on device (ENOSPC)",
    "ledger, read only": ".json: Read-only file system (EROFS)",
}
"""The message for each full disk, with the path before it."""


def no_mounts() -> str | None:
    """Why this machine lets nobody mount a filesystem for itself; None where it does."""
    command = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no `unshare`"
    return None if tried.returncode == 0 else f"cannot mount a tmpfs of its own: {tried.stderr.strip()}"


@pytest.fixture(scope="module")
def small(folder: Path) -> Mapping[str, Any]:
    """Results of the run whose disks filled up (`tests/support/small_disks.py`)."""
    reason = no_mounts()
    if reason is not None:
        pytest.skip(reason)
    disks = folder / "disks"
    disks.mkdir()
    program = [sys.executable, "-m", "tests.support.small_disks", str(disks)]
    ran = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", *program],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_a_full_disk_is_a_clear_error_with_the_path(small: Mapping[str, Any], phase: str) -> None:
    attempt = small["phases"][phase]
    assert attempt["code"] == 3
    run = small["phases"]["run"]["disk"]
    assert NAMED[phase].format(run=run) in attempt["said"]
    assert phase == "journal" or attempt["disk"] in attempt["said"]  # that one is reached by a link
    assert f"stageline resume {run}" in attempt["said"]
    assert "Traceback" not in attempt["said"]
    # What is committed and could not be moved into its place yet is read all the same, by Stageline.
    faults = [fault for fault in attempt["faults"] if "plain Zarr" not in fault]
    assert faults == []


def test_with_room_the_run_ends_as_if_it_had_always_had_it(small: Mapping[str, Any], folder: Path) -> None:
    assert (small["code"], small["said"], small["faults"]) == (0, "", [])
    whole = finish(configure(folder, "roomy", *CHANGES))
    commits = open_history(whole).ledger.list()
    assert small["contents"] == {str(commit.address): commit.content for commit in commits}

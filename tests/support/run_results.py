"""What whole runs of a test come to, and waiting for something to happen in one that another thread runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from storage.ledger import Ledger


def outputs(config: RunConfig) -> dict[str, Any]:
    """The CRCs of all arrays, and the digests of all weights."""
    commits = Ledger(str(RunPaths(config.run_dir).ledger)).list()
    return {str(c.address): (c.digest, {name: a.crc32 for name, a in c.arrays.items()}) for c in commits}


def until(happened: Callable[[], Any], stop: threading.Event) -> None:
    """Raises AssertionError where `stop`, which the run's end sets, comes first."""
    while not happened():
        if stop.wait(0.01):
            raise AssertionError("the run ended first")

"""Results of a test's whole runs."""

from __future__ import annotations

from typing import Any

from pipeline.cli.verification import Verification
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from storage.records import Rollout


def outputs(config: RunConfig) -> dict[str, Any]:
    """The CRCs of all arrays, and the digests of all weights."""
    commits = config.stored.ledger().list()
    return {str(c.address): (c.digest, {name: a.crc32 for name, a in c.arrays.items()}) for c in commits}


def events_noted(report: Verification) -> list[str]:
    """Notes of `check` that are about what happened to the run, and not about what its engine can do."""
    return [note for note in report.notes if not note.startswith(("engine ", "not proven: "))]


def steps_of(config: RunConfig, stage: str) -> list[Rollout]:
    store = open_history(config).store
    return [store.read_step(stage, step, config.rollout.shards) for step in range(config.steps)]


def process_id(config: RunConfig, worker: str) -> int:
    """Return the process id of a worker's newest process, from the head of its log."""
    lines = (RunPaths(config.run_dir).logs / f"{worker}.log").read_text().splitlines()
    return int(next(line for line in reversed(lines) if line.startswith("----")).rpartition(" ")[2])

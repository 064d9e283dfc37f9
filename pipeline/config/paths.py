"""Where a run keeps what. Standard library only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The files of a run's directory."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.npz"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def damaged(self) -> Path:
        """Commit records that were not what had been written, moved here when the run was resumed."""
        return self.root / "damaged"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts.zarr"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def archive(self) -> Path:
        """What a run had committed before it went back to a checkpoint, by the time when it did."""
        return self.root / "archive"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def first_full_events(self) -> Path:
        """The first full part of a long run's journal (`pipeline/observe/journal.py`)."""
        return self.root / "events-000001.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def variant(self) -> Path:
        """Of a variant, which has no rollouts of its own: whose it was trained on, and what it differs in."""
        return self.root / "variant.json"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    @property
    def report(self) -> Path:
        """What the run came to, as one HTML file."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """What each worker prints."""
        return self.root / "logs"

    @property
    def attached(self) -> Path:
        """Of a run whose workers are attached: its scheduler file, for its user alone."""
        return self.root / "attached"

    @property
    def samples(self) -> Path:
        return self.root / "samples.json"

    @property
    def lock(self) -> Path:
        return self.root / "driver.lock"

    @property
    def mlflow_spool(self) -> Path:
        return self.root / "mlflow_spool.jsonl"

    @property
    def job(self) -> Path:
        """What was submitted to a cluster: config, script, number, and what the job prints."""
        return self.root / "job"

    def weights(self, version: int) -> Path:
        """The Hugging Face export of a version."""
        return self.root / "weights" / f"v{version:06d}"

    def board(self, weights_dir: str | None) -> Path:
        """The directory of published weights: memory, not disk, unless the config says otherwise. Named by the run's
        place, so that a resumed run finds what a crashed one left."""
        name = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]
        return Path(weights_dir or "/dev/shm") / f"stageline-{self.root.name}-{name}"

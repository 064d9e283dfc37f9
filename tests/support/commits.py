"""Commits of nodes that computed nothing."""

from __future__ import annotations

import time
from pathlib import Path

from storage.address import Address
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger


def commit_nothing(run_dir: Path, step: int) -> Ledger:
    """Commit an empty `generate` of a step; return the run's ledger."""
    provenance = provenance_here(weight_versions=[0], seed=0, config_hash="none", worker="w", inputs=[])
    ledger = Ledger(str(run_dir / "ledger"))
    ledger.commit(Commit(Address("generate", step), new_attempt(), None, 0, {}, provenance, time.time()))
    return ledger

"""Commits of nodes that computed nothing, and checkpoints of nothing."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.graph.graph import GraphSpec, run_nodes
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger


def commit_empty(ledger: Ledger, address: Address, finished: float = 1.0, **metrics: float) -> None:
    provenance = provenance_here(weight_versions=[0], seed=0, config_hash="none", worker="w", inputs=[])
    ledger.commit(Commit(address, new_attempt(), None, 0, {}, provenance, finished, metrics))


def commit_nothing(run_dir: Path, step: int) -> Ledger:
    """Commit an empty `generate` of a step; return the run's ledger."""
    ledger = Ledger(str(run_dir / "ledger"))
    commit_empty(ledger, Address("generate", step), finished=time.time())
    return ledger


def addresses_up_to(spec: GraphSpec, last: Address) -> list[Address]:
    """Return the addresses of a run's nodes in their order, up to this one."""
    addresses = [node.address for node in run_nodes(spec)]
    return addresses[: addresses.index(last) + 1]


def save_checkpoint(checkpoints: Checkpoints, role: str, version: int, digest: str) -> None:
    """Save one file as the checkpoint of weights with this digest."""
    directory = checkpoints.begin(role, version)
    (directory / "model.bin").write_text(f"weights {version}")
    checkpoints.finish(role, version, directory, {"digest": digest})

"""Outputs that are lost, and that a run has outlived: their commit record is damaged or gone, and nobody needs them.

    steps:   0 ·········· 29 │ 30 ······· 41 │ 42 ─► oldest checkpoint whose updates can run again
             arrays let go   │  arrays kept  │  whatever is lost from here on runs again
             └───── lost for good: counts ───┘
                    as done, and is named

Under `storage.keep.rollouts` an old output cannot be made again, since what it was made from is gone; and it need not
be, since no update before the oldest checkpoint is ever run again. Without it nothing is outlived: all can be made
again from the start.

May import pipeline.graph, pipeline.observe, stages.models.protocol and storage.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipeline.graph.graph import STAGE_ROLES, step_nodes, update_stages
from pipeline.observe.history import History
from stages.models.protocol import Role
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.errors import DamagedCommit

_MADE_FROM_EVALUATE = ("evaluate_score", "evaluate_reference")
_OF_THE_POLICY = ("publish", "evaluate", "canary")
_FROM_WEIGHTS = ("publish", "evaluate")
"""Made from a version of the weights, and nothing else."""


def outlived(
    history: History, checkpoints: str | Path, committed: Collection[Address], from_step: int = 0
) -> frozenset[Address]:
    """Of the nodes from a step on: those that are not among the `committed`, that cannot be made again, and that nobody
    needs. `checkpoints`: the run's directory of them. Raises StoreError where what was let go is not known."""
    before = history.store.dropped_before()
    if not before:
        return frozenset()
    saved = {role: _usable(history, checkpoints, role) for role in update_stages(history.spec)}
    floors = {role: min((v for v in versions if v >= before), default=before) for role, versions in saved.items()}
    there = {0, *saved[Role.POLICY]}  # whose weights need no update to run again
    found: set[Address] = set()
    for step in range(max(0, from_step - 1), min(max(floors.values()), history.spec.steps)):
        lost = {n.address for n in step_nodes(history.spec, step) if n.address not in committed}
        gone = {a for a in lost if from_step <= a.step < _floor_of(a, floors)}
        gone -= {a for a in gone if a.stage in _FROM_WEIGHTS and a.step in there}
        found |= {
            address
            for address in gone
            if address.stage not in _MADE_FROM_EVALUATE or Address("evaluate", address.step, address.shard) in gone
        }
    return frozenset(found)


def _usable(history: History, checkpoints: str | Path, role: Role) -> list[int]:
    """Versions with a checkpoint that looks whole, and that the commit of an update vouches for."""
    stage = update_stages(history.spec)[role]
    return [v for v in Checkpoints(checkpoints).versions(role) if _has_commit(history, Address(stage, v - 1))]


def _floor_of(address: Address, floors: dict[Role, int]) -> int:
    role = Role.POLICY if address.stage in _OF_THE_POLICY else STAGE_ROLES[address.stage]
    return floors.get(role, min(floors.values()))


def _has_commit(history: History, address: Address) -> bool:
    try:
        return history.ledger.find(address) is not None
    except DamagedCommit:
        return False

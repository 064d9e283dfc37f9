"""`stageline resume RUN --from-checkpoint`: back to the newest checkpoint, and on from there, here.

A run whose updates give other weights when they run again (another processor, another torch) cannot go on by replaying
them. It need not: a checkpoint has its weights as they are. What was committed after it moves, as it is, into

    archive/20260131T120000/{ledger,rollouts.zarr,checkpoints,weights}/...

and is made anew. Nothing is deleted. Checkpoints and exports go first, then commits, children before parents: whoever
dies over it leaves a run that is whole, and the command can be given again.

May import pipeline.config, pipeline.graph, pipeline.observe, pipeline.driver.outlived, pipeline.workers.updates and
below.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.paths import RunPaths
from pipeline.driver.outlived import outlived
from pipeline.graph.graph import update_stages
from pipeline.graph.rewind import SHARDED, can_go_back, made_anew
from pipeline.observe.history import History
from pipeline.workers.updates import is_usable
from stages.models.protocol import Role
from storage import files
from storage.address import Address
from storage.checkpoints import Checkpoints, version_of
from storage.errors import DamagedCommit


@dataclass(frozen=True)
class Rewind:
    """Back to a version: what moves into the archive."""

    version: int
    commits: tuple[Address, ...]
    """Children before parents."""
    directories: tuple[Path, ...]
    """Checkpoints and exports of later versions."""
    archive: Path

    def __str__(self) -> str:
        start = f"checkpoint v{self.version}" if self.version else "its start (no checkpoint can be used)"
        return f"resumed from {start}: {len(self.commits)} commits after it are in {self.archive}"


def plan_rewind(history: History, paths: RunPaths) -> Rewind:
    """Back to the newest version that every trained model has a sound checkpoint of and that can be gone on from, else
    to the start. Moves nothing."""
    checkpoints = Checkpoints(paths.checkpoints)
    committed = set(history.ledger.addresses())
    ledger = history.ledger
    saved = {v for v in checkpoints.versions(Role.POLICY) if is_usable(checkpoints, ledger, Role.POLICY, v)}
    others = update_stages(history.spec).keys() - {Role.POLICY}
    newest_first = sorted(saved, reverse=True)
    of_all = (v for v in newest_first if all(is_usable(checkpoints, ledger, role, v) for role in others))
    before = history.store.dropped_before()
    lost = outlived(history, paths.checkpoints, committed)
    sampled = newest_sampled(history, committed) if history.spec.latest else {}
    sampled = {address: newest for address, newest in sampled.items() if address not in lost}
    version = next((v for v in of_all if can_go_back(history.spec, committed | lost, v, saved, before, sampled)), 0)
    later = [*_later(paths.checkpoints.glob("*/v*"), version), *_later(paths.weights(0).parent.glob("v*"), version)]
    name = time.strftime("%Y%m%dT%H%M%S")
    commits = made_anew(history.spec, committed, version, before, sampled)
    return Rewind(version, tuple(commits), tuple(sorted(later)), paths.archive / name)


def carry_out(rewind: Rewind, history: History, paths: RunPaths) -> None:
    """Moves it. Raises OSError."""
    for directory in rewind.directories:
        target = rewind.archive / directory.relative_to(paths.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(directory, target)
    history.ledger.reopen(rewind.commits)
    run = files.open_root(str(paths.root))
    archive = rewind.archive.relative_to(paths.root).as_posix()
    for address in rewind.commits:
        try:
            commit = history.ledger.find(address)
        except DamagedCommit:  # it is set aside like any other, and its node runs again
            continue
        if commit is None:
            continue
        for key in (f"{paths.ledger.name}/{address}.json", *history.store.keys_of(commit)):
            files.move(run, key, f"{archive}/{key}")
    history.store.make_anew(rewind.version)


def newest_sampled(history: History, committed: Collection[Address]) -> dict[Address, int | None]:
    """The newest version that each shard was sampled with; None for one whose commit is lost, or damaged, although
    something was made from it."""
    found: dict[Address, int | None] = {}
    for address in {replace(a, stage="generate") for a in committed if a.stage in SHARDED}:
        try:
            commit = history.ledger.find(address)
        except DamagedCommit:
            commit = None
        found[address] = None if commit is None else max(commit.provenance.weight_versions)
    return found


def _later(directories: Iterator[Path], version: int) -> Iterator[Path]:
    for directory in directories:
        found = version_of(directory)
        if found is not None and found > version:
            yield directory

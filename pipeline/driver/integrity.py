"""Keep the stored data of a run whole: repair it before a resume, check it during the run, clean up at the end.

    resume ──► damaged commit records ──► set aside in damaged/; their nodes run again, and must produce the content
                                          that later outputs were made from
               outputs whose inputs have changed ──► StoreError that names the first
    a worker process was replaced ──► files that the old process had committed are moved into place
    the run ends ──► committed files are moved into place; without an error, leftovers of attempts are removed too

Three parts follow: `repair_store` and its checks, `unneeded_outputs` (lost outputs that the run no longer needs), and
the rewind to the newest checkpoint (`stageline resume RUN --from-checkpoint`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pipeline.config.paths import RunPaths
from pipeline.config.stored import RunStorage
from pipeline.driver.retention import close_finished_segments, is_usable
from pipeline.errors import StageFailed
from pipeline.graph.graph import (
    SHARDED,
    STAGE_ROLES,
    can_rewind,
    commits_to_recompute,
    generation_versions,
    step_nodes,
    update_stages,
)
from pipeline.observe.history import History
from stages.models.protocol import Role
from storage import files
from storage.address import Address
from storage.checkpoints import Checkpoints, version_of
from storage.commits import Commit
from storage.errors import DamagedCommit, StoreError
from storage.ledger import Ledger
from storage.rollouts import KEEP
from storage.weights import WeightBoard


@dataclass(frozen=True)
class Repairs:
    """The result of repairing the stored data that an earlier driver left."""

    warnings: tuple[str, ...] = ()
    """Texts about records that were set aside, and about lost outputs."""
    expected_digests: Mapping[Address, str] = field(default_factory=dict)
    """Address of an output whose commit is lost -> digest of its content. The output must be computed again with the
    same content. The digest comes from the commit of a later output, which records the digests of its inputs. There is
    no entry if no commit has the lost output among its inputs, or if the lost output is in `unneeded_outputs`."""
    sampled_versions: Mapping[Address, int] = field(default_factory=dict)
    """Address of a shard of rollouts in `expected_digests` -> version of the weights that sampled it. Empty under
    `rollout.versions: exact`, where the graph fixes this version."""
    unneeded_outputs: frozenset[Address] = frozenset()
    """Addresses of outputs that have no commit, cannot be computed again, and are needed by no node. The driver treats
    their nodes as done."""


_NONE: Mapping[Address, str] = MappingProxyType({})


def quarantine_damaged_commits(ledger: Ledger, stored: RunStorage) -> dict[Address, str]:
    """Move damaged commit records out of the ledger. Return address -> text that says what was wrong with the record
    and where it is now. Call it before workers start. Raises StoreError for a record of another format, and for a
    segment whose table of contents is damaged."""
    aside = {}
    ledger.reopen_damaged()
    for address in ledger.open_addresses():  # closed records are whole
        try:
            ledger.find(address)
        except DamagedCommit as error:
            place = ledger.set_aside(address, stored.damaged)
            aside[address] = f"{error}. It was moved to {place}"
    return aside


def repair_store(history: History, stored: RunStorage, damaged: Mapping[Address, str] = _NONE) -> Repairs:
    """Set damaged commit records aside, move committed files into place, and restore damaged Zarr metadata. Call it
    before workers start. `damaged`: result of an earlier call of `quarantine_damaged_commits`.

    Raises:
        StoreError: in one of three cases:
            (1) A record has a format that this version of Stageline does not read, or the table of contents of a
                segment is damaged.
            (2) A committed output was made from an input whose content has changed since.
            (3) The commit of a shard of rollouts is lost, and a committed output was made from the shard. So it must be
                sampled again, but it is not known with which version of the weights: its stored tokens are missing, or
                several versions sampled them. This case cannot occur under `rollout.versions: exact`.

            In cases 2 and 3 damaged records are already set aside, and finished segments of the ledger are closed.
            Nothing else has changed.
    """
    ledger = history.ledger
    aside = {**damaged, **quarantine_damaged_commits(ledger, stored)}
    closed = ledger.closed_until()
    lost = unneeded_outputs(history, stored.checkpoints(), set(ledger.addresses(from_step=closed)), closed)
    close_finished_segments(history.spec, ledger, lost)
    looked_at = ledger.addresses(from_step=ledger.closed_until())  # the inputs of closed records are closed too
    by_step = sorted(looked_at, key=lambda address: address.step)  # reads each segment once
    commits = [commit for commit in map(ledger.find, by_step) if commit is not None]
    known = {commit.address: commit for commit in commits}
    inputs = [one for commit in commits for one in commit.provenance.inputs]
    for address in {one.address for one in inputs} - known.keys():
        earlier = ledger.find(address)
        known |= {} if earlier is None else {address: earlier}
    faults = list(lineage_faults(commits, known))
    if faults:
        run_dir = stored.directory
        more = f" (and {len(faults) - 1} more: `stageline check {run_dir}` lists them)" if len(faults) > 1 else ""
        raise StoreError(f"{run_dir} cannot go on: {faults[0]}{more}")
    expected = {one.address: one.content for one in inputs if one.address not in {*known, *lost}}
    shards = [address for address in expected if address.stage == "generate"] if history.spec.uses_latest else []
    sampled_versions = {address: _sampling_version(history, address, stored.directory) for address in shards}
    # A node that runs again may read a version whose publication belongs to a closed step.
    first_read = (max(0, address.step - history.spec.staleness - 1) for address in expected)
    history.ledger.reopen(Address("publish", step) for step in first_read)
    history.store.recover()
    history.store.restore_metadata(commits)
    warnings = [f"{what}; {_consequence_text(address, lost)}" for address, what in aside.items()]
    warnings += [
        f"{address} has no commit; {_consequence_text(address, lost)}" for address in sorted(lost - aside.keys())
    ]
    return Repairs(tuple(warnings), expected, sampled_versions, lost)


def _consequence_text(address: Address, lost: Collection[Address]) -> str:
    if address in lost:
        return f"{address} is lost, and nobody needs it any more ({KEEP} has let go what it was made from)"
    return f"{address} runs again"


def _sampling_version(history: History, address: Address, run_dir: Path) -> int:
    """Return the version that sampled a shard whose commit is lost, from its stored `token_versions`. The shard is
    sampled again with it, and must get the content that later outputs were made from. Raises StoreError if the array
    has none or several of the versions that may generate the step."""
    allowed, stored = (
        generation_versions(history.spec, address.step),
        history.store.read_uncommitted(address, "token_versions"),
    )
    versions = [] if stored is None else [v for v in np.unique(stored).tolist() if v in allowed]
    if len(versions) != 1:
        several = f"versions {versions}, as they came" if versions else "a version that nobody knows any more"
        raise StoreError(
            f"{run_dir} cannot go on: the commit of {address} is lost, other outputs were made from it, and it was "
            f"sampled by {several}, so that it cannot be made again. `stageline resume "
            f"{run_dir} --from-checkpoint` goes back to before it was trained on"
        )
    return int(versions[0])


def lineage_faults(commits: Iterable[Commit], committed: Mapping[Address, Commit]) -> Iterator[str]:
    """Compare the inputs that `commits` name with the present commits of these inputs (`committed`, by address). Yield
    a text for each input whose content differs. Inputs without a present commit are ignored."""
    for commit in commits:
        for one in commit.provenance.inputs:
            found_commit = committed.get(one.address)
            if found_commit is not None and found_commit.content != one.content:
                yield (
                    f"{commit.address}: was made from {one.address} of attempt {one.attempt} with content "
                    f"{one.content}, committed is {found_commit.attempt} with content {found_commit.content}"
                )


def check_recomputed(history: History, repairs: Repairs, address: Address) -> None:
    """Raise StageFailed if the content of a node's new commit differs from the content that later outputs were made
    from (`repairs.expected_digests`)."""
    if address not in repairs.expected_digests:
        return
    content, expected = history.ledger.get(address).content, repairs.expected_digests[address]
    if content != expected:
        raise StageFailed(
            f"{address} was computed again, and differs from the output that later commits used (content {content}, it "
            f"was {expected}). Did the layout, the batch, the number of threads or a library change?"
        )


@contextmanager
def clean_up_after(history: History) -> Iterator[None]:
    """Move committed files into place when the block ends. If it ends without an error, also remove all leftovers of
    attempts. The block must end all workers of the run."""
    try:
        yield
    except BaseException:
        try:
            history.store.recover()
        except (StoreError, OSError) as error:  # must not replace the error being raised
            print(f"not all committed files could be moved into place: {error}", file=sys.stderr, flush=True)
        raise
    history.store.finalise()
    history.ledger.tidy()


class UnreadVersions:
    """Owns the set of versions of the weights that wait to be removed from shared memory. No node of the graph needs
    these versions any more. A process may still hold a lease on them (`storage.weights`), and they are removed when
    this lease ends."""

    def __init__(self, board: WeightBoard) -> None:
        self._board = board
        self._leased_versions: set[int] = set()

    def release(self, version: int) -> None:
        """Release a version now, or when its last lease is gone. Also release other versions whose leases are gone."""
        self._leased_versions.add(version)
        self.release_unleased()

    def release_unleased(self) -> None:
        """Remove each waiting version on which no process holds a lease any more. Call it after the death of a worker
        process, because this ends the leases of the process."""
        self._leased_versions = {
            version for version in sorted(self._leased_versions) if not self._board.release(version)
        }


# ---- Lost outputs that the run no longer needs -----------------------------------------------------------
#
#     steps:   0 ·········· 29 │ 30 ······· 41 │ 42 ─► oldest checkpoint whose updates can run again
#              arrays deleted  │  arrays kept  │  anything lost from here on runs again
#              └─── cannot be made again: ─────┘
#                   counts as done, with a warning
#
# Under `storage.keep.rollouts` an old output cannot be made again, since its inputs are deleted. It is not needed
# either, since no update before the oldest checkpoint runs again. Without that setting everything can be made again
# from the start, and no output is unneeded.

_MADE_FROM_EVALUATE = ("evaluate_score", "evaluate_reference")
_OF_THE_POLICY = ("publish", "evaluate", "canary")
_FROM_WEIGHTS = ("publish", "evaluate")
"""Stages whose only input is a version of the weights."""


def unneeded_outputs(
    history: History, checkpoints: Checkpoints, committed: Collection[Address], from_step: int = 0
) -> frozenset[Address]:
    """Return the addresses of outputs that are not `committed`, and that the run can do without. They cannot be
    computed again, because their inputs were deleted (`storage.keep.rollouts`). No node needs them, since recoveries
    begin at a later checkpoint. The result is empty if no rollouts were deleted.

    Args:
        from_step: first step to look at.

    Raises:
        StoreError: it is not known which rollouts were deleted.
    """
    before = history.store.dropped_before()
    if not before:
        return frozenset()
    saved = {role: _usable_checkpoints(history, checkpoints, role) for role in update_stages(history.spec)}
    floors = {role: min((v for v in versions if v >= before), default=before) for role, versions in saved.items()}
    existing = {0, *saved[Role.POLICY]}  # versions that exist without running an update again
    unneeded: set[Address] = set()
    for step in range(max(0, from_step - 1), min(max(floors.values()), history.spec.steps)):
        lost = {n.address for n in step_nodes(history.spec, step) if n.address not in committed}
        gone = {a for a in lost if from_step <= a.step < _floor_of(a, floors)}
        gone -= {a for a in gone if a.stage in _FROM_WEIGHTS and a.step in existing}
        unneeded |= {
            address
            for address in gone
            if address.stage not in _MADE_FROM_EVALUATE or Address("evaluate", address.step, address.shard) in gone
        }
    return frozenset(unneeded)


def _usable_checkpoints(history: History, checkpoints: Checkpoints, role: Role) -> list[int]:
    """Return the versions with both a complete-looking checkpoint and the commit of the update that made them."""
    stage = update_stages(history.spec)[role]
    return [v for v in checkpoints.versions(role) if _has_commit(history, Address(stage, v - 1))]


def _floor_of(address: Address, floors: dict[Role, int]) -> int:
    role = Role.POLICY if address.stage in _OF_THE_POLICY else STAGE_ROLES[address.stage]
    return floors.get(role, min(floors.values()))


def _has_commit(history: History, address: Address) -> bool:
    try:
        return history.ledger.find(address) is not None
    except DamagedCommit:
        return False


# ---- Rewind to a checkpoint ------------------------------------------------------------------------------
#
# A run whose updates give other weights when they run again (another processor, another torch) cannot replay them. But
# a checkpoint has the weights themselves. So everything committed after the newest usable checkpoint moves, unchanged,
# into
#
#     archive/20260131T120000/{ledger,rollouts.zarr,checkpoints,weights}/...
#
# and is computed again. Nothing is deleted. Checkpoints and exports move first, then commits, children before parents.
# A process that dies in between leaves a consistent run, and the command can be repeated.


@dataclass(frozen=True)
class Rewind:
    """A return of the run to `version` (0: to its start), with everything that moves into the archive."""

    version: int
    commits: tuple[Address, ...]
    """Commits to move, children before parents."""
    directories: tuple[Path, ...]
    """Directories to move: the checkpoints and exports of versions newer than `version`."""
    copies: tuple[str, ...]
    """Keys to move in the object store: the uploaded files of all checkpoints and exports of versions newer than
    `version`. Empty without an object store."""
    archive: str
    """Key of the archive: its path below the run's directory, and below the run's place in the object store."""

    def __str__(self) -> str:
        start = f"checkpoint v{self.version}" if self.version else "its start (no checkpoint can be used)"
        return f"resumed from {start}: {len(self.commits)} commits after it are in {self.archive}/"


def plan_rewind(history: History, stored: RunStorage) -> Rewind:
    """Return the rewind to the newest version from which the run can continue. Every trained model must have an
    undamaged checkpoint of that version. If no version fits, return the rewind to the start. Moves nothing."""
    checkpoints, paths = stored.checkpoints(), RunPaths(stored.directory)
    committed = set(history.ledger.addresses())
    ledger = history.ledger
    saved = {v for v in checkpoints.versions(Role.POLICY) if is_usable(checkpoints, ledger, Role.POLICY, v)}
    others = update_stages(history.spec).keys() - {Role.POLICY}
    newest_first = sorted(saved, reverse=True)
    of_all = (v for v in newest_first if all(is_usable(checkpoints, ledger, role, v) for role in others))
    before = history.store.dropped_before()
    lost = unneeded_outputs(history, checkpoints, committed)
    sampled = newest_sampled(history, committed) if history.spec.uses_latest else {}
    sampled = {address: newest for address, newest in sampled.items() if address not in lost}
    version = next((v for v in of_all if can_rewind(history.spec, committed | lost, v, saved, before, sampled)), 0)
    later = [
        *_later_versions(paths.checkpoints.glob("*/v*"), version),
        *_later_versions(paths.weights(0).parent.glob("v*"), version),
    ]
    name = time.strftime("%Y%m%dT%H%M%S")
    commits = commits_to_recompute(history.spec, committed, version, before, sampled)
    copies = stored.copied_after(version)
    return Rewind(version, tuple(commits), tuple(sorted(later)), tuple(copies), f"archive/{name}")


def execute_rewind(rewind: Rewind, history: History, stored: RunStorage) -> None:
    """Move the rewind's files and commits into the archive. Raises OSError."""
    for directory in rewind.directories:
        target = stored.directory / rewind.archive / directory.relative_to(stored.directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(directory, target)
    for key in rewind.copies:
        files.move(stored.root, key, f"{rewind.archive}/{key}")
    history.ledger.reopen(rewind.commits)
    for address in rewind.commits:
        try:
            commit = history.ledger.find(address)
        except DamagedCommit:  # `repair_store` sets it aside, and its node runs again
            continue
        if commit is None:
            continue
        for key in (f"ledger/{address}.json", *history.store.keys_of(commit)):
            files.move(stored.root, key, f"{rewind.archive}/{key}")
    history.ledger.forget(rewind.commits)
    history.store.make_anew(rewind.version)


def newest_sampled(history: History, committed: Collection[Address]) -> dict[Address, int | None]:
    """Return address of a shard of rollouts -> newest version of the weights that sampled the shard. A shard is in the
    result if its rollouts, or any output computed from this shard alone (scores, log-probs, values), are in
    `committed`. The version is None if the commit of the rollouts is lost or damaged."""
    newest: dict[Address, int | None] = {}
    for address in {replace(a, stage="generate") for a in committed if a.stage in SHARDED}:
        try:
            commit = history.ledger.find(address)
        except DamagedCommit:
            commit = None
        newest[address] = None if commit is None else max(commit.provenance.weight_versions)
    return newest


def _later_versions(directories: Iterator[Path], version: int) -> Iterator[Path]:
    for directory in directories:
        number = version_of(directory)
        if number is not None and number > version:
            yield directory

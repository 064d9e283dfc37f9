"""What a driver sees to before, during and after a run, so that what is stored is whole.

    resume ──► commit records that are damaged ──► set aside in damaged/; their nodes run again, and must come to what
                                                   later outputs were made from
               outputs whose inputs are others now ──► refused, by name
    a process was built anew ──► what the one before had committed is moved into place
    the end ──► the same, and nothing is left of any attempt

May import numpy, pipeline.config, pipeline.graph, pipeline.observe, pipeline.driver.{closing, context, outlived} and
storage.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from pipeline.config.paths import RunPaths
from pipeline.driver.closing import close_what_is_over
from pipeline.driver.context import StageFailed
from pipeline.driver.outlived import outlived
from pipeline.graph.graph import generation_versions
from pipeline.observe.history import History
from storage.address import Address
from storage.commits import Commit
from storage.errors import DamagedCommit, StoreError
from storage.ledger import Ledger
from storage.retention import KEY
from storage.weights import WeightBoard


@dataclass(frozen=True)
class Mended:
    """What an earlier driver left, once all of it that counts is sound."""

    warnings: tuple[str, ...] = ()
    """Records that were set aside."""
    expected: Mapping[Address, str] = field(default_factory=dict)
    """Content by address: of outputs that have no commit, and that committed ones were made from."""
    made_with: Mapping[Address, int] = field(default_factory=dict)
    """Under `latest`, of the shards among these: the version that sampled them, which the graph does not say."""
    outlived: frozenset[Address] = frozenset()
    """Lost for good, and needed by nobody (`driver/outlived.py`): they count as done."""


_NONE: Mapping[Address, str] = MappingProxyType({})


def set_damaged_aside(ledger: Ledger, paths: RunPaths) -> dict[Address, str]:
    """Moves commit records that are not what was written out of the ledger; says what was wrong, and where they are.
    For a driver that has no workers yet. Raises StoreError for a record of another format, and for a segment whose
    table of contents is damaged."""
    aside = {}
    ledger.reopen_damaged()
    for address in ledger.open_addresses():  # what is closed is whole
        try:
            ledger.find(address)
        except DamagedCommit as error:
            place = ledger.set_aside(address, str(paths.damaged))
            aside[address] = f"{error}. It was moved to {place}"
    return aside


def mend(history: History, paths: RunPaths, before: Mapping[Address, str] = _NONE) -> Mended:
    """Sets damaged commit records aside, puts files that are committed in their places, and writes what plain Zarr
    readers find them by where that is damaged. For a driver that has no workers yet. `before`: what it has set aside
    already.

    Raises:
        StoreError: a committed output was made from another input than the committed one; or from a shard that has no
            commit, and nobody knows which versions sampled it; or a record is of another format. Nothing was changed in
            the first two cases but what is said above.
    """
    ledger = history.ledger
    aside = {**before, **set_damaged_aside(ledger, paths)}
    closed = ledger.closed_until()
    lost = outlived(history, paths.checkpoints, set(ledger.addresses(from_step=closed)), closed)
    close_what_is_over(history.spec, ledger, lost)
    looked_at = ledger.addresses(from_step=ledger.closed_until())  # what is closed before was made from what is closed
    by_step = sorted(looked_at, key=lambda address: address.step)  # so that each segment among them is read once
    commits = [commit for commit in map(ledger.find, by_step) if commit is not None]
    found = {commit.address: commit for commit in commits}
    inputs = [one for commit in commits for one in commit.provenance.inputs]
    for address in {one.address for one in inputs} - found.keys():
        earlier = ledger.find(address)
        found |= {} if earlier is None else {address: earlier}
    faults = list(lineage_faults(commits, found))
    if faults:
        more = f" (and {len(faults) - 1} more: `stageline check {paths.root}` lists them)" if len(faults) > 1 else ""
        raise StoreError(f"{paths.root} cannot go on: {faults[0]}{more}")
    expected = {one.address: one.content for one in inputs if one.address not in {*found, *lost}}
    shards = [address for address in expected if address.stage == "generate"] if history.spec.latest else []
    made_with = {address: _sampled_with(history, address, paths) for address in shards}
    # What runs again may read a version whose publication is among the nodes of a step that is closed.
    first_read = (max(0, address.step - history.spec.staleness - 1) for address in expected)
    history.ledger.reopen(Address("publish", step) for step in first_read)
    history.store.recover()
    history.store.restore_metadata(commits)
    warnings = [f"{what}; {_what_follows(address, lost)}" for address, what in aside.items()]
    warnings += [f"{address} has no commit; {_what_follows(address, lost)}" for address in sorted(lost - aside.keys())]
    return Mended(tuple(warnings), expected, made_with, lost)


def _what_follows(address: Address, lost: Collection[Address]) -> str:
    if address in lost:
        return f"{address} is lost, and nobody needs it any more ({KEY} has let go what it was made from)"
    return f"{address} runs again"


def _sampled_with(history: History, address: Address, paths: RunPaths) -> int:
    """The one version that sampled a shard whose commit is lost, as its tokens have it; what it comes to with that
    version is compared with what was made from it. Raises StoreError where that is not to be had."""
    allowed, there = generation_versions(history.spec, address.step), history.store.unvouched(address, "token_versions")
    found = [] if there is None else [v for v in np.unique(there).tolist() if v in allowed]
    if len(found) != 1:
        several = f"versions {found}, as they came" if found else "a version that nobody knows any more"
        raise StoreError(
            f"{paths.root} cannot go on: the commit of {address} is lost, other outputs were made from it, and it was "
            f"sampled by {several} (rollout.versions=latest), so that it cannot be made again. `stageline resume "
            f"{paths.root} --from-checkpoint` goes back to before it was trained on"
        )
    return int(found[0])


def lineage_faults(commits: Iterable[Commit], found: Mapping[Address, Commit]) -> Iterator[str]:
    """Outputs that were made from another input than the one that is committed now; inputs that have no commit are not
    among these."""
    for commit in commits:
        for one in commit.provenance.inputs:
            there = found.get(one.address)
            if there is not None and there.content != one.content:
                yield (
                    f"{commit.address}: was made from {one.address} of attempt {one.attempt} with content "
                    f"{one.content}, committed is {there.attempt} with content {there.content}"
                )


def check_made_again(history: History, mended: Mended, address: Address) -> None:
    """A node has its commit. Raises StageFailed where later outputs were made from another one."""
    if address not in mended.expected:
        return
    content, expected = history.ledger.get(address).content, mended.expected[address]
    if content != expected:
        raise StageFailed(
            f"{address} was made again, and is not what committed outputs were made from: content {content}, theirs is "
            f"{expected}. Another layout, batch, thread count or library than the one that made it?"
        )


@contextmanager
def books_closed(history: History) -> Iterator[None]:
    """Around the workers of a run: when the block ends all of them have. What they committed is in its place then, and,
    if the block ended well, nothing else is left of any attempt."""
    try:
        yield
    except BaseException:
        try:
            history.store.recover()
        except (StoreError, OSError) as error:  # must not replace what is on its way out
            print(f"not all committed files could be moved into place: {error}", file=sys.stderr, flush=True)
        raise
    history.store.close_books()
    history.ledger.tidy()


class UnreadVersions:
    """Owns the published versions that nobody reads any more and whose memory a lease still holds."""

    def __init__(self, board: WeightBoard) -> None:
        self._board = board
        self._held: set[int] = set()

    def release(self, version: int) -> None:
        """Releases a version now, or when its last lease is gone; those that waited too, if they can be."""
        self._held.add(version)
        self.retry()

    def retry(self) -> None:
        """To be called when leases may be gone: a version was released, a process died."""
        self._held = {version for version in sorted(self._held) if not self._board.release(version)}

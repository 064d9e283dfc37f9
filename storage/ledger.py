"""The commit ledger: one small JSON record per output. An output exists if, and only if, its record exists (law 2 of
docs/architecture.md).

    node  ──► output bytes under the attempt's own name ──► `Ledger.commit` (exclusive create) ──► winner | loser
    reader ─► `Ledger.find(address)` ──► Commit: description of the output and of its inputs

The record of a recent step is a file `<stage>/step_000012/shard_0003.json` below the ledger's URL, in strict JSON
(`storage/commits.py`).

The records of old steps are in segments. A segment is one file with the records of `SPAN` steps. A run of 10,000 steps
has 150,000 records. As single files they take minutes to list and read on a network filesystem, and every resume reads
them.

    closed/steps_000016.segment     a line of JSON: the place of each record, and a checksum of these places
                                    the records as they were written, one after the other

A segment is written when all of its records exist, and never changes. Then the files of the records are removed. A
reader that does not find a file looks into the segment.

`dropped.json`, beside the ledger, records which steps' arrays were deleted. It is written before the first array is
deleted.
"""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from storage import codec, files
from storage.address import Address
from storage.commits import Commit, checksum, decode, encode, is_whole
from storage.config import Durability
from storage.errors import DamagedCommit, MissingOutput, StoreError
from storage.files import until_seen

_SEGMENTS_KEPT = 2
_COMMITS_KEPT = 4096
_KEY = re.compile(r"(?P<stage>[^/]+)/step_(?P<step>\d{6,})/shard_(?P<shard>\d{4,})\.json")


Commits = list[Commit]
Addresses = list[Address]
Keys = list[str]
"""Aliases, because inside the class `list` is the method `Ledger.list` and not the builtin."""


class Ledger:
    """The ledger of a run: the commits of all its outputs. It keeps no file open.

    It caches segments (files with the records of old steps). In an object store it also caches single records, because
    each read takes a round trip there. Cached data cannot become outdated, because segments and records never change.
    Everything else is read anew, so all processes see the same ledger.
    """

    def __init__(self, url: str, durability: Durability = files.DEFAULT) -> None:
        """`url`: the ledger's directory (a run's `ledger/`), a path or the URL of an object store."""
        self.url = url
        self._root = files.open_root(url, durability)
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._commits: OrderedDict[Address, Commit] = OrderedDict()
        """A cache of the commits that were read or written last. Always empty for a ledger in a local directory."""
        self._of_stage: dict[tuple[int, str | None], tuple[Address, ...]] = {}
        self._reading = threading.Lock()

    def find(self, address: Address, *, closed: bool = True) -> Commit | None:
        """Return the commit at an address, or None. Raises DamagedCommit, naming the file, if the record is damaged.

        `closed`: True to look also into the segment, the file with the records of old steps. A caller that calls
        `commit` next may pass False, because the segment is looked into with the commit, or soon after it.
        """
        if (known := self._commits.get(address)) is not None:
            return known
        key, data = _key(address), files.read(self._root, _key(address))
        if data is None and closed:
            key, data = segment_key(first_step(address.step)), self._closed(address)
        if data is None:
            return None
        where = self._root.at(key)
        commit = decode(data, where)
        if commit.address != address:
            raise DamagedCommit(f"{where}: holds the commit record of {commit.address}")
        self._remember(commit)
        return commit

    def _remember(self, commit: Commit) -> None:
        if self._root.fs is None:
            return
        with self._reading:
            self._commits[commit.address] = commit
            if len(self._commits) > _COMMITS_KEPT:
                self._commits.popitem(last=False)

    def await_seen(self, address: Address) -> Commit | None:
        """Return `find(address)`. If there is no commit, look again for up to `Durability.unseen_s` seconds, since this
        host may not see a new commit at once."""

        def look() -> Commit | None:
            files.look_again(self._root, _key(address))
            return self.find(address)

        return self.find(address) or until_seen(look, self._root.durability.unseen_s)

    def get(self, address: Address) -> Commit:
        """Return the commit at an address that must have one. Waits as `await_seen` does. Raises MissingOutput if there
        is no commit, and the errors that `find` raises."""
        commit = self.await_seen(address)
        if commit is None:
            raise MissingOutput(f"nothing is committed at {address} (looked for {self._root.at(_key(address))})")
        return commit

    def commit(self, commit: Commit, before: Callable[[], None] | None = None, *, closed: bool = True) -> Commit:
        """Make an output exist, and return the winning commit: `commit`, or an earlier commit at the same address. If
        an earlier commit won, the caller discards its own output. `before` writes the output, and ends before the
        commit exists. If `before` raises, nothing is committed. Raises ValueError for a commit that cannot be written
        as JSON.

        `closed`: True to look also into the segment, as a commit in a segment wins over a later one. A caller that
        passes False calls `closed_winner` soon afterwards. Until then a late attempt may take itself for the winner,
        and nobody waits for its output, since a segment has only steps of which no node runs (`close`).
        """
        data = encode(commit)
        is_ours = files.write_new(self._root, _key(commit.address), data, before)
        winner = self.closed_winner(commit.address) if closed or not is_ours else None
        winner = winner or (commit if is_ours else self.find(commit.address))
        if winner is None:
            raise StoreError(f"the commit record of {commit.address} in {self.url} was there and is gone")
        self._remember(winner)
        return winner

    def closed_winner(self, address: Address) -> Commit | None:
        """Return the commit at an address from the segment of its step. Return None if no segment has it.

        When a record is moved into a segment, its own file is removed. A late attempt can then create this file once
        more. Such a file is removed here. Raises DamagedCommit if the record is damaged.
        """
        closed = self._closed(address)
        if closed is None:
            return None
        key = _key(address)
        winner = decode(closed, self._root.at(segment_key(first_step(address.step))))
        single = files.read(self._root, key)
        # another driver may have reopened the segment, so that the single file has the winner's record
        if single is not None and not (is_whole(single) and decode(single, key).attempt == winner.attempt):
            files.remove(self._root, key)
        self._remember(winner)
        return winner

    def list(self, stage: str | None = None) -> Commits:
        """Return all commits, or the commits of one stage, ordered by (stage, step, shard)."""
        commits = [self.find(address) for address in self.addresses(stage)]
        return [commit for commit in commits if commit is not None]

    def addresses(self, stage: str | None = None, from_step: int = 0) -> Addresses:
        """Return the addresses of all records, or of the records of one stage, in the order of `list`. Damaged records
        are included. Steps before `from_step` are left out, and their segments are not read."""
        keys = list(files.keys(self._root))
        addresses = set(_addresses_of(keys))
        for first in map(segment_of, keys):
            if first is not None and first + SPAN > from_step:
                addresses.update(self._closed_addresses(first, stage))
        return sorted(address for address in addresses if stage in (None, address.stage) and address.step >= from_step)

    def open_addresses(self) -> Addresses:
        """Return the addresses of records outside segments, in the order of `list`."""
        return sorted(_addresses_of(files.keys(self._root)))

    def closed_until(self) -> int:
        """Return the first step whose records are not in a segment."""
        firsts = {segment_of(key) for key in files.keys(self._root)}
        step = 0
        while step in firsts:
            step += SPAN
        return step

    def close(self, first: int, addresses: Collection[Address]) -> None:
        """Move the records of `SPAN` steps into one segment. The first of these steps is `first`. `addresses`: the
        addresses of all records of these steps. Raises MissingOutput if one of the records does not exist.

        Only the driver may call this. No node of these steps may be running, except nodes whose output will be
        discarded.
        """
        if self._segment(first) is None:
            records = {address: files.read(self._root, _key(address)) for address in addresses}
            missing = [str(address) for address, data in records.items() if data is None]
            if missing:
                raise MissingOutput(
                    f"{self.url}: steps from {first} on are finished, but there is no record of {missing}"
                )
            data = encode_segment({address: data for address, data in records.items() if data is not None})
            files.write_new(self._root, segment_key(first), data)
        self._remove_closed(addresses)

    def reopen(self, addresses: Iterable[Address]) -> None:
        """Undo `close` for the segments of these addresses. Every record of such a segment becomes a single file again,
        and the segment is removed. No worker may run meanwhile."""
        for first in sorted({first_step(address.step) for address in addresses}):
            self._reopen(first)

    def reopen_damaged(self) -> None:
        """Reopen the segments with a damaged record, so that the record can be set aside. No worker may run meanwhile.
        Raises DamagedCommit if a segment's table of contents is damaged."""
        for first in list(map(segment_of, files.keys(self._root))):
            segment = self._segment(first) if first is not None else None
            if first is None or segment is None:
                continue
            if not all(is_whole(segment.record(address) or b"") for address in segment.places):
                self._reopen(first)

    def _reopen(self, first: int) -> None:
        segment = self._segment(first)
        if segment is not None:
            for address in segment.places:
                files.write(self._root, _key(address), segment.record(address) or b"")
            files.remove(self._root, segment_key(first))
            self._segments.pop(first, None)
            self._of_stage.clear()

    def _closed(self, address: Address) -> bytes | None:
        """Return the record of an address from the segment of its step; None if there is no such segment or record."""
        return None if (segment := self._segment(first_step(address.step))) is None else segment.record(address)

    def _segment(self, first: int) -> Segment | None:
        with self._reading:
            if first in self._segments:
                self._segments.move_to_end(first)
                return self._segments[first]
        data = files.read(self._root, segment_key(first))  # without the lock, since a slow store may take long
        if data is None:
            return None
        with self._reading:
            segment = self._segments[first] = decode_segment(data, self._root.at(segment_key(first)))
            if len(self._segments) > _SEGMENTS_KEPT:
                self._segments.popitem(last=False)
            return segment

    def _closed_addresses(self, first: int, stage: str | None) -> Iterable[Address]:
        """Return the addresses of one stage in the segment that begins with step `first`. If `stage` is None, return
        the addresses of all stages. The result for a single stage is cached."""
        if (first, stage) not in self._of_stage:
            segment = self._segment(first)
            places = segment.places.keys() if segment is not None else ()
            if stage is None:
                return places
            self._of_stage[first, stage] = tuple(address for address in places if address.stage == stage)
        return self._of_stage[first, stage]

    def _remove_closed(self, addresses: Iterable[Address]) -> None:
        """Remove the single files of records at these addresses. A file is removed only if a segment has its record
        too."""
        by_segment: dict[int, list[Address]] = {}
        for address in addresses:
            by_segment.setdefault(first_step(address.step), []).append(address)
        closed = []
        for first, of_segment in by_segment.items():
            if (segment := self._segment(first)) is not None:
                closed += [address for address in of_segment if address in segment.places]
        self.forget(closed)
        keys = [_key(address) for address in closed]
        for key in keys:
            files.remove(self._root, key)
        files.remove_empty(self._root, {os.path.dirname(key) for key in keys})

    def unknown_files(self) -> Keys:
        """Return the keys of files in the ledger's directory that are neither records nor segments."""
        return [key for key in files.keys(self._root) if not _KEY.fullmatch(key) and segment_of(key) is None]

    def set_aside(self, address: Address, url: str) -> str:
        """Move the record at an address to a unique name below the directory `url` and return its new path. Afterwards
        the address has no commit. No worker may run meanwhile."""
        aside = files.open_root(url, self._root.durability)
        key = f"{_key(address)}.{uuid.uuid4().hex[:8]}"
        data = files.read(self._root, _key(address))
        self._commits.pop(address, None)
        if data is not None:
            files.write(aside, key, data)
            files.remove(self._root, _key(address))
        return aside.at(key)

    def forget(self, addresses: Iterable[Address]) -> None:
        """Drop the cached commits at these addresses, because their records were moved or removed."""
        for address in addresses:
            self._commits.pop(address, None)

    def tidy(self) -> int:
        """Remove the leftovers of processes that died while they committed or closed steps. Return the number of
        temporary files that were removed. No worker may run meanwhile."""
        self.remove_closed_records()
        return files.remove_temporaries(self._root)

    def remove_closed_records(self) -> None:
        """Remove the files of records that are also in a segment. Such files are left by a driver that died while it
        closed steps, or by a late attempt whose process died before it removed its record."""
        self._remove_closed(self.open_addresses())


def _addresses_of(keys: Iterable[str]) -> Iterator[Address]:
    """Yield the addresses of the records that are single files. `keys`: the files below the ledger."""
    for match in filter(None, map(_KEY.fullmatch, keys)):
        yield Address(match["stage"], int(match["step"]), int(match["shard"]))


def _key(address: Address) -> str:
    return f"{address}.json"


# ---- segments --------------------------------------------------------------------------------------------

SPAN = 16
"""Number of steps in a segment. With 64 shards a segment has some 18 MB."""
FORMAT = 1
_SEGMENT = re.compile(r"closed/steps_(\d{6,})\.segment")


@dataclass(frozen=True)
class Segment:
    """The content of a segment's file, with the records of `SPAN` steps. Its table of contents has been checked. A
    record is checked only when it is decoded."""

    places: Mapping[Address, tuple[int, int]]
    """Address -> (start, end) of its record in `data`."""
    data: bytes

    def record(self, address: Address) -> bytes | None:
        place = self.places.get(address)
        return None if place is None else self.data[slice(*place)]


def first_step(step: int) -> int:
    """Return the first step of the segment that a step belongs to."""
    return step // SPAN * SPAN


def segment_key(first: int) -> str:
    """Return the key of the segment that begins with step `first`."""
    return f"closed/steps_{first:06d}.segment"


def segment_of(key: str) -> int | None:
    """Return the first step of the segment with this key, or None for another file's key."""
    match = _SEGMENT.fullmatch(key)
    return int(match[1]) if match else None


def encode_segment(records: Mapping[Address, bytes]) -> bytes:
    """Return the content of the file of a segment. `records`: address -> bytes of its record."""
    places, at = [], 0
    for address, record in sorted(records.items()):
        places.append([address.stage, address.step, address.shard, at, at + len(record)])
        at += len(record)
    listed = json.dumps(places, separators=(",", ":"))
    head = json.dumps({"format": FORMAT, "checksum": checksum(listed.encode()), "records": listed}) + "\n"
    return head.encode() + b"".join(record for _, record in sorted(records.items()))


def decode_segment(data: bytes, where: str) -> Segment:
    """Return the segment that `encode_segment` wrote.

    Raises:
        DamagedCommit: the table of contents is damaged. The message names `where`.
        StoreError: the segment has another format. The message names `where`.
    """
    line = data.find(b"\n") + 1
    try:
        head = json.loads(data[:line])
        listed, stated, form = head["records"], head["checksum"], head["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCommit(f"{where}: is not what was written ({error})") from error
    if checksum(str(listed).encode()) != stated:
        raise DamagedCommit(f"{where}: is not what was written (its table of contents does not have its checksum)")
    if form != FORMAT:
        raise StoreError(f"{where}: format {form!r}, this version reads {FORMAT}")
    places = {Address(stage, step, shard): (line + a, line + b) for stage, step, shard, a, b in json.loads(listed)}
    return Segment(places, data)


# ---- deleted arrays --------------------------------------------------------------------------------------


DROPPED = "dropped.json"
DROPPED_FORMAT = 1
KEEP = "storage.keep.rollouts"
"""Key path of the setting that makes a run delete the arrays of old rollouts. It is used in files and messages."""


def read_dropped(run: files.Root) -> int:
    """Return the first step whose arrays were not deleted; 0 if nothing was deleted. Raises StoreError if
    `dropped.json`, which records this step, is damaged or of another format."""
    data = files.read(run, DROPPED)
    if data is None:
        return 0
    try:
        document = codec.document(data, DROPPED_FORMAT, run.at(DROPPED))
        before, stated = int(document["rollouts_before"]), document["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run.at(DROPPED)}: is not what was written ({error})") from error
    if stated != _dropped_sum(before):
        raise StoreError(f"{run.at(DROPPED)}: is not what was written (it does not have its checksum)")
    return before


def write_dropped(run: files.Root, before: int) -> None:
    """Record that the arrays of all steps before step `before` are deleted, or will be deleted next."""
    document = {"format": DROPPED_FORMAT, "rollouts_before": before, "by": KEEP, "checksum": _dropped_sum(before)}
    files.write(run, DROPPED, (json.dumps(document, indent=1) + "\n").encode())


def _dropped_sum(before: int) -> str:
    return checksum(f"{DROPPED_FORMAT} {KEEP} {before}".encode())

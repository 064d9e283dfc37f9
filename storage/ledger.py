"""The commit ledger: one small JSON file per output, whose existence makes the output exist (law 2).

    node  ──► output bytes under the attempt's own name ──► `Ledger.commit` (exclusive create) ──► winner | loser
    reader ─► `Ledger.find(address)` ──► Commit: what there is, and what it was made from

Files are `<stage>/step_000012/shard_0003.json` below the ledger's URL, in strict JSON (`storage/commits.py`). Those of
steps that are long over are kept many to a file, in segments (`storage/segments.py`); `find` looks there too, so that
nobody need know.

May import the standard library and storage only.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

from storage import files
from storage.address import Address
from storage.commits import Commit, decode, encode, is_whole
from storage.config import Durability
from storage.errors import DamagedCommit, MissingOutput, StoreError
from storage.retries import until_seen
from storage.segments import SPAN, Segment, decode_segment, encode_segment, first_step, segment_key, segment_of

_SEGMENTS_KEPT = 2
_KEY = re.compile(r"(?P<stage>[^/]+)/step_(?P<step>\d{6,})/shard_(?P<shard>\d{4,})\.json")


Commits = list[Commit]
Addresses = list[Address]
Keys = list[str]
"""Named, because `Ledger.list` hides the builtin inside the class."""


class Ledger:
    """Owns no handle, and keeps nothing but what it read of segments, which never change: every call asks the
    filesystem, so all processes see the same ledger."""

    def __init__(self, url: str, durability: Durability = files.DEFAULT) -> None:
        """`url`: the ledger's directory (a run's `ledger/`), a path or any fsspec URL."""
        self.url = url
        self._root = files.open_root(url, durability)
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._of_stage: dict[tuple[int, str | None], tuple[Address, ...]] = {}
        self._reading = threading.Lock()

    def find(self, address: Address) -> Commit | None:
        """The commit at an address, or None. Raises DamagedCommit, naming the file, for what is not the record that was
        written."""
        key, data = _key(address), files.read(self._root, _key(address))
        if data is None:
            key, data = segment_key(first_step(address.step)), self._closed(address)
        if data is None:
            return None
        where = self._root.at(key)
        commit = decode(data, where)
        if commit.address != address:
            raise DamagedCommit(f"{where}: holds the commit record of {commit.address}")
        return commit

    def await_seen(self, address: Address) -> Commit | None:
        """`find` for an address where there should be a commit: one that this host does not see yet is waited for
        (`Durability.unseen_s`)."""

        def look() -> Commit | None:
            files.look_again(self._root, _key(address))
            return self.find(address)

        return self.find(address) or until_seen(look, self._root.durability.unseen_s)

    def get(self, address: Address) -> Commit:
        """`await_seen` for an address where there must be a commit. Raises MissingOutput, and what `find` does."""
        found = self.await_seen(address)
        if found is None:
            raise MissingOutput(f"nothing is committed at {address} (looked for {self._root.at(_key(address))})")
        return found

    def commit(self, commit: Commit, before: Callable[[], None] | None = None) -> Commit:
        """Makes an output exist. Returns the winner: `commit`, or the one that was there first, in which case the
        caller discards its own output. `before`: writes the output, and is done before that exists; where it raises,
        nothing is committed. Raises ValueError for a commit that cannot be written as JSON."""
        data = encode(commit)
        if files.write_new(self._root, _key(commit.address), data, before):
            if self._closed(commit.address) is None:
                return commit
            files.remove(self._root, _key(commit.address))  # its step is long over: the file was free again
        winner = self.find(commit.address)
        if winner is None:
            raise StoreError(f"the commit record of {commit.address} in {self.url} was there and is gone")
        return winner

    def list(self, stage: str | None = None) -> Commits:
        """All commits, or one stage's, ordered by (stage, step, shard)."""
        commits = [self.find(address) for address in self.addresses(stage)]
        return [commit for commit in commits if commit is not None]

    def addresses(self, stage: str | None = None, from_step: int = 0) -> Addresses:
        """Where there are records, sound or not, in the order of `list`; no segment before `from_step` is read."""
        keys = list(files.keys(self._root))
        found = set(_addresses_of(keys))
        for first in map(segment_of, keys):
            if first is not None and first + SPAN > from_step:
                found.update(self._closed_addresses(first, stage))
        return sorted(address for address in found if stage in (None, address.stage) and address.step >= from_step)

    def open_addresses(self) -> Addresses:
        """Where there are records outside segments, in the order of `list`."""
        return sorted(_addresses_of(files.keys(self._root)))

    def closed_until(self) -> int:
        """The step before which all records are in segments."""
        firsts = {segment_of(key) for key in files.keys(self._root)}
        step = 0
        while step in firsts:
            step += SPAN
        return step

    def close(self, first: int, addresses: Collection[Address]) -> None:
        """Moves the records of the `SPAN` steps from `first` on, which are all there, into their segment. For the
        driver, when no node of these steps can be under way any more but one whose output does not count."""
        if self._segment(first) is None:
            records = {address: files.read(self._root, _key(address)) for address in addresses}
            missing = [str(address) for address, data in records.items() if data is None]
            if missing:
                raise MissingOutput(f"{self.url}: steps {first} and on are over, but there is no record of {missing}")
            data = encode_segment({address: data for address, data in records.items() if data is not None})
            files.write_new(self._root, segment_key(first), data)
        self._remove_closed(addresses)

    def reopen(self, addresses: Iterable[Address]) -> None:
        """Gives the records of the segments that hold these addresses files of their own again. For a driver while no
        worker is there, as is `reopen_damaged`."""
        for first in sorted({first_step(address.step) for address in addresses}):
            self._reopen(first)

    def reopen_damaged(self) -> None:
        """The same for segments in which a record is damaged, so that it can be set aside. Raises DamagedCommit where a
        segment's table of contents is."""
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
        """The record of an address whose step is closed."""
        return None if (segment := self._segment(first_step(address.step))) is None else segment.record(address)

    def _segment(self, first: int) -> Segment | None:
        with self._reading:
            if first in self._segments:
                self._segments.move_to_end(first)
                return self._segments[first]
            data = files.read(self._root, segment_key(first))
            if data is None:
                return None
            found = self._segments[first] = decode_segment(data, self._root.at(segment_key(first)))
            if len(self._segments) > _SEGMENTS_KEPT:
                self._segments.popitem(last=False)
            return found

    def _closed_addresses(self, first: int, stage: str | None) -> Iterable[Address]:
        """Of a segment's records; those of one stage are few, and are kept."""
        if (first, stage) not in self._of_stage:
            segment = self._segment(first)
            places = segment.places.keys() if segment is not None else ()
            if stage is None:
                return places
            self._of_stage[first, stage] = tuple(address for address in places if address.stage == stage)
        return self._of_stage[first, stage]

    def _remove_closed(self, addresses: Iterable[Address]) -> None:
        """Removes the files of records that are in segments."""
        keys = [_key(address) for address in addresses if self._closed(address) is not None]
        for key in keys:
            files.remove(self._root, key)
        files.remove_empty(self._root, {os.path.dirname(key) for key in keys})

    def strangers(self) -> Keys:
        """Keys of files in the ledger's directory that are not in a record's place."""
        return [key for key in files.keys(self._root) if not _KEY.fullmatch(key) and segment_of(key) is None]

    def set_aside(self, address: Address, url: str) -> str:
        """Moves the record at an address, whatever it is, to a name of its own below the directory `url`, so that the
        address has no commit; returns its new place. For a driver while no worker is there."""
        aside = files.open_root(url, self._root.durability)
        key = f"{_key(address)}.{uuid.uuid4().hex[:8]}"
        data = files.read(self._root, _key(address))
        if data is not None:
            files.write(aside, key, data)
            files.remove(self._root, _key(address))
        return aside.at(key)

    def tidy(self) -> int:
        """Removes what processes that died over a commit, or over closing steps, left; returns how many temporaries.
        For a driver while no worker is there."""
        self._remove_closed(self.open_addresses())
        return files.remove_temporaries(self._root)


def _addresses_of(keys: Iterable[str]) -> Iterator[Address]:
    """Where the records lie that have files of their own."""
    for match in filter(None, map(_KEY.fullmatch, keys)):
        yield Address(match["stage"], int(match["step"]), int(match["shard"]))


def _key(address: Address) -> str:
    return f"{address}.json"

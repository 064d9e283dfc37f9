"""The commit ledger: one small JSON file per output, whose existence makes the output exist (law 2).

    node  ──► output bytes under the attempt's own name ──► `Ledger.commit` (exclusive create) ──► winner | loser
    reader ─► `Ledger.find(address)` ──► Commit: what there is, and what it was made from

Files are `<stage>/step_000012/shard_0003.json` below the ledger's URL, in strict JSON. JSON has no NaN or infinity, so
a metric that is not finite is written as the string "NaN", "Infinity" or "-Infinity" and read back as that float;
`state` must be finite, since the next step computes with it.

Records of steps that are long over are kept many to a file, in segments (`storage/segments.py`); `find` looks there
too, so that nobody need know.

Two sums tell what a record is. `checksum`, its last field, is over all bytes of the file before it: a record that was
damaged, or changed by hand, is none. `content` is over what other nodes compute with (arrays, state, digest; not who
made it, when, how fast): a record names its inputs by it, so that an output that was lost and made again the same is
the same input.

May import the standard library and storage only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage import files
from storage.address import Address, Ref
from storage.checksum import checksum
from storage.config import Durability
from storage.errors import DamagedCommit, MissingOutput, StoreError
from storage.retries import until_seen
from storage.segments import SPAN, Segment, decode_segment, encode_segment, first_step, segment_key, segment_of

FORMAT = 2
"""Version of the file format; a reader refuses any other."""

_CHECKSUM = b',\n "checksum": "%s"\n}\n'
"""How a record ends; the sum is over all bytes before this."""
_NO_SUM = b"0" * 32

_SEGMENTS_KEPT = 2
_KEY = re.compile(r"(?P<stage>[^/]+)/step_(?P<step>\d{6,})/shard_(?P<shard>\d{4,})\.json")


@dataclass(frozen=True)
class ArrayInfo:
    """One committed array: its type, and the CRC-32 of its bytes in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class Input:
    """An output that was read: where, which attempt's, and what it was."""

    address: Address
    attempt: str
    content: str
    """`Commit.content` of it."""


@dataclass(frozen=True)
class Provenance:
    """What a node knows about its work before the work is done; `provenance_here` fills in this process."""

    inputs: tuple[Input, ...]
    weight_versions: tuple[int, ...]
    """Versions of the weights that took part, ascending; empty for none."""
    seed: int
    config_hash: str
    worker: str
    host: str
    pid: int
    started: float
    """Seconds since the epoch, as is `finished`."""
    numerics: str = ""
    """Fingerprint of what computed it: processor, compiler, kernels, versions (the whole is in the run's identity)."""


@dataclass(frozen=True)
class Commit:
    """The record of one output. `kind`, `rows` and `arrays` describe the stored record; stages that store no arrays
    (`update_policy`, `publish`) have kind None, 0 rows and no arrays."""

    address: Address
    attempt: str
    kind: str | None
    rows: int
    arrays: Mapping[str, ArrayInfo]
    provenance: Provenance
    finished: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """For people: nothing is computed from them."""
    state: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    """Of the weights that an update made, or that were published."""

    @property
    def content(self) -> str:
        """SHA-256, shortened, of what other nodes compute with: kind, rows, arrays, state, digest. Two outputs with the
        same content are the same input."""
        arrays = [(name, info.dtype, info.shape, info.crc32) for name, info in sorted(self.arrays.items())]
        parts = [str(self.address), self.kind, self.rows, arrays, dict(self.state), self.digest]
        return checksum(json.dumps(parts, sort_keys=True, allow_nan=False).encode())

    def ref(self) -> Ref:
        """What travels along the edges of the graph."""
        times = self.provenance.started, self.finished
        return Ref(self.address, self.attempt, dict(self.metrics), dict(self.state), *times)


Commits = list[Commit]
Addresses = list[Address]
Keys = list[str]
"""Named, because `Ledger.list` hides the builtin inside the class."""


def new_attempt(number: int = 0) -> str:
    """A name for an attempt that no other has: "a<number>-<8 hex digits>"; `number` is for people (retries)."""
    return f"a{number}-{uuid.uuid4().hex[:8]}"


def provenance_here(
    *,
    inputs: Iterable[Commit] = (),
    weight_versions: Iterable[int] = (),
    seed: int,
    config_hash: str,
    worker: str = "",
    started: float | None = None,
    numerics: str = "",
) -> Provenance:
    """Provenance of work done by this process, begun at `started` (default: now)."""
    return Provenance(
        inputs=tuple(Input(c.address, c.attempt, c.content) for c in inputs),
        weight_versions=tuple(sorted({int(v) for v in weight_versions})),
        seed=seed,
        config_hash=config_hash,
        worker=worker,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.time() if started is None else started,
        numerics=numerics,
    )


class Ledger:
    """Owns no handle, and keeps nothing but the segments read last, which never change: every call asks the filesystem,
    so all processes see the same ledger."""

    def __init__(self, url: str, durability: Durability = files.DEFAULT) -> None:
        """`url`: the ledger's directory (a run's `ledger/`), a path or any fsspec URL."""
        self.url = url
        self._root = files.open_root(url, durability)
        self._segments: OrderedDict[int, Segment] = OrderedDict()
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

    def commit(self, commit: Commit) -> Commit:
        """Makes an output exist. Returns the winner: `commit`, or the one that was there first, in which case the
        caller discards its own output. Raises ValueError for a commit that cannot be written as JSON."""
        data = encode(commit)
        if files.write_new(self._root, _key(commit.address), data):
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
            segment = self._segment(first) if first is not None and first + SPAN > from_step else None
            found |= segment.places.keys() if segment is not None else set()
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
            if not all(_is_whole(segment.record(address) or b"") for address in segment.places):
                self._reopen(first)

    def _reopen(self, first: int) -> None:
        segment = self._segment(first)
        if segment is not None:
            for address in segment.places:
                files.write(self._root, _key(address), segment.record(address) or b"")
            files.remove(self._root, segment_key(first))
            self._segments.pop(first, None)

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


def encode(commit: Commit) -> bytes:
    """The record as JSON bytes. Raises ValueError, naming the address, for a state that JSON cannot hold."""
    document = {"format": FORMAT, **dataclasses.asdict(commit)}
    document["metrics"] = {name: _write_float(value) for name, value in commit.metrics.items()}
    try:
        body = json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"commit of {commit.address} cannot be written as JSON: {error}") from error
    return body + _CHECKSUM % checksum(body).encode()


def decode(data: bytes, where: str = "commit record") -> Commit:
    """The inverse of `encode`.

    Raises:
        DamagedCommit: naming `where`; not JSON, or not what was written.
        StoreError: naming `where`; of another format, or with unknown or missing fields.
    """
    whole = _is_whole(data)
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DamagedCommit(f"{where}: is not what was written (not JSON: {error})") from error
    other = document.get("format") if isinstance(document, dict) else None
    if other != FORMAT and (whole or (other is not None and b"checksum" not in data)):  # one before 2 has no checksum
        raise StoreError(f"{where}: format {other!r}, this version reads {FORMAT}")
    if not whole:
        raise DamagedCommit(f"{where}: is not what was written (its bytes do not have its checksum)")
    del document["checksum"]
    del document["format"]
    fields = _checked(Commit, document, where)
    provenance = _checked(Provenance, fields["provenance"], f"{where}: provenance")
    provenance["inputs"] = tuple(
        Input(**(one | {"address": Address(**_checked(Address, one["address"], f"{where}: input"))}))
        for one in (_checked(Input, item, f"{where}: inputs") for item in provenance["inputs"])
    )
    provenance["weight_versions"] = tuple(provenance["weight_versions"])
    arrays = {name: _checked(ArrayInfo, info, f"{where}: array {name}") for name, info in fields["arrays"].items()}
    fields |= {
        "address": Address(**_checked(Address, fields["address"], f"{where}: address")),
        "provenance": Provenance(**provenance),
        "arrays": {name: ArrayInfo(**(info | {"shape": tuple(info["shape"])})) for name, info in arrays.items()},
        "metrics": {name: float(value) for name, value in fields["metrics"].items()},
    }
    return Commit(**fields)


def _is_whole(data: bytes) -> bool:
    """Whether a record's bytes have its checksum."""
    size = len(_CHECKSUM % _NO_SUM)
    return data[-size:] == _CHECKSUM % checksum(data[:-size]).encode()


def _addresses_of(keys: Iterable[str]) -> Iterator[Address]:
    """Where the records lie that have files of their own."""
    for match in filter(None, map(_KEY.fullmatch, keys)):
        yield Address(match["stage"], int(match["step"]), int(match["shard"]))


def _key(address: Address) -> str:
    return f"{address}.json"


def _write_float(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _checked(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    """`value` if it is an object with exactly the fields of the dataclass `kind`."""
    names = {f.name for f in dataclasses.fields(kind)}
    given = set(value) if isinstance(value, dict) else set()
    if given != names:
        raise StoreError(f"{where}: unknown {sorted(given - names)}, missing {sorted(names - given)}")
    return dict(value)

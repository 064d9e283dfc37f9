"""The commit ledger: one small JSON file per output, whose existence makes the output exist (law 2).

    node  ──► output bytes under the attempt's own name ──► `Ledger.commit` (exclusive create) ──► winner | loser
    reader ─► `Ledger.find(address)` ──► Commit: what there is, and what it was made from

Files are `<stage>/step_000012/shard_0003.json` below the ledger's URL, in strict JSON. JSON has no NaN or infinity, so
a metric that is not finite is written as the string "NaN", "Infinity" or "-Infinity" and read back as that float;
`state` must be finite, since the next step computes with it.

May import the standard library and storage only.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage import files
from storage.address import Address, Ref
from storage.errors import StoreError

FORMAT = 1
"""Version of the file format; a reader refuses any other."""

_KEY = re.compile(r"(?P<stage>[^/]+)/step_(?P<step>\d{6,})/shard_(?P<shard>\d{4,})\.json")


@dataclass(frozen=True)
class ArrayInfo:
    """One committed array: its type, and the CRC-32 of its bytes in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class Input:
    """An output that was read: where, and which attempt's."""

    address: Address
    attempt: str


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
    state: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    """Of the weights that an update made."""

    def ref(self) -> Ref:
        """What travels along the edges of the graph."""
        return Ref(self.address, self.attempt, dict(self.metrics), dict(self.state))


Commits = list[Commit]
"""Named, because `Ledger.list` hides the builtin inside the class."""


def new_attempt(number: int = 0) -> str:
    """A name for an attempt that no other has: "a<number>-<8 hex digits>"; `number` is for people (retries)."""
    return f"a{number}-{uuid.uuid4().hex[:8]}"


def provenance_here(
    *,
    inputs: Iterable[Ref | Commit] = (),
    weight_versions: Iterable[int] = (),
    seed: int,
    config_hash: str,
    worker: str = "",
    started: float | None = None,
    numerics: str = "",
) -> Provenance:
    """Provenance of work done by this process, begun at `started` (default: now)."""
    return Provenance(
        inputs=tuple(Input(r.address, r.attempt) for r in inputs),
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
    """Owns no handle and caches nothing: every call asks the filesystem, so all processes see the same ledger."""

    def __init__(self, url: str) -> None:
        """`url`: the ledger's directory (a run's `ledger/`), a path or any fsspec URL."""
        self.url = url
        self._root = files.open_root(url)

    def find(self, address: Address) -> Commit | None:
        """The commit at an address, or None. Raises StoreError for a file that is not a commit record."""
        data = files.read(self._root, _key(address))
        return None if data is None else decode(data, f"commit record of {address} in {self.url}")

    def commit(self, commit: Commit) -> Commit:
        """Makes an output exist. Returns the winner: `commit`, or the one that was there first, in which case the
        caller discards its own output. Raises ValueError for a commit that cannot be written as JSON."""
        data = encode(commit)
        if files.write_new(self._root, _key(commit.address), data):
            return commit
        winner = self.find(commit.address)
        if winner is None:
            raise StoreError(f"the commit record of {commit.address} in {self.url} was there and is gone")
        return winner

    def list(self, stage: str | None = None) -> Commits:
        """All commits, or one stage's, ordered by (stage, step, shard)."""
        found = []
        for key in files.keys(self._root):
            match = _KEY.fullmatch(key)
            if match and stage in (None, match["stage"]):
                found.append(Address(match["stage"], int(match["step"]), int(match["shard"])))
        commits = [self.find(address) for address in sorted(found)]
        return [commit for commit in commits if commit is not None]


def encode(commit: Commit) -> bytes:
    """The record as JSON bytes. Raises ValueError, naming the address, for a state that JSON cannot hold."""
    document = {"format": FORMAT, **dataclasses.asdict(commit)}
    document["metrics"] = {name: _write_float(value) for name, value in commit.metrics.items()}
    try:
        return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"commit of {commit.address} cannot be written as JSON: {error}") from error


def decode(data: bytes, where: str = "commit record") -> Commit:
    """The inverse of `encode`. Raises StoreError, naming `where`, for another format or unknown or missing fields."""
    try:
        document = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{where}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        given = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise StoreError(f"{where}: format {given!r}, this version reads {FORMAT}")
    del document["format"]
    fields = _checked(Commit, document, where)
    provenance = _checked(Provenance, fields["provenance"], f"{where}: provenance")
    provenance["inputs"] = tuple(
        Input(Address(**_checked(Address, one["address"], f"{where}: input")), one["attempt"])
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

"""The record of one output: what there is, what it was made from, by whom and when; and its JSON.

JSON has no NaN or infinity, so a metric that is not finite is written as the string "NaN", "Infinity" or "-Infinity"
and read back as that float; `state` must be finite, since the next step computes with it.

Two sums tell what a record is. `checksum`, its last field, is over all bytes of the file before it: a record that was
damaged, or changed by hand, is none. `content` is over what other nodes compute with (arrays, state, digest; not who
made it, when, how fast): a record names its inputs by it, so that an output that was lost and made again the same is
the same input.

May import the standard library and storage.{address, checksum, errors}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.address import Address, Ref
from storage.checksum import checksum
from storage.errors import DamagedCommit, StoreError

FORMAT = 2
"""Version of the file format; a reader refuses any other."""

_CHECKSUM = b',\n "checksum": "%s"\n}\n'
"""How a record ends; the sum is over all bytes before this."""
_NO_SUM = b"0" * 32


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
    whole = is_whole(data)
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


def is_whole(data: bytes) -> bool:
    """Whether a record's bytes have its checksum."""
    size = len(_CHECKSUM % _NO_SUM)
    return data[-size:] == _CHECKSUM % checksum(data[:-size]).encode()


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

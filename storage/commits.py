"""The commit record of one output, and its JSON form. The record states what the output is, from what it was made, and
who made it when.

JSON has no NaN or infinity. A metric that is not finite is written as the string "NaN", "Infinity" or "-Infinity" and
read back as that float. `state` must be finite, because the next step computes with it.

A record has two sums. `checksum`, its last field, covers all earlier bytes of the file, so a damaged or edited record
is detected. `content` covers the facts that other nodes compute with (arrays, state, digest), but not who made the
output, when, or how fast. A record names its inputs by their `content`, so an output that was lost and made again with
the same content is the same input.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage import codec
from storage.address import Address, Ref
from storage.errors import DamagedCommit, StoreError

FORMAT = 2
"""Version of the file format. A reader refuses any other version."""

_CHECKSUM = b',\n "checksum": "%s"\n}\n'
"""The end of a record. The sum covers all bytes before it."""
_SUM_BYTES = len(_CHECKSUM % (b"0" * 32))
_FORMAT = b'{\n "format": %d,' % FORMAT
"""The beginning of a record."""


@dataclass(frozen=True)
class ArrayInfo:
    """Type and shape of a committed array, and the CRC-32 of its bytes (in C order, little-endian)."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class Input:
    """An output that a node read: its address, its attempt and its content."""

    address: Address
    attempt: str
    content: str
    """Digest of the output that was read: the property `content` of its commit."""


@dataclass(frozen=True)
class Provenance:
    """How an output was made: from which inputs, with which weights, seed and config, and by which process.
    `provenance_here` returns the provenance of work in this process."""

    inputs: tuple[Input, ...]
    weight_versions: tuple[int, ...]
    """Versions of the weights that were used, ascending; empty if none."""
    seed: int
    config_hash: str
    worker: str
    host: str
    pid: int
    started: float
    """Start of the work, in seconds since the epoch. `Commit.finished` is its end."""
    numerics: str = ""
    """Fingerprint of the processor, compiler, kernels and versions that computed the output. The run's identity has the
    full text."""


@dataclass(frozen=True)
class Commit:
    """The description of one output, as the ledger stores it. `kind`, `rows` and `arrays` describe the arrays of the
    output. For stages without arrays (`update_policy`, `publish`), `kind` is None, `rows` is 0, and `arrays` is empty.
    """

    address: Address
    attempt: str
    kind: str | None
    rows: int
    arrays: Mapping[str, ArrayInfo]
    provenance: Provenance
    finished: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics for people. Nothing is computed from them."""
    state: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    """Digest of the weights that an update made or that `publish` published. None for other stages."""

    @property
    def content(self) -> str:
        """Return a shortened SHA-256 of the facts that other nodes compute with: address, kind, rows, arrays, state,
        digest. Two outputs with the same content are the same input."""
        arrays = [(name, info.dtype, info.shape, info.crc32) for name, info in sorted(self.arrays.items())]
        parts = [str(self.address), self.kind, self.rows, arrays, dict(self.state), self.digest]
        return checksum(json.dumps(parts, sort_keys=True, allow_nan=False).encode())

    def ref(self) -> Ref:
        """Return the reference that is passed between nodes instead of the output's data. It has the address, the
        attempt, the metrics, the state and the times of the work."""
        times = self.provenance.started, self.finished
        return Ref(self.address, self.attempt, dict(self.metrics), dict(self.state), *times)


def new_attempt(number: int = 0) -> str:
    """Return a unique name for an attempt: "a<number>-<8 hex digits>". `number` is the count of retries, for
    people who read the name. Only the hex digits make the name unique."""
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
    """Return the provenance of work done by this process, begun at `started` (default: now)."""
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
    """Return the record as JSON bytes. Raises ValueError, naming the address, if the state does not fit into JSON."""
    metrics = {name: _write_float(value) for name, value in commit.metrics.items()}
    document = {"format": FORMAT, **vars(commit), "metrics": metrics}
    try:
        body = codec.encode(document, indent=1, allow_nan=False).removesuffix("\n}").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"commit of {commit.address} cannot be written as JSON: {error}") from error
    return body + _CHECKSUM % checksum(body).encode()


def decode(data: bytes, where: str = "commit record") -> Commit:
    """Return the commit that `encode` wrote.

    Raises:
        DamagedCommit: `data` is not JSON, or not what was written. The message names `where`.
        StoreError: `data` is of another format, or has unknown or missing fields. The message names `where`.
    """
    if not (data.startswith(_FORMAT) and is_whole(data)):
        raise _fault(data, where)
    try:
        return codec.decode(Commit, b"{" + data[len(_FORMAT) : -_SUM_BYTES] + b"}", strict=False)
    except codec.NotARecord as error:
        raise StoreError(f"{where}: {error}") from error


def _fault(data: bytes, where: str) -> StoreError:
    """Return the error to raise for a record: StoreError if it is of another format, or else DamagedCommit."""
    try:
        document = json.loads(data)
    except ValueError as error:
        return DamagedCommit(f"{where}: is not what was written (not JSON: {error})")
    other = document.get("format") if isinstance(document, dict) else None
    # Format 1 had no checksum.
    if other != FORMAT and (is_whole(data) or (other is not None and b"checksum" not in data)):
        return StoreError(f"{where}: format {other!r}, this version reads {FORMAT}")
    return DamagedCommit(f"{where}: is not what was written (its bytes do not have its checksum)")


def is_whole(data: bytes) -> bool:
    """Return True if a record's bytes match its checksum."""
    return data[-_SUM_BYTES:] == _CHECKSUM % checksum(data[:-_SUM_BYTES]).encode()


def _write_float(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


# ---- checksum --------------------------------------------------------------------------------------------


def checksum(data: bytes) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of `data`. They detect damage, not forgery."""
    return hashlib.sha256(data).hexdigest()[:32]

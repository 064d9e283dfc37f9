"""Segments of a ledger: the records of steps that are over, `SPAN` steps to a file.

A run of 10,000 steps has 150,000 records: as files of their own they take minutes to list and to read on a network
filesystem, and a run is resumed from what they are.

    closed/steps_000016.segment     a line of JSON: where each record lies, and its own checksum
                                    the records as they were written, one after the other

A segment is made once, from records that all exist, before their files are removed, and never changes: whoever misses a
file finds the record here. May import storage.{address, checksum, errors} and the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from storage.address import Address
from storage.checksum import checksum
from storage.errors import DamagedCommit, StoreError

SPAN = 16
"""Steps in a segment: with 64 shards some 18 MB."""
FORMAT = 1
_SEGMENT = re.compile(r"closed/steps_(\d{6,})\.segment")


@dataclass(frozen=True)
class Segment:
    """A segment as it was read; records are checked by whoever decodes them."""

    places: Mapping[Address, tuple[int, int]]
    """Where each record lies in `data`: from, to."""
    data: bytes

    def record(self, address: Address) -> bytes | None:
        place = self.places.get(address)
        return None if place is None else self.data[slice(*place)]


def first_step(step: int) -> int:
    """Of the segment that a step belongs to."""
    return step // SPAN * SPAN


def segment_key(first: int) -> str:
    """Of the segment that begins with a step."""
    return f"closed/steps_{first:06d}.segment"


def segment_of(key: str) -> int | None:
    """The step that the segment of this key begins with; None for another file's key."""
    match = _SEGMENT.fullmatch(key)
    return int(match[1]) if match else None


def encode_segment(records: Mapping[Address, bytes]) -> bytes:
    """The file's content."""
    places, at = [], 0
    for address, record in sorted(records.items()):
        places.append([address.stage, address.step, address.shard, at, at + len(record)])
        at += len(record)
    listed = json.dumps(places, separators=(",", ":"))
    head = json.dumps({"format": FORMAT, "checksum": checksum(listed.encode()), "records": listed}) + "\n"
    return head.encode() + b"".join(record for _, record in sorted(records.items()))


def decode_segment(data: bytes, where: str) -> Segment:
    """The inverse of `encode_segment`.

    Raises:
        DamagedCommit: naming `where`, if its table of contents is not what was written.
        StoreError: naming `where`, if it is of another format.
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

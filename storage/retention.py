"""The record of arrays that were deleted (`dropped.json`), written before the first file goes."""

from __future__ import annotations

import json

from storage import codec, files
from storage.commits import checksum
from storage.errors import StoreError

DROPPED = "dropped.json"
FORMAT = 1
KEY = "storage.keep.rollouts"
"""The setting under which rollouts are deleted."""


def read_dropped(run: files.Root) -> int:
    """Return the first step whose arrays were not deleted; 0 if none were. Raises StoreError for a damaged record or
    one of another format."""
    data = files.read(run, DROPPED)
    if data is None:
        return 0
    try:
        document = codec.document(data, FORMAT, run.at(DROPPED))
        before, stated = int(document["rollouts_before"]), document["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run.at(DROPPED)}: is not what was written ({error})") from error
    if stated != _sum(before):
        raise StoreError(f"{run.at(DROPPED)}: is not what was written (it does not have its checksum)")
    return before


def write_dropped(run: files.Root, before: int) -> None:
    """Record that the arrays of the steps before this one are deleted or about to be."""
    document = {"format": FORMAT, "rollouts_before": before, "by": KEY, "checksum": _sum(before)}
    files.write(run, DROPPED, (json.dumps(document, indent=1) + "\n").encode())


def _sum(before: int) -> str:
    return checksum(f"{FORMAT} {KEY} {before}".encode())

"""Which arrays of a run were let go: a record beside them, written before the first file goes.

    dropped.json   {"format": 1, "rollouts_before": 30, "by": "storage.keep.rollouts", "checksum": "..."}

Of steps before that one the commit records stay, and the arrays are gone or about to go; evaluations are not among
them. A reader that misses a file looks here, and says "dropped" instead of "missing".

May import storage.{checksum, errors, files}.
"""

from __future__ import annotations

import json

from storage import files
from storage.checksum import checksum
from storage.errors import StoreError

DROPPED = "dropped.json"
FORMAT = 1
KEY = "storage.keep.rollouts"
"""The setting that lets rollouts go."""


def read_dropped(run: files.Root) -> int:
    """The first step whose arrays were not dropped; 0 where none were. Raises StoreError for a record that is not what
    was written, or of another format."""
    data = files.read(run, DROPPED)
    if data is None:
        return 0
    try:
        document = json.loads(data)
        before, form, stated = int(document["rollouts_before"]), document["format"], document["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run.at(DROPPED)}: is not what was written ({error})") from error
    if form != FORMAT:
        raise StoreError(f"{run.at(DROPPED)}: format {form!r}, this version reads {FORMAT}")
    if stated != _sum(before):
        raise StoreError(f"{run.at(DROPPED)}: is not what was written (it does not have its checksum)")
    return before


def write_dropped(run: files.Root, before: int) -> None:
    """States that arrays of steps before this one are gone or about to go."""
    document = {"format": FORMAT, "rollouts_before": before, "by": KEY, "checksum": _sum(before)}
    files.write(run, DROPPED, (json.dumps(document, indent=1) + "\n").encode())


def _sum(before: int) -> str:
    return checksum(f"{FORMAT} {KEY} {before}".encode())

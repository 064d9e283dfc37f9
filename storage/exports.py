"""The sums of an exported model's files, in a record beside them, written last.

    export.json   {"format": 1, "files": {"model.safetensors": {"bytes": ..., "crc32": ...}, ...}, "checksum": "..."}

A directory without this record is somebody else's model, or an export by an earlier version: nothing is known of it.
May import the standard library and storage.{checkpoints, checksum}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from storage.checkpoints import sum_file
from storage.checksum import checksum

RECORD = "export.json"
FORMAT = 1


def write_sums(directory: Path) -> None:
    """Says what every file below a directory is, now that all of them are written."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / RECORD)
    sums = {file.relative_to(directory).as_posix(): asdict(sum_file(file)) for file in files}
    document = {"format": FORMAT, "files": sums, "checksum": _checksum(sums)}
    (directory / RECORD).write_text(json.dumps(document, indent=1) + "\n")


def has_sums(directory: Path) -> bool:
    """Whether the record is there, in whatever state."""
    return (directory / RECORD).exists()


def export_faults(directory: Path) -> Iterator[str]:
    """What is not as it was exported, of a directory that has the record; every byte is read. Files that somebody has
    added are no matter."""
    try:
        document = json.loads((directory / RECORD).read_bytes())
        sums, stated, form = document["files"], document["checksum"], document["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{directory / RECORD}: cannot be read ({type(error).__name__}: {error})"
        return
    if form != FORMAT:
        yield f"{directory / RECORD}: format {form!r}, this version reads {FORMAT}"
        return
    if stated != _checksum(sums):
        yield f"{directory / RECORD}: is not what was written (it does not have its checksum)"
        return
    for name, entry in sums.items():
        try:
            found = asdict(sum_file(directory / name))
        except OSError as error:
            yield f"{directory / name}: cannot be read ({error.strerror})"
            continue
        if found["bytes"] != entry["bytes"]:
            yield f"{directory / name}: has {found['bytes']} bytes of {entry['bytes']}"
        elif found != entry:
            yield f"{directory / name}: is not what was exported"


def _checksum(sums: object) -> str:
    return checksum(json.dumps(sums, sort_keys=True).encode())

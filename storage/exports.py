"""Exported models. An export has a record of its files, which is written last:

    export.json   {"format": 1, "files": {"model.safetensors": {"bytes": ..., "crc32": ...}, ...}, "checksum": "..."}

A directory without this record is another program's model, or the export of an earlier Stageline. It cannot be checked.

The exported versions of a run are directories like `v000012`. With an object store, an export is uploaded before its
directory gets the name of a version (`storage/copies.py`). So a directory with the name of a version is complete, and
its copy in the object store is complete too.

    <root>/.v000012/   being written, or left by a process that died; an object of this name notes it in the store
    <root>/v000012/    complete
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from storage import codec, files
from storage.checkpoints import sum_file, version_of
from storage.commits import checksum
from storage.copies import Copies
from storage.errors import StoreError

RECORD = "export.json"
EXPORT_FORMAT = 1


def write_sums(directory: Path) -> None:
    """Write `export.json` with the size and the CRC-32 of every file below a directory. Call this after all these files
    are written."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / RECORD)
    sums = {file.relative_to(directory).as_posix(): asdict(sum_file(file)) for file in paths}
    document = {"format": EXPORT_FORMAT, "files": sums, "checksum": _checksum(sums)}
    (directory / RECORD).write_text(json.dumps(document, indent=1) + "\n")


def has_sums(directory: Path) -> bool:
    """Return True if the directory has the file `export.json` with the checksums. The file may be damaged."""
    return (directory / RECORD).exists()


def export_faults(directory: Path) -> Iterator[str]:
    """Compare the files of an exported directory with the checksums in its `export.json`, and yield a text for each
    fault. Reads every byte. Files that `export.json` does not list are no fault. A missing or damaged `export.json` is
    a fault."""
    try:
        document = codec.document((directory / RECORD).read_bytes(), EXPORT_FORMAT, str(directory / RECORD))
        sums, stated = document["files"], document["checksum"]
    except StoreError as error:
        yield str(error)
        return
    except (OSError, KeyError) as error:
        yield f"{directory / RECORD}: cannot be read ({type(error).__name__}: {error})"
        return
    if stated != _checksum(sums):
        yield f"{directory / RECORD}: is not what was written (it does not have its checksum)"
        return
    for name, entry in sums.items():
        try:
            measured = asdict(sum_file(directory / name))
        except OSError as error:
            yield f"{directory / name}: cannot be read ({error.strerror})"
            continue
        if measured["bytes"] != entry["bytes"]:
            yield f"{directory / name}: has {measured['bytes']} bytes of {entry['bytes']}"
        elif measured != entry:
            yield f"{directory / name}: is not what was exported"


def _checksum(sums: object) -> str:
    return checksum(json.dumps(sums, sort_keys=True).encode())


# ---- the exports of a run --------------------------------------------------------------------------------

_LEAVING = ".leaving-"
"""Prefix of the name of an export's directory while the directory is removed. The directory then has no version's name,
so it is not taken for an export."""


class Exports:
    """The exported versions below `root`. Keeps no file open."""

    def __init__(self, root: Path, store: files.Root | None = None) -> None:
        """`store`: directory in an object store, to which exports are uploaded; None: they stay on this filesystem."""
        self.root = root
        self._copies = None if store is None else Copies(store, RECORD)

    def place(self, version: int) -> Path:
        """Return the local directory of a version, whether it exists or not."""
        return self.root / f"v{version:06d}"

    def staged(self, version: int) -> Path:
        """Return the local directory in which a version is written, whether it exists or not."""
        return self.root / f".v{version:06d}"

    def begin(self, version: int) -> None:
        """Note that a version must be exported. Until `finish`, `clear_unfinished` returns this version. The note is
        the directory `staged`. With an object store, an object of this name is there too, so that the note outlives
        this disk."""
        self.staged(version).mkdir(parents=True, exist_ok=True)
        if self._copies is not None:
            files.write(self._copies.root, self.staged(version).name, b"begun\n")

    def finish(self, version: int, staged: Path) -> Path:
        """Rename the directory `staged` to the name of its version, and return the new path. The checksums must have
        been written before (`write_sums`). If there is an object store, upload the export first. Raises StoreError if
        the upload fails."""
        if self._copies is not None:
            self._copies.upload(staged, self.place(version).name)
            files.remove(self._copies.root, self.staged(version).name)
        return staged.rename(self.place(version))

    def versions(self) -> list[int]:
        """Return the versions that are exported, here or in the object store, ascending."""
        local = self.root.iterdir() if self.root.is_dir() else ()
        uploaded = () if self._copies is None else map(Path, self._copies.complete())
        return sorted({version for path in (*local, *uploaded) if (version := version_of(path)) is not None})

    def clear_unfinished(self, before: int) -> list[int]:
        """Return the versions below `before` whose exports were begun but not finished. Their files stay, and the
        caller should export these versions again.

        If a version below `before` is finished, remove the temporary directory and the note that an earlier,
        interrupted attempt at it left. No process may be writing an export below `before`.
        """
        names = [path.name for path in self.root.glob(".v*")]
        names += [] if self._copies is None else files.names(self._copies.root)
        staged = (int(name[2:]) for name in names if name.startswith(".v") and name[2:].isdecimal())
        begun = {version for version in staged if version < before}
        for version in begun.intersection(finished := self.versions()):
            shutil.rmtree(self.staged(version), ignore_errors=True)
            if self._copies is not None:
                files.remove(self._copies.root, self.staged(version).name)
        return sorted(begun.difference(finished))

    def fetch(self, version: int) -> Path | None:
        """Return the local directory of an export, or None if there is no such export. Downloads the export if it is
        only in the object store. Does not check the files for damage. Raises StoreError if the download fails."""
        place = self.place(version)
        if place.is_dir():
            return place
        if self._copies is None or self._copies.manifest(place.name) is None:
            return None
        arriving = self.root / f".arriving-{place.name}-{os.getpid()}"
        try:
            self._copies.download(place.name, arriving)
            arriving.rename(place)
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        return place

    def forget(self, version: int) -> None:
        """Remove the local files of an export that was uploaded. The object store keeps its copy. Does nothing if there
        is no object store."""
        if self._copies is not None:
            shutil.rmtree(self.place(version), ignore_errors=True)

    def drop(self, versions: Iterable[int]) -> None:
        """Remove the exports of these versions, and the leftovers of an earlier call that was interrupted."""
        for left in self.root.glob(f"{_LEAVING}*"):
            shutil.rmtree(left, ignore_errors=True)
        for version in {*versions}.intersection(self.versions()):
            place = self.place(version)
            if self._copies is not None:
                self._copies.remove(place.name)
            if place.is_dir():
                leaving = place.with_name(f"{_LEAVING}{place.name}")
                os.replace(place, leaving)
                shutil.rmtree(leaving, ignore_errors=True)

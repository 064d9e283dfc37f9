"""Directories of checkpoints. The last two steps of a save write the manifest and then rename the directory. After them
the checkpoint is complete.

    <root>/policy/v000012/checkpoint.json + the model's files
    <root>/policy/.v000012-<host>-<pid>-<hex>/     being written, or left by a process that died

The manifest has the size and CRC-32 of every file, a digest of itself, and what the writer states about the content
(`meta`). A reader goes through `newest_first` and takes the first version in which `verify` finds no fault.

Only local paths work (a node's disk, or a filesystem that all nodes mount): Megatron writes its checkpoints with its
own file calls, from many ranks into one directory.

An exported model has a similar record beside its files, written last:

    export.json   {"format": 1, "files": {"model.safetensors": {"bytes": ..., "crc32": ...}, ...}, "checksum": "..."}

A directory without this record is another program's model, or the export of an earlier Stageline. It cannot be checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from storage import codec
from storage.commits import checksum
from storage.config import Durability
from storage.errors import StoreError
from storage.files import DEFAULT, retried, sync_directory
from storage.host import process_alive

FORMAT = 2

_MANIFEST = "checkpoint.json"
_VERSION = re.compile(r"v(\d{6,})")
_BLOCK_BYTES = 1 << 20


def version_of(directory: Path) -> int | None:
    """Return the version in the name of a checkpoint's or export's directory, or None for another name."""
    match = _VERSION.fullmatch(directory.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file as it was written."""

    bytes: int
    crc32: int


class Checkpoints:
    """The checkpoints below `root`. Holds no handle; any number of processes may use the same root."""

    def __init__(self, root: str | Path, durability: Durability = DEFAULT) -> None:
        self.root = Path(root)
        self._fsync, self._retry_s = durability.fsync, durability.retry_s

    def begin(self, role: str, version: int) -> Path:
        """Return a new, empty directory to save into. In a gang rank 0 calls this and sends the path to the others."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = self.root / role / f".v{version:06d}-{owner}"
        retried(lambda: path.mkdir(parents=True, exist_ok=True), str(path), self._retry_s)
        return path

    def finish(
        self,
        role: str,
        version: int,
        path: Path,
        meta: Mapping[str, Any],
        sums: Mapping[str, FileSum] | None = None,
    ) -> Path:
        """Turn `path` (from `begin`) into the checkpoint of a version, after all ranks have written, and return its
        path. If the version exists already, keep it and discard `path`. `meta` is JSON that `verify` returns later.
        `sums` has the sum of every file by its path below `path`, and the files must be on the disk (see `sum_file`);
        with None all files are read here. Raises StoreError if the files are not those of `sums`."""
        if sums is None:
            files = sorted(p for p in path.rglob("*") if p.is_file())
            sums = {file.relative_to(path).as_posix(): sum_file(file, fsync=self._fsync) for file in files}
        document = {
            "format": FORMAT,
            "role": role,
            "version": version,
            "meta": dict(meta),
            "files": {name: asdict(found) for name, found in sorted(sums.items())},
        }
        fault = _faulty_size(path, document)
        if fault is not None:
            raise StoreError(fault)
        document["digest"] = _digest(document)
        (path / _MANIFEST).write_text(json.dumps(document, indent=1, allow_nan=False))
        if self._fsync:
            sum_file(path / _MANIFEST, fsync=True)
            for directory in [path, *(p for p in path.rglob("*") if p.is_dir())]:
                sync_directory(str(directory))
        target = self.place(role, version)
        if not _looks_whole(target):
            _discard(target)
            try:
                path.rename(target)
            except OSError:
                # Another process of a requeued run was faster: a rename never replaces a directory that has files.
                if not _looks_whole(target):
                    raise
            if self._fsync:
                sync_directory(str(target.parent))
        _discard(path)
        return target

    def place(self, role: str, version: int) -> Path:
        """Return the path of a version's checkpoint, whether it exists or not."""
        return self.root / role / f"v{version:06d}"

    def newest_first(self, role: str, at_most: int) -> list[int]:
        """Return the saved versions up to `at_most`, newest first. Their files may have been damaged since."""
        found = (version_of(path.parent) for path in (self.root / role).glob(f"v*/{_MANIFEST}"))
        return sorted((version for version in found if version is not None and version <= at_most), reverse=True)

    def versions(self, role: str) -> list[int]:
        """Return the versions with a complete checkpoint, ascending: the manifest can be read and every file has its
        size."""
        found = reversed(self.newest_first(role, at_most=sys.maxsize))
        return [version for version in found if _looks_whole(self.place(role, version))]

    def verify(
        self, role: str, version: int, share: tuple[int, int] = (0, 1), expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read every byte and return the saved `meta`. With `share` (i, n) read only every n-th file from the i-th on,
        so that n processes together read all files. `expected`: values that `meta` must have, by name. Raises
        StoreError, naming the fault, if a file is missing, has changed, or was saved with other values."""
        path = self.place(role, version)
        document = _read(path)
        if (document.get("role"), document.get("version")) != (role, version):
            raise StoreError(f"{path}: was saved as {document.get('role')} v{document.get('version')}")
        meta: dict[str, Any] = document["meta"]
        for name, wanted in (expected or {}).items():
            if meta.get(name) != wanted:
                raise StoreError(f"{path}: was saved with {name} {meta.get(name)}, and this run's is {wanted}")
        fault = _faulty_size(path, document)
        if fault is not None:
            raise StoreError(fault)
        for name, entry in list(document["files"].items())[share[0] :: share[1]]:
            found = retried(partial(sum_file, path / name), str(path / name), self._retry_s)
            if found.crc32 != entry["crc32"]:
                raise StoreError(f"{path}/{name}: is not what was saved")
        return meta

    def prune(self, role: str, keep: int, damaged: Collection[int] = (), every: int | None = None) -> list[int]:
        """Remove old checkpoints and return their versions. Keep the newest `keep` complete ones (the versions
        `damaged` do not count) and every version that is a multiple of `every`. Also remove directories that dead
        processes of this host began. Raises ValueError for keep < 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, given {keep}")
        complete = [version for version in self.versions(role) if version not in damaged]
        kept = complete[-keep:]
        removed = [version for version in complete[:-keep] if not _is_multiple(version, every)]
        for path in (self.root / role).glob("v*"):
            version = version_of(path)
            # Also remove older directories that an earlier prune left half removed.
            if version is not None and kept and version < kept[0] and not _is_multiple(version, every):
                _discard(path)
        own = re.compile(r"\.v\d{6,}-" + re.escape(socket.gethostname()) + r"-(\d+)-[0-9a-f]+")
        for path in (self.root / role).glob(".v*"):
            begun = own.fullmatch(path.name)
            if begun and not process_alive(int(begun[1])):
                _discard(path)
        return removed


def _is_multiple(version: int, every: int | None) -> bool:
    return every is not None and version % every == 0


def sum_file(file: Path, *, fsync: bool = False) -> FileSum:
    """Return size and CRC-32 of a file. With `fsync` the file is on the disk when this returns."""
    total = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            total, size = zlib.crc32(block, total), size + len(block)
        if fsync:
            os.fsync(stream.fileno())
    return FileSum(size, total)


def _looks_whole(path: Path) -> bool:
    """Return True if the manifest can be read and all of its files have their sizes."""
    try:
        return _faulty_size(path, _read(path)) is None
    except StoreError:
        return False


def _faulty_size(path: Path, document: Mapping[str, Any]) -> str | None:
    """Return which file is missing or has another size, or None."""
    for name, entry in document["files"].items():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{path}/{name}: is missing"
        if size != entry["bytes"]:
            return f"{path}/{name}: has {size} bytes of {entry['bytes']}"
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return the manifest. Raises StoreError if it is missing, damaged or of another format."""
    manifest = path / _MANIFEST
    try:
        data = manifest.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path}: no complete checkpoint") from None
    document = codec.document(data, FORMAT, str(manifest))
    if document.pop("digest", None) != _digest({"format": FORMAT, **document}):
        raise StoreError(f"{manifest}: is not what was saved")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _discard(path: Path) -> None:
    """Remove a checkpoint, manifest first, so that a half-removed directory is not taken for a checkpoint."""
    (path / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


# ---- exports ---------------------------------------------------------------------------------------------

RECORD = "export.json"
EXPORT_FORMAT = 1


def write_sums(directory: Path) -> None:
    """Write the record of all files below a directory. Call it after they are all written."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / RECORD)
    sums = {file.relative_to(directory).as_posix(): asdict(sum_file(file)) for file in files}
    document = {"format": EXPORT_FORMAT, "files": sums, "checksum": _checksum(sums)}
    (directory / RECORD).write_text(json.dumps(document, indent=1) + "\n")


def has_sums(directory: Path) -> bool:
    """Return True if the directory has the record, damaged or not."""
    return (directory / RECORD).exists()


def export_faults(directory: Path) -> Iterator[str]:
    """Yield the faults of an exported directory that has the record. Reads every byte. Additional files
    are no fault."""
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

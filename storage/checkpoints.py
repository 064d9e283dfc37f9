"""Directories of checkpoints. The last two steps of a save write the manifest and then rename the directory. The
checkpoint is complete after these two steps.

    <root>/policy/v000012/checkpoint.json + the model's files
    <root>/policy/.v000012-<host>-<pid>-<hex>/     being written, or left by a process that died

The manifest has the size and CRC-32 of every file, a digest of itself, and what the writer states about the content
(`meta`). A reader goes through `newest_first` and takes the first version in which `verify` finds no fault.

Megatron writes its checkpoints with its own file calls, from many ranks into one local directory (on a node's disk, or
on a filesystem that all nodes mount). With an object store, `finish` then uploads the checkpoint, and `fetch` downloads
it to a directory that lacks it (`storage/copies.py`). A checkpoint then counts as complete when it is complete in the
object store, because only the object store survives the loss of a host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import uuid
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from storage import codec, files
from storage.config import Durability
from storage.copies import Copies
from storage.errors import StoreError
from storage.files import DEFAULT, retried, sync_directory
from storage.host import process_alive

FORMAT = 2

MANIFEST = "checkpoint.json"
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
    """The checkpoints below `root`. Keeps no file open. Any number of processes may use the same root."""

    def __init__(self, root: str | Path, durability: Durability = DEFAULT, store: files.Root | None = None) -> None:
        """`store`: the directory of an object store to which checkpoints are uploaded; None: they stay local."""
        self.root = Path(root)
        self._copies = None if store is None else Copies(store, MANIFEST)
        self._fsync, self._retry_s = durability.fsync, durability.retry_s

    def begin(self, role: str, version: int) -> Path:
        """Return a new, empty directory to save into. In a gang, rank 0 calls this and sends the path to the other
        ranks."""
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
        """Turn `path` (from `begin`) into the checkpoint of a version, and return the checkpoint's path. Call it after
        all ranks have written. If the version exists already, keep it and discard `path`. With an object store, the
        checkpoint is uploaded before this returns.

        Args:
            meta: JSON that `verify` returns later.
            sums: path of a file below `path` -> its size and checksum. The files must be on the disk (see `sum_file`).
                None: all files are read here.

        Raises:
            StoreError: a file is missing; a file has another size than `sums` says; or the upload failed.
        """
        if sums is None:
            paths = sorted(p for p in path.rglob("*") if p.is_file())
            sums = {file.relative_to(path).as_posix(): sum_file(file, fsync=self._fsync) for file in paths}
        document = {
            "format": FORMAT,
            "role": role,
            "version": version,
            "meta": dict(meta),
            "files": {name: asdict(file_sum) for name, file_sum in sorted(sums.items())},
        }
        fault = _faulty_size(path, document)
        if fault is not None:
            raise StoreError(fault)
        document["digest"] = codec.digest(document)
        (path / MANIFEST).write_text(json.dumps(document, indent=1, allow_nan=False))
        if self._fsync:
            sum_file(path / MANIFEST, fsync=True)
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
        if self._copies is not None:
            self._copies.upload(target, _key(role, version))
        return target

    def fetch(self, role: str, version: int) -> None:
        """Download a checkpoint that is only in the object store. Do nothing if it is on this disk, or if the run has
        no object store. Raises StoreError if the checkpoint is not complete there either."""
        target = self.place(role, version)
        if self._copies is None or _looks_whole(target):
            return
        fault = self._fault_there(role, version)
        if fault is not None:
            raise StoreError(fault)
        path = self.begin(role, version)
        try:
            self._copies.download(_key(role, version), path)
            _discard(target)
            path.rename(target)
        finally:
            _discard(path)

    def forget(self, role: str, version: int) -> None:
        """Remove the local files of a checkpoint that was uploaded. The object store keeps its copy. Do nothing if the
        run has no object store."""
        if self._copies is not None:
            _discard(self.place(role, version))

    def place(self, role: str, version: int) -> Path:
        """Return the path of a version's checkpoint, whether it exists or not."""
        return self.root / _key(role, version)

    def newest_first(self, role: str, at_most: int) -> list[int]:
        """Return the saved versions up to `at_most`, newest first. Their files may have been damaged since."""
        versions = {version_of(path.parent) for path in (self.root / role).glob(f"v*/{MANIFEST}")} | self._uploaded(
            role
        )
        return sorted((version for version in versions if version is not None and version <= at_most), reverse=True)

    def versions(self, role: str) -> list[int]:
        """Return the versions with a complete checkpoint, ascending. A checkpoint is complete if its manifest can be
        read and every file has the size that the manifest states. If the run has an object store, only the copy in the
        object store is checked. Otherwise the local files are checked."""
        if self._copies is not None:
            return sorted(version for version in self._uploaded(role) if self._fault_there(role, version) is None)
        candidates = reversed(self.newest_first(role, at_most=sys.maxsize))
        return [version for version in candidates if _looks_whole(self.place(role, version))]

    def _uploaded(self, role: str) -> set[int]:
        """Return the versions that were uploaded. Their files may have been damaged since."""
        keys = () if self._copies is None else self._copies.complete(role)
        return {version for key in keys if (version := version_of(Path(key))) is not None}

    def _fault_there(self, role: str, version: int) -> str | None:
        """Return a text that says why a checkpoint is not complete in the object store, or None if it is complete."""
        assert self._copies is not None
        key = _key(role, version)
        where, manifest = self._copies.root.at(key), self._copies.manifest(key)
        if manifest is None:
            return f"{where}: no complete checkpoint"
        try:
            document = _decoded(manifest, f"{where}/{MANIFEST}")
        except StoreError as error:
            return str(error)
        return self._copies.fault(key, {name: int(entry["bytes"]) for name, entry in document["files"].items()})

    def verify(
        self, role: str, version: int, share: tuple[int, int] = (0, 1), expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read every byte and return the saved `meta`. With `share` (i, n), read only every n-th file, beginning with
        file i (counted from 0). So n processes together read all files. `expected`: name -> value that `meta` must
        have. Raises StoreError, naming the fault, if a file is missing or has changed. Also raises it if the checkpoint
        was saved for another role or version, or with other values than `expected`."""
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
            measured = retried(partial(sum_file, path / name), str(path / name), self._retry_s)
            if measured.crc32 != entry["crc32"]:
                raise StoreError(f"{path}/{name}: is not what was saved")
        return meta

    def prune(self, role: str, keep: int, damaged: Collection[int] = (), every: int | None = None) -> list[int]:
        """Remove old checkpoints. Return the removed versions that were complete and not in `damaged`. Keep the newest
        `keep` complete checkpoints and everything newer than the oldest of these. Versions in `damaged` do not count as
        complete. Also keep every version that is a multiple of `every`. Also remove directories that dead processes of
        this host began. Raises ValueError for keep < 1."""
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
        if self._copies is not None and kept:
            for name in self._copies.names(role):
                version = version_of(Path(name))
                if version is not None and version < kept[0] and not _is_multiple(version, every):
                    self._copies.remove(f"{role}/{name}")
        own = re.compile(r"\.v\d{6,}-" + re.escape(socket.gethostname()) + r"-(\d+)-[0-9a-f]+")
        for path in (self.root / role).glob(".v*"):
            begun = own.fullmatch(path.name)
            if begun and not process_alive(int(begun[1])):
                _discard(path)
        return removed


def _key(role: str, version: int) -> str:
    """Return a checkpoint's path below the local root, which is also its key in an object store."""
    return f"{role}/v{version:06d}"


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
    """Return True if the manifest can be read and every file has the size that the manifest states."""
    try:
        return _faulty_size(path, _read(path)) is None
    except StoreError:
        return False


def _faulty_size(path: Path, document: Mapping[str, Any]) -> str | None:
    """Return a text about the first file that is missing or has another size than the manifest says. Return None if
    there is no such file."""
    for name, entry in document["files"].items():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{path}/{name}: is missing"
        if size != entry["bytes"]:
            return f"{path}/{name}: has {size} bytes of {entry['bytes']}"
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return the manifest of a directory. Raises StoreError if it is missing, damaged or of another format."""
    manifest = path / MANIFEST
    try:
        data = manifest.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path}: no complete checkpoint") from None
    return _decoded(data, str(manifest))


def _decoded(data: bytes, where: str) -> dict[str, Any]:
    """Return a manifest's content. Raises StoreError, naming `where`, if it is damaged or of another format."""
    document = codec.document(data, FORMAT, where)
    if document.pop("digest", None) != codec.digest({"format": FORMAT, **document}):
        raise StoreError(f"{where}: is not what was saved")
    return document


def _discard(path: Path) -> None:
    """Remove a checkpoint, manifest first, so that a half-removed directory is not taken for a checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

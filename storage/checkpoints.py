"""Directories of checkpoints, each made whole by a manifest and a rename, both last.

    <root>/policy/v000012/checkpoint.json + whatever the model wrote
    <root>/policy/.v000012-<host>-<pid>-<hex>/     one being written, or left by a process that died

The manifest has the size and CRC-32 of every file, a digest of itself, and what its writer says of the content. A
reader goes through `newest_first` and takes the first that `verify` finds nothing wrong with.

Local paths only (a node's disk, or a filesystem that all nodes mount): Megatron writes its checkpoints with file calls
of its own, many ranks into one directory.

May import the standard library and storage only.
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
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from storage.config import Durability
from storage.errors import StoreError
from storage.files import DEFAULT, sync_directory
from storage.processes import process_alive
from storage.retries import patiently

FORMAT = 2

_MANIFEST = "checkpoint.json"
_VERSION = re.compile(r"v(\d{6,})")
_BLOCK_BYTES = 1 << 20


def version_of(directory: Path) -> int | None:
    """The version that a directory is named after, as those of checkpoints and exports are; None for another's."""
    match = _VERSION.fullmatch(directory.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class FileSum:
    """What tells whether a file is the one that was written."""

    bytes: int
    crc32: int


class Checkpoints:
    """Owns nothing but names below `root`; any process may use the same root."""

    def __init__(self, root: str | Path, durability: Durability = DEFAULT) -> None:
        self.root = Path(root)
        self._fsync, self._patience_s = durability.fsync, durability.patience_s

    def begin(self, role: str, version: int) -> Path:
        """A new, empty directory to save into. In a gang rank 0 calls this and tells the others."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = self.root / role / f".v{version:06d}-{owner}"
        patiently(lambda: path.mkdir(parents=True, exist_ok=True), str(path), self._patience_s)
        return path

    def finish(
        self,
        role: str,
        version: int,
        path: Path,
        meta: Mapping[str, Any],
        sums: Mapping[str, FileSum] | None = None,
    ) -> Path:
        """Makes `path` (from `begin`) the checkpoint of a version, once all ranks have written; returns its place. If
        that version is there already it is kept, and `path` is discarded. `meta` is JSON that `verify` gives back.
        `sums`: of every file by its path below `path`, which must be on the disk (see `sum_file`); None: all of them
        are read here. Raises StoreError where the files are not those of `sums`."""
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
        """Where the checkpoint of a version is, if there is one."""
        return self.root / role / f"v{version:06d}"

    def newest_first(self, role: str, at_most: int) -> list[int]:
        """Versions no newer than `at_most` that were saved, newest first, whatever has become of their files since."""
        found = (version_of(path.parent) for path in (self.root / role).glob(f"v*/{_MANIFEST}"))
        return sorted((version for version in found if version is not None and version <= at_most), reverse=True)

    def versions(self, role: str) -> list[int]:
        """Versions with a complete checkpoint, ascending: the manifest can be read and every file has its size."""
        found = reversed(self.newest_first(role, at_most=sys.maxsize))
        return [version for version in found if _looks_whole(self.place(role, version))]

    def verify(
        self, role: str, version: int, share: tuple[int, int] = (0, 1), expected: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Reads every byte and returns the `meta` that was saved; with `share` (i, n) every n-th file from the i-th on,
        so that n processes read all of them. `expected`: what its `meta` must say, by name. Raises StoreError, saying
        what, where anything is missing, is not what was saved, or was saved as something else."""
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
            found = patiently(partial(sum_file, path / name), str(path / name), self._patience_s)
            if found.crc32 != entry["crc32"]:
                raise StoreError(f"{path}/{name}: is not what was saved")
        return meta

    def prune(self, role: str, keep: int, damaged: Collection[int] = (), every: int | None = None) -> list[int]:
        """Removes all but the newest `keep` complete checkpoints, of which the versions `damaged` are none, and those
        of versions that are multiples of `every`; and directories that dead processes of this host began. Returns the
        versions removed. Raises ValueError for keep < 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, given {keep}")
        complete = [version for version in self.versions(role) if version not in damaged]
        kept = complete[-keep:]
        removed = [version for version in complete[:-keep] if not _is_multiple(version, every)]
        for path in (self.root / role).glob("v*"):
            version = version_of(path)
            # Below the oldest one kept also what an earlier prune left half removed.
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
    """Size and CRC-32 of a file, which with `fsync` is on the disk when this returns."""
    total = size = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            total, size = zlib.crc32(block, total), size + len(block)
        if fsync:
            os.fsync(stream.fileno())
    return FileSum(size, total)


def _looks_whole(path: Path) -> bool:
    """Whether the manifest can be read and all of its files have their sizes."""
    try:
        return _faulty_size(path, _read(path)) is None
    except StoreError:
        return False


def _faulty_size(path: Path, document: Mapping[str, Any]) -> str | None:
    """Which file is missing or has another size, if any."""
    for name, entry in document["files"].items():
        try:
            size = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{path}/{name}: is missing"
        if size != entry["bytes"]:
            return f"{path}/{name}: has {size} bytes of {entry['bytes']}"
    return None


def _read(path: Path) -> dict[str, Any]:
    """The manifest. Raises StoreError where it is missing, is not whole, or is of another format."""
    manifest = path / _MANIFEST
    try:
        document = json.loads(manifest.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path}: no complete checkpoint") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        raise StoreError(f"{manifest}: is not what was saved ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise StoreError(f"{manifest}: format {found!r}, this version reads {FORMAT}")
    if document.pop("digest", None) != _digest(document):
        raise StoreError(f"{manifest}: is not what was saved")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _discard(path: Path) -> None:
    """The manifest goes first, so that what is half removed is not taken for a checkpoint."""
    (path / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

"""Directories of checkpoints, each made whole by a manifest and a rename, both last.

    <root>/policy/v000012/checkpoint.json + whatever the model wrote
    <root>/policy/.v000012-<host>-<pid>-<hex>/     one being written, or left by a process that died

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
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.errors import StoreError
from storage.files import sync_directory
from storage.processes import process_alive

FORMAT = 1

_MANIFEST = "checkpoint.json"
_VERSION = re.compile(r"v(\d{6,})")
_BLOCK_BYTES = 1 << 20


class Checkpoints:
    """Owns nothing but names below `root`; any process may use the same root."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def begin(self, role: str, version: int) -> Path:
        """A new, empty directory to save into. In a gang rank 0 calls this and tells the others."""
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = self.root / role / f".v{version:06d}-{owner}"
        path.mkdir(parents=True)
        return path

    def finish(self, role: str, version: int, path: Path, meta: Mapping[str, Any]) -> Path:
        """Makes `path` (from `begin`) the checkpoint of a version, once all ranks have written; returns its place. If
        that version is there already it is kept, and `path` is discarded. `meta` is JSON that `latest` gives back."""
        entries = {}
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            entries[file.relative_to(path).as_posix()] = {"bytes": file.stat().st_size, "crc32": _sync_and_sum(file)}
        document = {
            "format": FORMAT,
            "role": role,
            "version": version,
            "meta": dict(meta),
            "digest": hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest(),
            "files": entries,
        }
        (path / _MANIFEST).write_text(json.dumps(document, indent=1, allow_nan=False))
        _sync_and_sum(path / _MANIFEST)
        for directory in [path, *(p for p in path.rglob("*") if p.is_dir())]:
            sync_directory(str(directory))
        target = self._place(role, version)
        if _complete(target) is None:
            _discard(target)
            try:
                path.rename(target)
            except OSError:
                # Another process of a requeued run was faster: a rename never replaces a directory that has files.
                if _complete(target) is None:
                    raise
            sync_directory(str(target.parent))
        _discard(path)
        return target

    def latest(self, role: str, at_most: int) -> tuple[int, Path, dict[str, Any]] | None:
        """(version, directory, meta) of the newest complete checkpoint that is no newer than `at_most`, or None."""
        for version in reversed(self.versions(role)):
            if version <= at_most:
                path = self._place(role, version)
                return version, path, _read(path)["meta"]
        return None

    def versions(self, role: str) -> list[int]:
        """Versions with a complete checkpoint, ascending: the manifest is there and every file has its size."""
        matches = (_VERSION.fullmatch(path.name) for path in (self.root / role).glob("v*"))
        found = sorted(int(match[1]) for match in matches if match)
        return [version for version in found if _complete(self._place(role, version)) is not None]

    def verify(self, role: str, version: int) -> None:
        """Reads every byte. Raises StoreError, naming the file, where it is missing or is not what was saved."""
        path = self._place(role, version)
        if not (path / _MANIFEST).is_file():
            raise StoreError(f"{path}: no complete checkpoint")
        for name, entry in _read(path)["files"].items():
            if not (path / name).is_file() or _sync_and_sum(path / name) != entry["crc32"]:
                raise StoreError(f"{path}/{name}: is not what was saved")

    def prune(self, role: str, keep: int) -> list[int]:
        """Removes all but the newest `keep` complete checkpoints, and directories that dead processes of this host
        began. Returns the versions removed. Raises ValueError for keep < 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, given {keep}")
        complete = self.versions(role)
        removed, kept = complete[:-keep], complete[-keep:]
        for path in (self.root / role).glob("v*"):
            match = _VERSION.fullmatch(path.name)
            # Below the oldest one kept also what an earlier prune left half removed.
            if match and kept and int(match[1]) < kept[0]:
                _discard(path)
        own = re.compile(r"\.v\d{6,}-" + re.escape(socket.gethostname()) + r"-(\d+)-[0-9a-f]+")
        for path in (self.root / role).glob(".v*"):
            begun = own.fullmatch(path.name)
            if begun and not process_alive(int(begun[1])):
                _discard(path)
        return removed

    def _place(self, role: str, version: int) -> Path:
        return self.root / role / f"v{version:06d}"


def _complete(path: Path) -> dict[str, Any] | None:
    """The manifest, if all of its files have their sizes; None otherwise."""
    try:
        document = _read(path)
        sizes = {name: (path / name).stat().st_size for name in document["files"]}
    except (FileNotFoundError, NotADirectoryError):
        return None
    return document if all(sizes[name] == entry["bytes"] for name, entry in document["files"].items()) else None


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    if document.get("format") != FORMAT:
        raise StoreError(f"{path / _MANIFEST}: format {document.get('format')!r}, this version reads {FORMAT}")
    return document


def _discard(path: Path) -> None:
    """The manifest goes first, so that what is half removed is not taken for a checkpoint."""
    (path / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sync_and_sum(file: Path) -> int:
    """CRC-32 of a file that is on the disk when this returns."""
    total = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            total = zlib.crc32(block, total)
        os.fsync(stream.fileno())
    return total

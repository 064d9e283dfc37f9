"""Versions of named tensors in shared memory. A publisher writes each version once; readers map it without a copy.

The board's directory lies on tmpfs (e.g. /dev/shm/stageline-NAME; any local directory works), and only its user can
enter it:

    v000012-<pid>-<hex>.bin        the tensors' bytes, each at a multiple of 64
    v000012.json                   the manifest, linked to this name last: it makes the version exist
    v000012.lease.<pid>-<uuid>     one per open lease; counts while its process lives
    spare.bin                      memory of the version released last, for the next one

A version that was published on another host has a `.copy` instead of a `.bin` (`storage/weight_copies.py`). The
manifest names its .bin, so that two publishers of one version cannot mix their files. A publisher that was killed may
leave a .bin without a manifest; the next publish of that version removes it. Publisher and readers must see each
other's pids (one host, one pid namespace).

numpy has no bfloat16, so it is stored as its bit pattern in uint16 and marked "bfloat16" in the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import xxhash

from storage import codec
from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.files import retried
from storage.host import private_directory, process_alive

FORMAT = 2
BFLOAT16 = "bfloat16"

_ALIGNMENT = 64
"""Bytes: a cache line, and enough for every vector load."""
_PIECE_BYTES = 1 << 18
_MANIFEST = re.compile(r"v(\d{6,})\.json")
_OF_VERSION = re.compile(r"v(\d{6,})-")
_OWNER = re.compile(r"v\d{6,}(?:-|\.lease\.)(\d+)-.+")


@dataclass(frozen=True)
class TensorInfo:
    """Place of a tensor: `nbytes` bytes in C order from `offset`."""

    name: str
    dtype: str
    """numpy's name of the type, or "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    xxh3: int
    """XXH3-64 of the bytes. The next generation waits for the sums, and CRC-32 takes seven times as long."""


@dataclass(frozen=True)
class Manifest:
    """Description of a version."""

    version: int
    file: str
    tensors: tuple[TensorInfo, ...]
    digest: str
    """SHA-256 over every tensor's name, type, shape and sum. It tells versions apart; it does not protect from forgery.
    """

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def file_bytes(self) -> int:
        """Return the length of the file: tensors, gaps, and padding for an empty version, which could not be mapped."""
        return max(mmap.PAGESIZE, *(tensor.offset + tensor.nbytes for tensor in self.tensors), 0)

    def to_json(self) -> str:
        return codec.encode({"format": FORMAT, **vars(self)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that `to_json` wrote. Raises StoreError for another format or other fields."""
        where = "a manifest of weights"
        try:
            return codec.from_document(cls, codec.document(text, FORMAT, where))
        except codec.NotARecord as error:
            raise StoreError(f"{where}: {error}") from error


class WeightLease:
    """A reader's claim on a version. Until it is closed, `WeightBoard.release` keeps the version's files. Arrays from
    `tensors` stay valid even longer, since a mapping outlives its file's name."""

    def __init__(self, manifest: Manifest, tensors: dict[str, np.ndarray], lease: Path) -> None:
        self.manifest = manifest
        self.tensors = tensors
        """Read-only views of the mapped file by name; bfloat16 as uint16 (see `manifest`)."""
        self._lease = lease

    @property
    def file(self) -> Path:
        """Return the file of the tensors."""
        return self._lease.with_name(self.manifest.file)

    def verify(self, look: Callable[[TensorInfo, np.ndarray], None] = lambda info, numbers: None) -> None:
        """Read every byte once. Raises DamagedWeights, naming tensor and file, if a sum differs from the manifest's.

        `look` sees all numbers of a tensor, in flat pieces, while they are in the processor's cache. Its exceptions
        pass through.
        """
        for info in self.manifest.tensors:
            seen = xxhash.xxh3_64()
            for piece in _pieces(self.tensors[info.name]):
                seen.update(piece.data)
                look(info, piece)
            if seen.intdigest() != info.xxh3:
                raise DamagedWeights(
                    f"weights v{self.manifest.version}: {info.name} is not what was published ({self.file})"
                )

    def close(self) -> None:
        self.tensors = {}
        self._lease.unlink(missing_ok=True)

    def __enter__(self) -> WeightLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class WeightBoard:
    """A directory of versions. Any number of processes of one host and user share it; one of them closes it."""

    def __init__(self, directory: str | Path) -> None:
        """Raises StoreError, naming the directory, if another user owns it: its name can be guessed."""
        self.directory = Path(directory)
        private_directory(self.directory)

    def publish(
        self, version: int, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None
    ) -> Manifest:
        """Write a version. `dtypes` is "bfloat16" for tensors that are bit patterns in uint16.

        Publishing a version again with the same tensors returns the existing one. Raises ValueError for other tensors,
        and for a dtype that does not fit its array; StoreRefused if the memory is full, leaving nothing.
        """
        infos = _describe(tensors, dtypes or {})
        digest = _digest(infos)
        existing = self.manifest(version)
        if existing is None:
            where = str(self.directory / stem(version))
            existing = retried(lambda: self._write(Manifest(version, "", infos, digest), tensors), where, 0.0)
        if existing.digest != digest:
            raise ValueError(f"weights v{version} are published already, with other tensors ({existing.digest[:12]}…)")
        return existing

    def open(self, version: int) -> WeightLease:
        """Map a version and hold it until the lease is closed. Raises MissingOutput for a version that does not exist
        (any more), and StoreError for a file shorter than its manifest says."""
        lease = self.directory / f"{stem(version)}.lease.{os.getpid()}-{uuid.uuid4().hex}"
        # The lease comes first: a `release` that does not see it has removed the manifest or the file before we look.
        lease.touch()
        with contextlib.ExitStack() as undo:
            undo.callback(lease.unlink, missing_ok=True)
            manifest = self.manifest(version)
            if manifest is None:
                raise MissingOutput(f"weights v{version} are not in {self.directory} (there: {self.available()})")
            try:
                mapped = np.memmap(self.directory / manifest.file, dtype=np.uint8, mode="r")
            except FileNotFoundError as error:
                raise MissingOutput(f"weights v{version} were released while they were opened") from error
            opened = WeightLease(manifest, {t.name: _view(mapped, t) for t in manifest.tensors}, lease)
            undo.pop_all()
        return opened

    def manifest(self, version: int) -> Manifest | None:
        """Return a version's manifest, or None if it does not exist."""
        try:
            return Manifest.from_json(self._manifest_path(version).read_text())
        except FileNotFoundError:
            return None

    def has(self, version: int) -> bool:
        """Return True if a version exists here."""
        return self._manifest_path(version).exists()

    def available(self) -> list[int]:
        """Return the published versions, ascending."""
        matches = (_MANIFEST.fullmatch(path.name) for path in self.directory.glob("v*.json"))
        return sorted(int(match[1]) for match in matches if match)

    def release(self, version: int) -> bool:
        """Remove a version and the leases of dead processes. The memory of a version that was published here is kept
        for the next one. Return False, and remove nothing, while a living process holds a lease; return True also if
        there is nothing to remove."""
        for lease in self.directory.glob(f"{stem(version)}.lease.*"):
            if owner_alive(lease):
                return False
            lease.unlink(missing_ok=True)
        manifest = self.manifest(version)
        if manifest is not None:
            self._manifest_path(version).unlink(missing_ok=True)
            data = self.directory / manifest.file
            # Whoever has read the manifest meanwhile had left its lease before: it may have mapped the file.
            read = any(self.directory.glob(f"{stem(version)}.lease.*"))
            with contextlib.suppress(FileNotFoundError):
                data.replace(self._spare) if data.suffix == ".bin" and not read else data.unlink()
        self.remove_torn(version)
        return True

    def tidy(self, wanted: Callable[[Manifest], bool]) -> None:
        """Release the versions that are not `wanted`, and remove what dead processes left unfinished."""
        for version in self.available():
            manifest = self.manifest(version)
            if manifest is not None and not wanted(manifest):
                self.release(version)
        for version in {int(match[1]) for path in self.directory.iterdir() if (match := _OF_VERSION.match(path.name))}:
            self.remove_torn(version)

    def close(self) -> None:
        """Remove the directory, leases or not. Mapped arrays stay valid."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> WeightBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> Manifest:
        """Write a version and return the manifest that exists then: this one, or that of a faster publisher."""
        self.remove_torn(manifest.version)
        unique = unique_name(manifest.version)
        manifest = dataclasses.replace(manifest, file=f"{unique}.bin")
        data, staged = self.directory / manifest.file, self.directory / f"{unique}.manifest"
        with contextlib.ExitStack() as undo:
            undo.callback(data.unlink, missing_ok=True)
            with self._new_file(data) as stream:
                # Not a mapping: on a full tmpfs a store to one is a SIGBUS, a write is an OSError.
                for info in manifest.tensors:
                    stream.seek(info.offset)
                    stream.write(_bytes(tensors[info.name]))
                stream.truncate(manifest.file_bytes)
            undo.callback(staged.unlink, missing_ok=True)
            staged.write_text(manifest.to_json())
            winner = self.link(staged, manifest)
            if winner == manifest:
                undo.pop_all()
                staged.unlink()
        return winner

    def _new_file(self, path: Path) -> IO[bytes]:
        """Return a file to write into: the spare one if there is one, else an empty one. The pages of the spare need
        not be found and zeroed, which takes longer than writing. Two publishers cannot get the same file."""
        try:
            self._spare.rename(path)
        except FileNotFoundError:
            return path.open("xb")
        return path.open("r+b")

    @property
    def _spare(self) -> Path:
        """Return the file of the version that was released last. Nobody reads it any more."""
        return self.directory / "spare.bin"

    def link(self, staged: Path, manifest: Manifest) -> Manifest:
        """Make a version exist whose file is complete and whose manifest is the file `staged`. Return the manifest that
        exists then: this one, or that of a faster publisher."""
        try:
            os.link(staged, self._manifest_path(manifest.version))
        except FileExistsError:
            winner = self.manifest(manifest.version)
            if winner is None:
                raise
            return winner
        return manifest

    def _manifest_path(self, version: int) -> Path:
        return self.directory / f"{stem(version)}.json"

    def remove_torn(self, version: int) -> None:
        """Remove the files that dead publishers of a version left."""
        manifest = self.manifest(version)
        for path in self.directory.glob(f"{stem(version)}-*"):
            if (manifest is None or path.name != manifest.file) and not owner_alive(path):
                path.unlink(missing_ok=True)


def stem(version: int) -> str:
    """Return the beginning of the names of all files of a version."""
    return f"v{version:06d}"


def unique_name(version: int) -> str:
    """Return a unique name, without its ending, for the files of one attempt of this process at a version."""
    return f"{stem(version)}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def owner_alive(path: Path) -> bool:
    """Return True if the process whose id is in the file's name lives."""
    match = _OWNER.fullmatch(path.name)
    return match is not None and process_alive(int(match[1]))


def _describe(tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> tuple[TensorInfo, ...]:
    unknown = sorted(set(dtypes) - set(tensors))
    if unknown:
        raise ValueError(f"dtypes are given for tensors that are not there: {unknown}")
    infos, offset = [], 0
    for name, tensor in tensors.items():
        dtype = dtypes.get(name, tensor.dtype.name)
        if (np.uint16 if dtype == BFLOAT16 else np.dtype(dtype)) != tensor.dtype:
            raise ValueError(f"{name}: an array of {tensor.dtype} cannot hold {dtype}")
        xxh3 = xxhash.xxh3_64_intdigest(_bytes(tensor))
        infos.append(TensorInfo(name, dtype, tensor.shape, offset, tensor.nbytes, xxh3))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(infos)


def _digest(infos: tuple[TensorInfo, ...]) -> str:
    content = sorted((t.name, t.dtype, list(t.shape), t.xxh3) for t in infos)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a tensor's numbers, flat and in C order, in pieces that fit into a core's cache."""
    flat = np.ascontiguousarray(array).reshape(-1)
    step = max(1, _PIECE_BYTES // flat.itemsize)
    return (flat[start : start + step] for start in range(0, flat.size, step))


def _bytes(array: np.ndarray) -> memoryview:
    """Return the array's bytes in C order, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _view(mapped: np.ndarray, info: TensorInfo) -> np.ndarray:
    if info.offset + info.nbytes > mapped.size:
        raise StoreError(f"weights: {info.name} ends at byte {info.offset + info.nbytes} of {mapped.size}")
    dtype = np.dtype(np.uint16 if info.dtype == BFLOAT16 else info.dtype)
    return mapped[info.offset : info.offset + info.nbytes].view(dtype).reshape(info.shape)

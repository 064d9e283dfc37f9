"""Versions of named tensors in shared memory. A publisher writes each version once; readers map it without a copy.

The versions of a host are files in one directory, the board (`WeightBoard`). The directory is on tmpfs (e.g.
/dev/shm/stageline-NAME; any local directory works), and only its user can enter it:

    v000012-<pid>-<hex>.bin        the tensors' bytes, each at a multiple of 64
    v000012.json                   the manifest, linked to this name last: it makes the version exist
    v000012.lease.<pid>-<uuid>     one per open lease; counts while its process lives
    spare.bin                      the .bin of the version that was released last; the next version overwrites it

A version that was published on another host has a `.copy` instead of a `.bin` (`storage/weight_copies.py`). A manifest
names its .bin, so that two publishers of one version cannot mix their files. A publisher that was killed may leave a
.bin without a manifest; the next publish of that version removes it. Publisher and readers must see each other's pids
(one host, one pid namespace).

Several processes of a host can write one version together. One process calls `begin_write`. All processes put their
parts of the tensors at the tensors' places. Then each process computes the checksums of some tensors, and the process
that began the write links the manifest:

    begin_write(version, places) ──► put(part) … put(part) ──► sums(places) ──► finish(sums)

numpy has no bfloat16, so a bfloat16 tensor is stored as its bit pattern in uint16 and marked in the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import xxhash

from storage import codec
from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.files import Closing, retried
from storage.host import private_directory, process_alive

T = TypeVar("T")

FORMAT = 2
BFLOAT16 = "bfloat16"

_ALIGNMENT = 64
"""Each tensor begins at a multiple of this number of bytes: a cache line, and enough for every vector load."""
_PIECE_BYTES = 1 << 18
_MANIFEST = re.compile(r"v(\d{6,})\.json")
_OF_VERSION = re.compile(r"v(\d{6,})-")
_OWNER = re.compile(r"v\d{6,}(?:-|\.lease\.)(\d+)-.+")


@dataclass(frozen=True)
class FilePlace:
    """Place of a tensor in a version's file: `nbytes` bytes in C order from `offset`."""

    name: str
    dtype: str
    """numpy's name of the type, or "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorInfo(FilePlace):
    """Place of a tensor in a version's file, and checksum of its bytes."""

    xxh3: int
    """XXH3-64 of the bytes. Generation with a new version waits for these sums. CRC-32 would take seven times as
    long."""


@dataclass(frozen=True)
class Manifest:
    """Description of a version of the weights: the name of its file, and the tensors in this file."""

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
        return _file_bytes(self.tensors)

    def to_json(self) -> str:
        return codec.encode({"format": FORMAT, **vars(self)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that `to_json` wrote. Raises StoreError if the text has another format or other
        fields."""
        where = "a manifest of weights"
        try:
            return codec.from_document(cls, codec.document(text, FORMAT, where))
        except codec.NotARecord as error:
            raise StoreError(f"{where}: {error}") from error


@dataclass(frozen=True)
class WeightWrite:
    """A version that one or more processes of a host are writing."""

    version: int
    file: str
    places: tuple[FilePlace, ...]
    exists: bool
    """True if the version was published before this write. The write's `file` is then the file of that version.
    `WeightBoard.put` writes nothing, and checks that the file already has the same bytes."""


class WeightLease(Closing):
    """A reader's claim on a version. Until it is closed, `WeightBoard.release` keeps the version's files. Arrays from
    `tensors` stay valid even longer, since a mapping outlives its file's name."""

    def __init__(self, manifest: Manifest, tensors: dict[str, np.ndarray], lease: Path) -> None:
        self.manifest = manifest
        self.tensors = tensors
        """Name of a tensor -> read-only view of the mapped file. A bfloat16 tensor (see `manifest`) is seen as
        uint16."""
        self._lease = lease

    @property
    def file(self) -> Path:
        """Return the file of the tensors."""
        return self._lease.with_name(self.manifest.file)

    def verify(self, look: Callable[[TensorInfo, np.ndarray], None] = lambda info, numbers: None) -> None:
        """Read every byte of the version once, and compare each tensor's checksum with the manifest's. Raises
        DamagedWeights, naming tensor and file, if they differ.

        `look` is called with each tensor's data, in flat pieces, while they are in the processor's cache. Its
        exceptions are not caught.
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


class WeightBoard(Closing):
    """A directory of versions. Any number of processes of one host and user share it; one of them closes it."""

    def __init__(self, directory: str | Path) -> None:
        """Open the board in `directory`, which is created if needed. Raises StoreError, naming the directory, if it
        belongs to another user, who may have guessed its name."""
        self.directory = Path(directory)
        private_directory(self.directory)

    def publish(
        self, version: int, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None
    ) -> Manifest:
        """Write a version and return its manifest. `dtypes`: name -> "bfloat16", for tensors that are bit patterns in
        uint16.

        Publishing a version again with the same tensors returns the existing manifest. Raises ValueError if the version
        exists with other tensors, or if a dtype does not fit its array. Raises StoreRefused if the memory is full; no
        file is left then.
        """
        with self.begin_write(version, _describe(tensors, dtypes or {})) as write:
            for place in write.places:
                self.put(write, place, tensors[place.name].reshape(1, -1))
            return self.finish(write, self.sums(write, write.places))

    @contextlib.contextmanager
    def begin_write(self, version: int, places: tuple[FilePlace, ...]) -> Iterator[WeightWrite]:
        """Return a context in which a version can be written. When the context ends, the write's file is removed
        unless it has become the version's file.

        `places`: name, dtype, shape and byte range of each tensor. Raises ValueError if the version exists already with
        other tensors or byte ranges.
        """
        existing = self.manifest(version)
        if existing is not None:
            begun = WeightWrite(version, existing.file, places, exists=True)
            if places != tuple(FilePlace(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in existing.tensors):
                raise _other_tensors(begun)
            yield begun
            return
        self.remove_torn(version)
        begun = WeightWrite(version, f"{unique_name(version)}.bin", places, exists=False)
        path = self.directory / begun.file
        try:
            self._tried(version, lambda: self._begin(path, _file_bytes(places)))
            yield begun
        finally:
            linked = self.manifest(version)
            if linked is None or linked.file != begun.file:
                path.unlink(missing_ok=True)

    def sees(self, write: WeightWrite) -> bool:
        """Return True if the write's file is on this board. False if it is on the board of another host."""
        return (self.directory / write.file).exists()

    def put(self, write: WeightWrite, place: FilePlace, rows: np.ndarray, start: int = 0, stride: int = 0) -> None:
        """Write `rows` [n, ...], a part of a tensor. Row i goes to byte `start + i * stride` of the tensor. A stride of
        0 means that the rows follow each other without gaps. Any process of the host may call this.

        Raises StoreRefused if the memory is full. Raises ValueError if the version exists and has other bytes at these
        places."""
        path = self.directory / write.file
        self._tried(write.version, lambda: self._put(write, path, place.offset + start, rows, stride))

    def sums(self, write: WeightWrite, places: Iterable[FilePlace]) -> dict[str, int]:
        """Return name of a tensor -> XXH3-64 sum of its bytes, for the tensors at `places`. All parts of these tensors
        must have been written. Raises StoreError if the file is too short."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        sums = {}
        with (self.directory / write.file).open("rb", 0) as stream:
            for place in places:
                seen, left = xxhash.xxh3_64(), place.nbytes
                stream.seek(place.offset)
                while left and (count := stream.readinto(buffer[: min(left, _PIECE_BYTES)])):
                    seen.update(buffer[:count])
                    left -= count
                if left:
                    raise StoreError(f"weights: {place.name} ends {left} bytes after the end of {write.file}")
                sums[place.name] = seen.intdigest()
        return sums

    def finish(self, write: WeightWrite, sums: Mapping[str, int]) -> Manifest:
        """Publish the version of this write: link its manifest. All parts of its tensors must have been written.
        Return the manifest under which the version now exists. This is the write's manifest, unless another process
        has published the version before. Raises ValueError if the tensors in that manifest differ from this write's.
        """
        infos = tuple(TensorInfo(**vars(place), xxh3=sums[place.name]) for place in write.places)
        manifest = Manifest(write.version, write.file, infos, _digest(infos))
        staged = (self.directory / write.file).with_suffix(".manifest")
        if write.exists:
            linked = self.manifest(write.version)
        else:
            linked = self._tried(write.version, lambda: self._link_new(staged, manifest))
        if linked is None or linked.digest != manifest.digest:
            raise _other_tensors(write)
        return linked

    def open(self, version: int) -> WeightLease:
        """Map a version and hold it until the lease is closed. Raises MissingOutput if the version does not exist (any
        more). Raises StoreError if its file is shorter than its manifest says."""
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
        """Return a version's manifest, or None if the version does not exist here."""
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
        for the next version. Return False, and keep the version, while a living process holds a lease. Return True also
        if there is nothing to remove."""
        for lease in self.directory.glob(f"{stem(version)}.lease.*"):
            if owner_alive(lease):
                return False
            lease.unlink(missing_ok=True)
        manifest = self.manifest(version)
        if manifest is not None:
            self._manifest_path(version).unlink(missing_ok=True)
            data = self.directory / manifest.file
            # A reader that read the manifest just before had created its lease first, and may have mapped the file.
            read = any(self.directory.glob(f"{stem(version)}.lease.*"))
            with contextlib.suppress(FileNotFoundError):
                data.replace(self._spare) if data.suffix == ".bin" and not read else data.unlink()
        self.remove_torn(version)
        return True

    def tidy(self, wanted: Callable[[Manifest], bool]) -> None:
        """Release the versions for which `wanted` returns False, and remove unfinished files of dead processes."""
        for version in self.available():
            manifest = self.manifest(version)
            if manifest is not None and not wanted(manifest):
                self.release(version)
        for version in {int(match[1]) for path in self.directory.iterdir() if (match := _OF_VERSION.match(path.name))}:
            self.remove_torn(version)

    def close(self) -> None:
        """Remove the directory, even if there are open leases. Mapped arrays stay valid."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tried(self, version: int, act: Callable[[], T]) -> T:
        """Return the result of `act`. The path is added to errors of the filesystem."""
        return retried(act, str(self.directory / stem(version)), 0.0)

    def _begin(self, path: Path, num_bytes: int) -> None:
        with self._new_file(path) as stream:
            stream.truncate(num_bytes)

    def _put(self, write: WeightWrite, path: Path, offset: int, rows: np.ndarray, stride: int) -> None:
        data, row_bytes = _bytes(rows), rows.nbytes // max(1, len(rows))
        step = len(data) if stride in (0, row_bytes) else row_bytes
        with path.open("rb" if write.exists else "r+b", 0) as stream:
            for row, first in enumerate(range(0, len(data), max(1, step))):
                run, at = data[first : first + step], offset + row * stride
                if write.exists:
                    _compare(stream.fileno(), run, at, write)
                else:
                    _write(stream.fileno(), run, at)

    def _link_new(self, staged: Path, manifest: Manifest) -> Manifest:
        try:
            staged.write_text(manifest.to_json())
            return self.link(staged, manifest)
        finally:
            staged.unlink(missing_ok=True)

    def _new_file(self, path: Path) -> IO[bytes]:
        """Return the spare file if it exists, else a new one. To allocate and zero new pages takes longer than to
        write. Two publishers cannot get the same file."""
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
        """Make a version exist, by giving its manifest the final name. `staged` is the file that holds `manifest`. The
        version's own file must be complete. Return the manifest that exists then: `manifest`, or the manifest of a
        faster publisher."""
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
    """Return a unique name, without its ending, for the files of one write of a version by this process."""
    return f"{stem(version)}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def owner_alive(path: Path) -> bool:
    """Return True if the process whose id is in the file's name lives."""
    match = _OWNER.fullmatch(path.name)
    return match is not None and process_alive(int(match[1]))


def placed(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[FilePlace, ...]:
    """Return the places of tensors (name, dtype, shape) in a version's file, in their order."""
    places, offset = [], 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * np.dtype(np.uint16 if dtype == BFLOAT16 else dtype).itemsize
        places.append(FilePlace(name, dtype, shape, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(places)


def _describe(tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> tuple[FilePlace, ...]:
    unknown = sorted(set(dtypes) - set(tensors))
    if unknown:
        raise ValueError(f"dtypes are given for tensors that are not there: {unknown}")
    listed = []
    for name, tensor in tensors.items():
        dtype = dtypes.get(name, tensor.dtype.name)
        if (np.uint16 if dtype == BFLOAT16 else np.dtype(dtype)) != tensor.dtype:
            raise ValueError(f"{name}: an array of {tensor.dtype} cannot hold {dtype}")
        listed.append((name, dtype, tensor.shape))
    return placed(listed)


def _file_bytes(places: Iterable[FilePlace]) -> int:
    """Return the length of a version's file, at least a page: an empty file could not be mapped."""
    return max(mmap.PAGESIZE, *(place.offset + place.nbytes for place in places), 0)


def _other_tensors(write: WeightWrite) -> ValueError:
    return ValueError(f"weights v{write.version} are published already, with other tensors ({write.file})")


def _write(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes. On a full tmpfs a write raises OSError, but a store to a mapping would raise SIGBUS."""
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _compare(file: int, data: memoryview, offset: int, write: WeightWrite) -> None:
    """Raise ValueError if the file has other bytes than `data` from `offset` on."""
    for first in range(0, len(data), _PIECE_BYTES):
        piece = data[first : first + _PIECE_BYTES]
        if os.pread(file, len(piece), offset + first) != piece:
            raise _other_tensors(write)


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

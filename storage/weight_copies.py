"""Versions of weights that are sent from one host to another, in pieces and in order. A board is the directory of a
host's published weights.

    sending board                                  receiving board
    v000012-….bin ──► OutgoingVersion ──pieces──►  IncomingVersion ──► v000012-<pid>-<hex>.copy: only appended to
                                                                       v000012-<pid>-<hex>.copy.manifest: written first
                                                   `finish` links ───► v000012.json

The manifest is linked after all bytes have arrived and every tensor's sum was checked, so no reader sees half a
version. The length of a `.copy` says how much of it has arrived; other processes can already forward that part. On each
host, one process at a time receives a version (`receiving`). The process holds `v000012.lock`, which the system
releases when the process ends in any way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import xxhash

from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.files import Closing
from storage.locks import is_named, open_lock, take_lock
from storage.weights import Manifest, WeightBoard, owner_alive, stem, unique_name

_COPY, _STAGED = ".copy", ".copy.manifest"


@contextmanager
def receiving(board: WeightBoard, version: int, *, wait_s: float) -> Iterator[bool]:
    """Return a context that holds this host's lock for receiving a version of the weights. It yields True if it holds
    the lock.

    If another process has the lock, wait for it as long as bytes of the version arrive. By the end of the wait the
    version may have arrived, so the caller must check that first. If `wait_s` is 0, do not wait, and yield False.

    Raises:
        StoreError: no bytes have arrived for `wait_s` seconds, and another process still holds the lock. The message
            names that process.
    """
    path = board.directory / f"{stem(version)}.lock"
    arrived = partial(_arrived, board, version)
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(open_lock(path))
            if not wait_s:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
            else:
                take_lock(lock, path, wait_s, progress=arrived)
            if is_named(lock, path):
                break
            stack.pop_all().close()  # the lock's former holder removed this file: open the new file
        stack.callback(path.unlink, missing_ok=True)
        for left in board.directory.glob(f"{stem(version)}-*{_COPY}*"):  # files of earlier holders that died
            manifest = board.manifest(version)
            if manifest is None or left.name != manifest.file:
                left.unlink(missing_ok=True)
        yield True


def _arrived(board: WeightBoard, version: int) -> int:
    """Return the number of bytes of a version that have arrived."""
    total = 0
    for copy in board.directory.glob(f"{stem(version)}-*{_COPY}"):
        with contextlib.suppress(FileNotFoundError):
            total += copy.stat().st_size
    return total


def is_copy(manifest: Manifest) -> bool:
    """Return True if a version came from another host."""
    return manifest.file.endswith(_COPY)


class IncomingVersion(Closing):
    """The files of a version of the weights that is arriving from another host. If this object is closed before
    `finish`, no files are left. Use it only inside the block of `receiving`, which holds this host's lock for the
    version."""

    def __init__(self, board: WeightBoard, manifest: Manifest) -> None:
        """Create the files. `manifest`: manifest of the sending board. Raises OSError if there is no space."""
        name = unique_name(manifest.version)
        self.manifest = dataclasses.replace(manifest, file=f"{name}{_COPY}")
        self.num_bytes = 0
        """Bytes that have arrived."""
        self._board = board
        self._data, self._staged = board.directory / f"{name}{_COPY}", board.directory / f"{name}{_STAGED}"
        self._tensors = sorted(manifest.tensors, key=lambda tensor: tensor.offset)
        self._checked = 0
        """Number of tensors that have arrived and were checked."""
        self._sum = xxhash.xxh3_64()
        """Running sum over the bytes of the next tensor."""
        self._checker = ThreadPoolExecutor(1, "weights-checker")
        """Thread for the sums, so that checking overlaps writing."""
        self._file = -1
        try:
            self._file = os.open(self._data, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            half = self._data.with_suffix(".half")
            half.write_text(self.manifest.to_json())
            half.rename(self._staged)  # other processes read the manifest from now on
        except BaseException:
            self.close()
            raise

    @property
    def complete(self) -> bool:
        return self.num_bytes == self.manifest.file_bytes

    def append(self, piece: memoryview) -> None:
        """Append the next bytes, and do not use `piece` afterwards. Raises DamagedWeights if a tensor's sum differs
        from the manifest's, or if there are too many bytes. Raises OSError if the memory is full."""
        if self.num_bytes + piece.nbytes > self.manifest.file_bytes:
            raise DamagedWeights(
                f"weights v{self.manifest.version}: more than {self.manifest.file_bytes} bytes arrived"
            )
        checked = self._checker.submit(self._check, piece)
        try:
            written = 0
            while written < piece.nbytes:
                written += os.write(self._file, piece[written:])
        finally:
            checked.result()
        self.num_bytes += piece.nbytes

    def _check(self, piece: memoryview) -> None:
        """Add a piece to the running checksums of the tensors. When a tensor is complete, compare its checksum with the
        manifest's. Raises DamagedWeights, naming the tensor, if they differ."""
        end = self.num_bytes + piece.nbytes
        while self._checked < len(self._tensors):
            tensor = self._tensors[self._checked]
            first, last = max(tensor.offset, self.num_bytes), min(tensor.offset + tensor.nbytes, end)
            if first < last:
                self._sum.update(piece[first - self.num_bytes : last - self.num_bytes])
            if tensor.offset + tensor.nbytes > end:
                return
            if self._sum.intdigest() != tensor.xxh3:
                raise DamagedWeights(
                    f"weights v{self.manifest.version}: {tensor.name} did not arrive as it was published"
                )
            self._checked, self._sum = self._checked + 1, xxhash.xxh3_64()

    def finish(self) -> Manifest:
        """Link the manifest, so that the version exists. Return the manifest that exists then: `self.manifest`, or the
        manifest of a faster process. Raises StoreError if bytes are missing."""
        if not self.complete:
            raise StoreError(
                f"weights v{self.manifest.version}: {self.num_bytes} of {self.manifest.file_bytes} bytes arrived"
            )
        winner = self._board.link(self._staged, self.manifest)
        if winner == self.manifest:
            self._staged.unlink()
        return winner

    def close(self) -> None:
        self._checker.shutdown()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._board.manifest(self.manifest.version) != self.manifest:
            for path in (self._data, self._staged, self._data.with_suffix(".half")):
                path.unlink(missing_ok=True)


class OutgoingVersion(Closing):
    """An open file of a version of the weights, from which this host sends the version to others. The version was
    published or received here, or is still arriving. No lease is needed: an open file can be read to its end even after
    the version was released."""

    def __init__(self, board: WeightBoard, version: int, digest: str | None = None) -> None:
        """Open a version. `digest`: the digest that its manifest must have; None: any. Raises MissingOutput if there is
        no such version to send."""
        manifests = []
        for staged in filter(owner_alive, board.directory.glob(f"{stem(version)}-*{_STAGED}")):
            with contextlib.suppress(FileNotFoundError):
                manifests.append(Manifest.from_json(staged.read_text()))
        whole = board.manifest(version)  # last: a version that arrives completely meanwhile is found here
        for manifest in [whole, *manifests] if whole is not None else manifests:
            if digest in (None, manifest.digest):
                self._path = board.directory / manifest.file
                with contextlib.suppress(FileNotFoundError):
                    self._file = os.open(self._path, os.O_RDONLY)
                    self.manifest = manifest
                    return
        raise MissingOutput(f"weights v{version} are not in {board.directory}, nor on their way there")

    def num_ready(self) -> int:
        """Return the number of bytes that can be read now. It grows while the version is still arriving on this host.
        Raises MissingOutput if bytes are missing and the process that received them has ended."""
        there = os.fstat(self._file)
        if there.st_size < self.manifest.file_bytes and (there.st_nlink == 0 or not owner_alive(self._path)):
            there = os.fstat(self._file)  # the receiver may have finished, and ended, since we looked
            if there.st_size < self.manifest.file_bytes:
                raise MissingOutput(f"weights v{self.manifest.version}: whoever received them is gone")
        return there.st_size

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes that are ready, mapped without a copy. The bytes stay valid after `close`. `offset` must be a
        multiple of the page size."""
        return memoryview(mmap.mmap(self._file, nbytes, prot=mmap.PROT_READ, offset=offset))

    def close(self) -> None:
        os.close(self._file)

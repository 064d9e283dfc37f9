"""Versions of weights that travel from one host's board to another's, in pieces and in order.

    sending board                                  receiving board
    v000012-….bin ──► OutgoingVersion ──pieces──►  IncomingVersion ──► v000012-<pid>-<hex>.copy: only appended to
                                                                       v000012-<pid>-<hex>.copy.manifest: from the start
                                                   `finish` links ───► v000012.json

The manifest is linked when all bytes are there and every tensor has its CRC-32, so half a version exists for no reader.
The length of a `.copy` says how much of it has arrived: other processes can hand it on meanwhile. One process of a host
receives a version (`receiving`); `v000012.lock`, which it holds, is let go of by the system however it ends.

May import numpy, xxhash and storage only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType

import xxhash

from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.weights import Manifest, WeightBoard, owner_alive, stem, unique_name

_COPY, _STAGED = ".copy", ".copy.manifest"


@contextmanager
def receiving(board: WeightBoard, version: int, *, wait: bool = True) -> Iterator[bool]:
    """Whether the caller is the one of its host who receives a version, until the block ends; with `wait` it always
    becomes so. Whoever waited should look whether the version has come."""
    path = board.directory / f"{stem(version)}.lock"
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_named(lock, path):
                break
        except BlockingIOError:
            os.close(lock)
            yield False
            return
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # whoever had it removed the file when done with it
    try:
        for left in board.directory.glob(f"{stem(version)}-*{_COPY}*"):  # by holders before, who died
            manifest = board.manifest(version)
            if manifest is None or left.name != manifest.file:
                left.unlink(missing_ok=True)
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _is_named(file: int, path: os.PathLike[str]) -> bool:
    """Whether an open file is the one that a path names now."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def is_copy(manifest: Manifest) -> bool:
    """Whether a version came from another host."""
    return manifest.file.endswith(_COPY)


class IncomingVersion:
    """Owns the files of a version that arrives; closed before `finish`, it leaves nothing. For whoever holds
    `receiving`."""

    def __init__(self, board: WeightBoard, manifest: Manifest) -> None:
        """`manifest`: the sender's. Raises OSError where there is no space."""
        name = unique_name(manifest.version)
        self.manifest = dataclasses.replace(manifest, file=f"{name}{_COPY}")
        self.num_bytes = 0
        """That have arrived."""
        self._board = board
        self._data, self._staged = board.directory / f"{name}{_COPY}", board.directory / f"{name}{_STAGED}"
        self._tensors = sorted(manifest.tensors, key=lambda tensor: tensor.offset)
        self._checked = 0
        """Tensors that are whole."""
        self._sum = xxhash.xxh3_64()
        """Of what has arrived of the next."""
        self._checker = ThreadPoolExecutor(1, "weights-checker")
        """Checking takes time, and goes on beside writing."""
        self._file = -1
        try:
            self._file = os.open(self._data, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            half = self._data.with_suffix(".half")
            half.write_text(self.manifest.to_json())
            half.rename(self._staged)  # others read it from now on
        except BaseException:
            self.close()
            raise

    @property
    def complete(self) -> bool:
        return self.num_bytes == self.manifest.file_bytes

    def append(self, piece: memoryview) -> None:
        """Takes the next bytes. Raises DamagedWeights, naming the tensor, where a sum is not the manifest's, or for
        more bytes than there are; OSError when the memory is full."""
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
        """Carries the sums on over the bytes that follow those that have arrived."""
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
        """Makes the version exist. Raises StoreError where bytes are missing."""
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

    def __enter__(self) -> IncomingVersion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class OutgoingVersion:
    """Owns an open file of a version that a board has, or is receiving. It needs no lease: what is released meanwhile
    can be read to its end."""

    def __init__(self, board: WeightBoard, version: int, digest: str | None = None) -> None:
        """`digest`: take no other. Raises MissingOutput where there is nothing to send."""
        whole = board.manifest(version)
        found = [whole] if whole is not None else []
        for staged in filter(owner_alive, board.directory.glob(f"{stem(version)}-*{_STAGED}")):
            with contextlib.suppress(FileNotFoundError):
                found.append(Manifest.from_json(staged.read_text()))
        for manifest in found:
            if digest in (None, manifest.digest):
                self._path = board.directory / manifest.file
                with contextlib.suppress(FileNotFoundError):
                    self._file = os.open(self._path, os.O_RDONLY)
                    self.manifest = manifest
                    return
        raise MissingOutput(f"weights v{version} are not in {board.directory}, nor on their way there")

    def num_ready(self) -> int:
        """Bytes that can be read now. Raises MissingOutput if no more will come."""
        there = os.fstat(self._file)
        if there.st_size < self.manifest.file_bytes and (there.st_nlink == 0 or not owner_alive(self._path)):
            there = os.fstat(self._file)  # its receiver may have finished it, and ended, since we looked
            if there.st_size < self.manifest.file_bytes:
                raise MissingOutput(f"weights v{self.manifest.version}: whoever received them is gone")
        return there.st_size

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes that are ready, mapped without a copy; they stay valid after `close`. `offset` must be a multiple of
        the system's page."""
        return memoryview(mmap.mmap(self._file, nbytes, prot=mmap.PROT_READ, offset=offset))

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> OutgoingVersion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

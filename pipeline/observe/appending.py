"""Files that whole lines are appended to, by one process at a time: the journal of a run, and the spool of its
tracking. A line is there whole or not at all, whatever ends the process or fills the disk.

    opened:    a last line that a crash cut short is cut off, so that the next begins a line of its own
    appended:  in one write; what a full disk took of it is cut off again, and the caller is told

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType


class AppendFailed(RuntimeError):
    """A line could not be written, and is not there; says which file and why. What was committed stays."""


class LineFile:
    """Owns a file that is open for appending."""

    def __init__(self, path: Path) -> None:
        """Creates the file if need be. Raises AppendFailed where it cannot be opened."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._end = _whole_bytes(self._descriptor)
            os.truncate(self._descriptor, self._end)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, text: str) -> None:
        """Writes one line; `text` has no newline in it. Raises AppendFailed."""
        data = (text + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError as error:
            with contextlib.suppress(OSError):  # whoever opens the file next cuts the line off
                os.truncate(self._descriptor, self._end)
            raise self._failure(error) from error
        self._end += len(data)

    @property
    def size(self) -> int:
        """Bytes of all whole lines."""
        return self._end

    def close(self) -> None:
        """Harmless a second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _failure(self, error: OSError) -> AppendFailed:
        return AppendFailed(f"cannot write to {self.path}: {error.strerror or error}")


def _whole_bytes(descriptor: int, block: int = 1 << 16) -> int:
    """Length of a file up to and with its last newline; read from the end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

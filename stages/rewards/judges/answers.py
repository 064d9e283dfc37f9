"""A judge's answers on disk. An answered question is never asked again, even if the process that asked has died.

    DIRECTORY/answers-*.jsonl    one file per process that asked; whole lines are appended
      {key, model, messages, text, likeliest, time, seconds, attempts}

    question ──► key ──► index (SQLite, private to this process, on disk) ──► file, place, length ──► one line is read

`key` is a digest of the whole request, so files of several judges and runs may share a directory. Each process writes
its own file and reads all files. This needs no locks, which some filesystems lack between hosts. Each process builds
the index from the files. The index is in a temporary file that disappears with the process, so memory does not grow
with the number of answers. If a line is cut short or damaged, its question is asked again (with a warning if it is
damaged).
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from stages.rewards.judges.rubric import Answer
from storage.files import retried

RETRY_S = 60.0
"""Seconds for which a transient error of the filesystem is retried."""
_HEAD = re.compile(rb'\{"key": "([0-9a-f]{32})", ')
_MAX_LINE_BYTES = 64 << 20
"""Maximum number of bytes of a line in a file of answers. A longer line counts as damaged. No valid line is that long,
because a judge's response has at most 16 MiB."""
_BATCH = 10_000
"""Number of lines that are inserted into the index at once."""


def question_key(body: Mapping[str, Any]) -> str:
    """Return the digest of the body of a request to a judge (model, messages, sampling settings): 32 hex digits."""
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class _File:
    """A file of answers, and how much of it is in the index."""

    number: int
    path: Path | None
    """Path of the file. None for the temporary file of an `AnswerCache` without a directory."""
    read: int = 0
    """Number of bytes from the beginning of the file to the end of the last line that was read into the index."""
    size: int = 0
    """Size of the file in bytes when it was last read."""


class AnswerCache:
    """The answers in a directory: this process's own file, and an index of the files of all processes. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: folder of the files of answers. None: answers stay in a temporary file until `close`. No file is
        created before the first answer."""
        self._directory = directory
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._files: dict[Path | None, _File] = {}
        self._own: _File | None = None
        self._descriptor = -1

    def find(self, key: str) -> Answer | None:
        """Return the answer to a question. Return None if the answer is not in the index (see `refresh`), or if its
        line is damaged."""
        with self._lock:
            rows = self._index().execute("SELECT file, start, length FROM answers WHERE key = ?", (_packed_key(key),))
            place = rows.fetchone()
            if place is None:
                return None
            number, start, length = place
            file = next(file for file in self._files.values() if file.number == number)
            answer = self._read(file, key, start, length)
            if answer is None:
                _print_warning(f"{file.path}: the line at byte {start} is damaged; its question is asked again")
                self._index().execute("DELETE FROM answers WHERE key = ?", (_packed_key(key),))
            return answer

    def refresh(self) -> None:
        """Add the answers of other processes to the index."""
        with self._lock:
            if self._directory is None or not self._directory.is_dir():
                return
            for path in sorted(self._directory.glob("answers-*.jsonl")):
                file = self._file(path)
                if file is not self._own:
                    self._read_more(file, path)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Store an answer. `about`: further fields of its line. Raises StoreRefused if the disk is full, and
        StoreUnavailable if a transient error lasts longer than `RETRY_S`."""
        record = {"key": key, **about, "text": answer.text, "likeliest": answer.likeliest}
        data = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        with self._lock:
            file = retried(lambda: self._append(data), str(self._directory), RETRY_S)
            self._put([(_packed_key(key), file.number, file.read, len(data))])
            file.read += len(data)

    def close(self) -> None:
        """Close the file and the index. A second call does nothing; a later `add` begins another file."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            if self._database is not None:
                self._database.close()
            self._descriptor, self._database, self._own = -1, None, None
            self._files.clear()

    def _index(self) -> sqlite3.Connection:
        if self._database is None:
            # The empty name makes a temporary file without a name. SQLite keeps 2 MB of it in memory.
            self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
            self._database.execute(
                "CREATE TABLE answers (key BLOB PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER) WITHOUT ROWID"
            )
        return self._database

    def _put(self, rows: list[tuple[bytes, int, int, int]]) -> None:
        index = self._index()
        index.execute("BEGIN")
        index.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", sorted(rows))
        index.execute("COMMIT")

    def _file(self, path: Path | None) -> _File:
        return self._files.setdefault(path, _File(len(self._files), path))

    def _append(self, data: bytes) -> _File:
        """Append the data to this process's own file, after its indexed lines, and return the file. Create the file if
        there is none yet."""
        if self._own is None:
            path = None
            if self._directory is None:
                with tempfile.TemporaryFile(prefix="stageline-judge-") as nameless:
                    self._descriptor = os.dup(nameless.fileno())
            else:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._directory / f"answers-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._own = self._file(path)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._own.read + written)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._own.read)
            raise
        return self._own

    def _read(self, file: _File, key: str, start: int, length: int) -> Answer | None:
        """Return the answer in a line, or None if the line is damaged or the file is gone."""
        try:
            if file is self._own:
                line = os.pread(self._descriptor, length, start)
            else:
                assert file.path is not None
                with file.path.open("rb") as stream:
                    stream.seek(start)
                    line = stream.read(length)
            record = json.loads(line)
            if record["key"] != key:
                return None
            likeliest = record["likeliest"]
            pairs = None if likeliest is None else tuple((str(text), float(p)) for text, p in likeliest)
            return Answer(str(record["text"]), pairs)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _read_more(self, file: _File, path: Path) -> None:
        """Index the new lines of a file."""
        size = path.stat().st_size
        if size == file.size:
            return
        first, file.size = not file.size, size
        damaged, rows = 0, list[tuple[bytes, int, int, int]]()
        try:
            with path.open("rb") as stream:
                stream.seek(file.read)
                while (line := stream.readline(_MAX_LINE_BYTES)).endswith(b"\n"):  # else: still being written, or cut
                    head = _HEAD.match(line)
                    if head is None:
                        damaged += 1
                    else:
                        rows.append((_packed_key(head[1].decode()), file.number, file.read, len(line)))
                    file.read += len(line)
                    if len(rows) == _BATCH:
                        self._put(rows)
                        rows.clear()
        except PermissionError:
            if first:
                _print_warning(f"{path}: cannot be read (permission); its questions are asked again")
            return
        self._put(rows)
        if damaged or len(line) == _MAX_LINE_BYTES:
            _print_warning(f"{path}: {damaged or 'all'} lines are damaged; their questions are asked again")


def _packed_key(key: str) -> bytes:
    return bytes.fromhex(key)


def _print_warning(text: str) -> None:
    """Write a warning to the worker's log."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)

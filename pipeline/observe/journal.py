"""The journal of a run: one JSON line per event. Timeline, report and summary are made from it.

    events-000001.jsonl, events-000002.jsonl, ...    full parts, in order; never written again
    events.jsonl                                     the newest part, open for appending

The driver is the only writer; the workers' times travel in the results of the nodes. If a crash or a damaged disk
corrupts a line, only that event is lost: readers yield a warning instead of it.

`LineFile` appends whole lines to a file for one process at a time (the journal, and the spool of the tracking). On
opening it truncates an incomplete last line. If an append fails, for example on a full disk, it truncates the partial
line and raises AppendFailed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO

from storage import codec
from storage.redaction import redacted

PART_BYTES = 64 << 20
"""Size at which `events.jsonl` becomes a numbered part."""


class EventKind(StrEnum):
    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    SUBMITTED = "submitted"
    """The driver handed a node to `worker`, where it may be queued (t: driver's clock)."""
    STARTED = "started"
    """The stage began on a worker (t: worker's clock)."""
    FINISHED = "finished"
    """The stage's output was committed (t: worker's clock). The stage took `seconds`, `store_s` of them in store and
    ledger."""
    FAILED = "failed"
    """An attempt was lost or raised an error; `detail` says why."""
    PUBLISHED = "published"
    """Weights of version `step` became readable."""
    GANG_BUILT = "gang_built"
    GANG_LOST = "gang_lost"
    ALARM = "alarm"
    """Something needs attention now; `detail` says what. With stage `canary`, engine and trainer differ at version
    `step` of the weights; otherwise `rule` names the rule of `alarms.*`."""
    ROWS_MIGRATED = "rows_moved"
    """Rows migrated from `worker` to another replica; `detail` says how many and to which."""
    DEVICES_HANDED_OVER = "devices_passed"
    """The workers of `gang` released the devices that it shares with other gangs; `detail` says to which gang, and
    after how long."""
    ENGINE = "engine"
    """An engine was built, and the journal has no such event yet with the same text. `detail` says what the engine
    supports, and which guarantees the run therefore lacks."""
    WARNED = "warned"
    """Something was wrong and the run continued; `detail` says what."""


@dataclass(frozen=True)
class Event:
    t: float
    """Seconds since the epoch."""
    kind: EventKind
    stage: str | None = None
    step: int | None = None
    """The step, or for publish and evaluate the version of the weights."""
    shard: int | None = None
    rank: int | None = None
    """The rank in STARTED and FINISHED of a gang's node. Rank 0 is always there, other ranks only if their times differ
    from it by more than a tenth."""
    gang: str | None = None
    worker: str | None = None
    attempt: str | None = None
    seconds: float | None = None
    store_s: float | None = None
    detail: str | None = None
    rule: str | None = None
    command: str | None = None
    """The command line. Only RUN_STARTED has it, and `host` (the driver's host) and `code` (the commit of the code)."""
    host: str | None = None
    code: str | None = None
    version: int | None = None
    """The version of the weights to sample with, in SUBMITTED of `generate` under `rollout.versions: latest`."""

    def to_json(self) -> str:
        return codec.encode({k: v for k, v in vars(self).items() if v is not None}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str | bytes) -> Event:
        """Parse a line. Raises NotARecord if it is not an event."""
        return codec.decode(Event, line, complete=False)


class Journal:
    """The open `events.jsonl` of a run. It is appended to, so a resumed run continues it. `listener` also gets every
    event (the progress display)."""

    def __init__(
        self, path: Path, listener: Callable[[Event], None] = lambda event: None, *, part_bytes: int = PART_BYTES
    ) -> None:
        """Open the file and truncate an incomplete last line. Raises AppendFailed."""
        self.path = path
        self._listener = listener
        self._part_bytes = part_bytes
        self._file = LineFile(path)

    def append(self, event: Event) -> None:
        """Write an event whole or not at all, with secrets redacted. Raises AppendFailed, e.g. on a full disk."""
        if event.detail is not None or event.command is not None:
            event = replace(event, detail=redacted(event.detail), command=redacted(event.command))
        self._file.append(event.to_json())
        if self._file.size >= self._part_bytes:
            self._begin_part()
        self._listener(event)

    def now(self, kind: EventKind, **fields: object) -> Event:
        """Append an event with the current time of the driver's clock."""
        event = Event(t=time.time(), kind=kind, **fields)  # type: ignore[arg-type]
        self.append(event)
        return event

    def _begin_part(self) -> None:
        """Rename the file to the next numbered part and open a new one. Open readers keep their file. Raises
        AppendFailed."""
        self._file.close()
        numbers = [number for number, _ in _parts(self.path)]
        try:
            os.rename(self.path, _part(self.path, max(numbers, default=0) + 1))
        except OSError as error:
            raise AppendFailed(f"cannot rename {self.path}: {error.strerror or error}") from error
        self._file = LineFile(self.path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def journal_exists(path: Path) -> bool:
    """Return True if a run has a journal: `events.jsonl` or, if the driver died between two parts, numbered parts."""
    return path.exists() or bool(_parts(path))


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of all parts in the order written.

    Skip a last line without a newline: it is incomplete or still being written. For any other line that is not an
    event, yield a `WARNED` with the time of the event before it. Raises FileNotFoundError if there is no journal."""
    before = 0.0
    with ExitStack() as stack:
        parts = _open_parts(path, stack)
        for i in range(len(parts)):
            name, lines = parts[i]
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and i == len(parts) - 1:
                    return
                event = _whole_event(line)
                if event is None:
                    event = Event(before, EventKind.WARNED, detail=f"{name}: line {number} is torn, and is passed over")
                before = event.t
                yield event


def _open_parts(path: Path, stack: ExitStack) -> list[tuple[Path, IO[bytes]]]:
    """Open every part, in order.

    The newest part is opened first. If the driver renames it to a numbered part meanwhile, the search finds it again;
    the comparison of inodes detects this."""
    newest = stack.enter_context(path.open("rb")) if path.exists() or not _parts(path) else None
    parts: list[tuple[Path, IO[bytes]]] = []
    for _, part in _parts(path):
        lines = stack.enter_context(part.open("rb"))
        if newest is not None and os.path.samestat(os.fstat(lines.fileno()), os.fstat(newest.fileno())):
            break
        parts.append((part, lines))
    return parts if newest is None else [*parts, (path, newest)]


def _parts(path: Path) -> list[tuple[int, Path]]:
    """Return number and path of each full part, in order."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix))
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted((int(match[1]), part) for part in found if (match := pattern.fullmatch(part.name)))


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def is_finished(events: Iterable[Event]) -> bool:
    """Return True if the last driver finished the run."""
    ends = [event.kind for event in events if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED)]
    return ends[-1:] == [EventKind.RUN_FINISHED]


def run_starts(path: Path) -> list[float]:
    """Return the start time of each driver of a run, in seconds since the epoch; empty if there is no journal yet."""
    if not journal_exists(path):
        return []
    with ExitStack() as stack:  # a long run's journal has a million lines: parse only these few
        started = f'"{EventKind.RUN_STARTED.value}"'.encode()
        lines = [line for _, part in _open_parts(path, stack) for line in part if started in line]
    events = (event for event in map(_whole_event, lines) if event is not None)
    return [event.t for event in events if event.kind is EventKind.RUN_STARTED]


def _whole_event(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is not an event."""
    try:
        return Event.from_json(line)
    except codec.NotARecord:
        return None


# ---- appending lines -------------------------------------------------------------------------------------


class AppendFailed(RuntimeError):
    """A line could not be written; the message names the file and the reason. The file keeps its earlier lines, and
    the commits of the run stay."""


class LineFile:
    """A file of lines that is open for appending."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and truncate an incomplete last line. Raises AppendFailed."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._end = _whole_bytes(self._descriptor)
            os.truncate(self._descriptor, self._end)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, text: str) -> None:
        """Write one line whole or not at all; `text` contains no newline. Raises AppendFailed."""
        data = (text + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next opening truncates the line
                os.truncate(self._descriptor, self._end)
            raise self._failure(error) from error
        self._end += len(data)

    @property
    def size(self) -> int:
        """Bytes of all whole lines."""
        return self._end

    def close(self) -> None:
        """Close the file. A second call does nothing."""
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
    """Return the length of a file up to and including its last newline. The search runs from the end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

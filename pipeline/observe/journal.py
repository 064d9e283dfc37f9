"""The journal of a run: one JSON line per event. Timeline, report and summary are made from the journal.

    events-000001.jsonl, events-000002.jsonl, ...    full parts, in order; never written again
    events.jsonl                                     the newest part, open for appending

Only the driver writes the journal. Workers send their start and end times to the driver with the results of their
nodes. If a crash or a damaged disk corrupts a line, only the event on this line is lost. Readers then yield a warning
in place of the event.

`LineFile` appends whole lines to a file, for the journal and for the spool of experiment tracking. One process at a
time may have the file open. On opening, an incomplete last line is truncated. If an append fails, for example on a full
disk, the partial line is truncated and AppendFailed is raised.
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
from typing import IO

from storage import codec
from storage.files import Closing
from storage.redaction import redacted

PART_BYTES = 64 << 20
"""Size at which `events.jsonl` is renamed to a numbered part."""


class EventKind(StrEnum):
    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    SUBMITTED = "submitted"
    """The driver handed a node to `worker`. The node may have to wait there. `t` is read from the driver's clock."""
    STARTED = "started"
    """The stage began on a worker. `t` is read from the worker's clock."""
    FINISHED = "finished"
    """The output of the stage was committed. `t` is read from the worker's clock. The stage took `seconds`. The last
    `store_s` of these seconds were spent on store and ledger."""
    FAILED = "failed"
    """An attempt to run a node was lost or raised an error. `detail` says why."""
    PUBLISHED = "published"
    """Weights of version `step` became readable."""
    GANG_BUILT = "gang_built"
    GANG_LOST = "gang_lost"
    ALARM = "alarm"
    """Something needs attention now. `detail` describes it. If `stage` is `canary`, engine and trainer differ at
    version `step` of the weights, or the engine seems to have kept older weights. Otherwise `rule` is the name of the
    rule in section `alarms` of the config."""
    ROWS_MIGRATED = "rows_moved"
    """`worker` finished a migration of rows to another replica. `detail` lists the number of accepted rows, the copied
    bytes and the waiting times. If the other replica refused rows, `detail` also says why."""
    DEVICES_HANDED_OVER = "devices_passed"
    """The workers of `gang` released the devices that this gang shares with other gangs. `detail` contains the name of
    the gang that uses the devices next, and the duration of the release in seconds."""
    ENGINE = "engine"
    """An engine was built. `detail` lists what the engine supports, and the guarantees that the run lacks because of
    the engine. Later engines with the same `detail` are not recorded."""
    WARNED = "warned"
    """Something was wrong, but the run continued. `detail` says what was wrong."""


@dataclass(frozen=True)
class Event:
    t: float
    """Seconds since the epoch."""
    kind: EventKind
    stage: str | None = None
    step: int | None = None
    """The PPO step that the event belongs to. For the stages `publish`, `canary` and `evaluate*`, and for events of
    kind PUBLISHED, it is the version of the weights instead."""
    shard: int | None = None
    rank: int | None = None
    """The rank that ran the node. Rank 0 always has the events STARTED and FINISHED. Another rank has these events only
    if it has a warning, or if its times differ from the times of rank 0. Differences up to 0.1 s, or up to a tenth of
    the duration on rank 0, do not count."""
    gang: str | None = None
    worker: str | None = None
    attempt: str | None = None
    seconds: float | None = None
    store_s: float | None = None
    detail: str | None = None
    rule: str | None = None
    command: str | None = None
    """The driver's command line. Only RUN_STARTED has `command`, `host` (the driver's host) and `code` (the git commit
    of the code)."""
    host: str | None = None
    code: str | None = None
    version: int | None = None
    """The version of the weights to sample with. Only SUBMITTED of stage `generate` has a version, and only if
    `rollout.versions` is `latest`."""
    cpu_s: float | None = None
    """CPU time of the driver's process since its start, in seconds. It includes the scheduler, which runs in the same
    process. Only events of kind PUBLISHED have this field; it is None in all other events."""

    def to_json(self) -> str:
        return codec.encode({k: v for k, v in vars(self).items() if v is not None}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str | bytes) -> Event:
        """Return the event of a line. Raises NotARecord if the line is not an event."""
        return codec.decode(Event, line, complete=False)


class Journal(Closing):
    """The journal of a run, open for appending. A resumed run appends to the existing file. The function `listener` is
    called with every event, for example to update the progress display."""

    def __init__(
        self, path: Path, listener: Callable[[Event], None] = lambda event: None, *, part_bytes: int = PART_BYTES
    ) -> None:
        """Open the file and truncate an incomplete last line. Raises AppendFailed if this is not possible.
        `part_bytes`: size at which the file is renamed to a numbered part."""
        self.path = path
        self._listener = listener
        self._part_bytes = part_bytes
        self._file = LineFile(path)

    def append(self, event: Event) -> None:
        """Write a whole event or nothing, with secrets redacted. Then call `listener`.

        Raises:
            AppendFailed: the line cannot be written, for example because the disk is full; or the line is written, but
                the next part cannot be begun. In both cases `listener` is not called."""
        if event.detail is not None or event.command is not None:
            event = replace(event, detail=redacted(event.detail), command=redacted(event.command))
        self._file.append(event.to_json())
        if self._file.size >= self._part_bytes:
            self._begin_part()
        self._listener(event)

    def append_now(self, kind: EventKind, **fields: object) -> Event:
        """Append an event with the current time of the driver's clock."""
        event = Event(t=time.time(), kind=kind, **fields)  # type: ignore[arg-type]
        self.append(event)
        return event

    def _begin_part(self) -> None:
        """Rename the file to the next numbered part, which readers can go on reading, and open a new one. Raises
        AppendFailed."""
        self._file.close()
        numbers = [number for number, _ in _list_parts(self.path)]
        try:
            os.rename(self.path, _part_path(self.path, max(numbers, default=0) + 1))
        except OSError as error:
            raise AppendFailed(f"cannot rename {self.path}: {error.strerror or error}") from error
        self._file = LineFile(self.path)

    def close(self) -> None:
        self._file.close()


def journal_exists(path: Path) -> bool:
    """Return True if `path` (`events.jsonl`) or a numbered part exists. If the driver died after it had renamed
    `events.jsonl` to a numbered part, only numbered parts exist."""
    return path.exists() or bool(_list_parts(path))


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of all parts, in the order in which they were written.

    A last line without a newline is skipped, because it is incomplete or still being written. In place of any other
    line that is not an event, a `WARNED` event is yielded. It has the time of the preceding event, or 0.0 if no event
    precedes it.

    Raises:
        FileNotFoundError: there is no journal."""
    before = 0.0
    with ExitStack() as stack:
        parts = _open_parts(path, stack)
        for i in range(len(parts)):
            name, lines = parts[i]
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and i == len(parts) - 1:
                    return
                event = _parse_event(line)
                if event is None:
                    event = Event(before, EventKind.WARNED, detail=f"{name}: line {number} is torn, and is passed over")
                before = event.t
                yield event


def _open_parts(path: Path, stack: ExitStack) -> list[tuple[Path, IO[bytes]]]:
    """Return (path, open file) of each part of the journal, oldest first. `events.jsonl` is opened first. The driver
    may rename it before the parts are listed; its inode then ends the list, since later parts have only later events.
    Raises FileNotFoundError if there is no journal."""
    newest = stack.enter_context(path.open("rb")) if path.exists() or not _list_parts(path) else None
    parts: list[tuple[Path, IO[bytes]]] = []
    for _, part in _list_parts(path):
        lines = stack.enter_context(part.open("rb"))
        if newest is not None and os.path.samestat(os.fstat(lines.fileno()), os.fstat(newest.fileno())):
            break
        parts.append((part, lines))
    return parts if newest is None else [*parts, (path, newest)]


def _list_parts(path: Path) -> list[tuple[int, Path]]:
    """Return (number, path) of each full part, in order."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix))
    files = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted((int(match[1]), part) for part in files if (match := pattern.fullmatch(part.name)))


def _part_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def is_finished(events: Iterable[Event]) -> bool:
    """Return True if the last driver finished the run."""
    ends = [event.kind for event in events if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED)]
    return ends[-1:] == [EventKind.RUN_FINISHED]


def read_run_starts(path: Path) -> list[float]:
    """Return the start time of each driver of a run, in seconds since the epoch. Empty if there is no journal yet."""
    if not journal_exists(path):
        return []
    with ExitStack() as stack:  # parse only the lines that may match: a long run's journal has a million lines
        started = f'"{EventKind.RUN_STARTED.value}"'.encode()
        lines = [line for _, part in _open_parts(path, stack) for line in part if started in line]
    events = (event for event in map(_parse_event, lines) if event is not None)
    return [event.t for event in events if event.kind is EventKind.RUN_STARTED]


def _parse_event(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is not an event."""
    try:
        return Event.from_json(line)
    except codec.NotARecord:
        return None


# ---- appending lines -------------------------------------------------------------------------------------


class AppendFailed(RuntimeError):
    """A line could not be written. The message names the file and the reason. The earlier lines of the file, and the
    commits of the run, are not affected."""


class LineFile(Closing):
    """A file of lines that is open for appending."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and truncate an incomplete last line. Raises AppendFailed if this is not possible."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._end = _complete_lines_bytes(self._descriptor)
            os.truncate(self._descriptor, self._end)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, text: str) -> None:
        """Write one whole line or nothing. `text` must not contain a newline.

        Raises:
            AppendFailed: the line cannot be written."""
        data = (text + "\n").encode()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
        except OSError as error:
            with contextlib.suppress(OSError):  # if this fails, the next opening truncates the line
                os.truncate(self._descriptor, self._end)
            raise self._failure(error) from error
        self._end += len(data)

    @property
    def size(self) -> int:
        """Size of all whole lines, in bytes."""
        return self._end

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _failure(self, error: OSError) -> AppendFailed:
        return AppendFailed(f"cannot write to {self.path}: {error.strerror or error}")


def _complete_lines_bytes(descriptor: int, block: int = 1 << 16) -> int:
    """Return the number of bytes of a file up to and including its last newline, or 0 if it has no newline. The file is
    read backwards from its end, `block` bytes at a time."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

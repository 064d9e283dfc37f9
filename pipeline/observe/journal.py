"""The run's journal: one JSON line per event in `events.jsonl`, from which timeline, report and summary are drawn.

    events-000001.jsonl, events-000002.jsonl, ...    full parts, in order; never written again
    events.jsonl                                     the newest part, which is appended to

The driver is the only writer; worker times travel in the nodes' results. A line that a crash has torn, or that a
damaged disk gives back, costs what it said and no more: readers put a warning in its place.

May import the standard library and pipeline.observe.appending.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, TracebackType
from typing import IO

from pipeline.observe.appending import AppendFailed, LineFile

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
    """The stage's output was committed (t: worker's clock); `seconds` and, of those, `store_s` spent on store and
    ledger."""
    FAILED = "failed"
    """An attempt was lost or raised; `detail` says why."""
    PUBLISHED = "published"
    """Weights of version `step` became readable."""
    GANG_BUILT = "gang_built"
    GANG_LOST = "gang_lost"
    ALARM = "alarm"
    """Something that somebody should look at now; `detail` says what. Of stage `canary`: engine and trainer differ at
    version `step` of the weights; of others `rule` says which of `alarms.*`."""
    ROWS_MOVED = "rows_moved"
    """Rows left `worker` to go on in another replica; `detail` says how many and where to."""
    DEVICES_PASSED = "devices_passed"
    """The workers of `gang` have left the devices that it has in turn with others; `detail` says to whom, after how
    long."""
    ENGINE = "engine"
    """An engine of the run is built that is not yet known; `detail` says what it can do, and what the run may therefore
    not prove."""
    WARNED = "warned"
    """Something was not as it should be, and the run went on; `detail` says what."""


@dataclass(frozen=True)
class Event:
    t: float
    """Seconds since the epoch."""
    kind: EventKind
    stage: str | None = None
    step: int | None = None
    """For publish and evaluate: the version of the weights."""
    shard: int | None = None
    rank: int | None = None
    """STARTED, FINISHED of a gang's node: always 0, and others only where they differ from it by more than a tenth."""
    gang: str | None = None
    worker: str | None = None
    attempt: str | None = None
    seconds: float | None = None
    store_s: float | None = None
    detail: str | None = None
    rule: str | None = None
    command: str | None = None
    """RUN_STARTED: the command line; likewise `host`, the driver's, and `code`, the commit of what runs."""
    host: str | None = None
    code: str | None = None
    version: int | None = None
    """SUBMITTED, of `generate` under `rollout.versions: latest`: of the weights that it is to be sampled with."""

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in vars(self).items() if v is not None}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Event:
        """Raises ValueError, KeyError, TypeError or AttributeError for a line that is no event."""
        fields = json.loads(line)
        kind = EventKind(fields.pop("kind"))
        for name, value in fields.items():
            if name in _NUMBERS and not isinstance(value, _NUMBERS[name]):
                raise TypeError(f"{name}: {value!r}")
        return Event(kind=kind, **fields)


_NUMBERS: dict[str, tuple[type, ...]] = {
    "t": (float, int),
    **dict.fromkeys(("step", "shard", "rank"), (int, NoneType)),
    **dict.fromkeys(("seconds", "store_s"), (float, int, NoneType)),
}
"""Fields of an event that are computed with, and what they may be."""


class Journal:
    """Owns the open `events.jsonl` of a run; appends, so that a resumed run continues it. `listener` gets
    every event too (the progress display)."""

    def __init__(
        self, path: Path, listener: Callable[[Event], None] = lambda event: None, *, part_bytes: int = PART_BYTES
    ) -> None:
        """A last line that a crash cut short is cut off. Raises AppendFailed, as `append` does."""
        self.path = path
        self._listener = listener
        self._part_bytes = part_bytes
        self._file = LineFile(path)

    def append(self, event: Event) -> None:
        """Writes an event, whole or not at all. Raises AppendFailed, for a full disk say."""
        self._file.append(event.to_json())
        if self._file.size >= self._part_bytes:
            self._begin_part()
        self._listener(event)

    def now(self, kind: EventKind, **fields: object) -> Event:
        """Appends an event that happens now, by the driver's clock."""
        event = Event(t=time.time(), kind=kind, **fields)  # type: ignore[arg-type]
        self.append(event)
        return event

    def _begin_part(self) -> None:
        """The file gets the next number; whoever reads it goes on reading it. Raises AppendFailed."""
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
    """Whether a run has a journal: a driver may have died before it had begun the part after the last full one."""
    return path.exists() or bool(_parts(path))


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run in the order written, through all parts. A last line without an end, which is torn or still
    being written, is left out; in place of another that is no event comes a `WARNED`, of the time of the event before
    it. Raises FileNotFoundError where there is no journal."""
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
    """Every part in order, open. The newest is opened first: it may become a numbered part meanwhile, and is then
    among those that are found; whether it did, its inode tells."""
    newest = stack.enter_context(path.open("rb")) if path.exists() or not _parts(path) else None
    parts: list[tuple[Path, IO[bytes]]] = []
    for _, part in _parts(path):
        lines = stack.enter_context(part.open("rb"))
        if newest is not None and os.path.samestat(os.fstat(lines.fileno()), os.fstat(newest.fileno())):
            break
        parts.append((part, lines))
    return parts if newest is None else [*parts, (path, newest)]


def _parts(path: Path) -> list[tuple[int, Path]]:
    """Number and place of the full parts, in order."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix))
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted((int(match[1]), part) for part in found if (match := pattern.fullmatch(part.name)))


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def run_starts(path: Path) -> list[float]:
    """When each driver of a run started, in seconds since the epoch; empty where there is no journal yet."""
    if not journal_exists(path):
        return []
    with ExitStack() as stack:  # a long run's journal has a million lines, and these are a handful
        started = f'"{EventKind.RUN_STARTED.value}"'.encode()
        lines = [line for _, part in _open_parts(path, stack) for line in part if started in line]
    events = (event for event in map(_whole_event, lines) if event is not None)
    return [event.t for event in events if event.kind is EventKind.RUN_STARTED]


def _whole_event(line: bytes) -> Event | None:
    """The event of a line; None for one that is none."""
    try:
        return Event.from_json(line.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None

"""The run's journal: one JSON line per event in `events.jsonl`, from which timeline, report and summary are drawn.

The driver is the only writer; worker times travel in the nodes' results. A line that a crash has torn, or that a
damaged disk gives back, costs what it said and no more: readers put a warning in its place.

May import the standard library and pipeline.observe.appending.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

from pipeline.observe.appending import LineFile


class EventKind(StrEnum):
    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    SUBMITTED = "submitted"
    """The driver handed a node to Dask (t: driver's clock)."""
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

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in vars(self).items() if v is not None}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Event:
        fields = json.loads(line)
        return Event(kind=EventKind(fields.pop("kind")), **fields)


class Journal:
    """Owns the open `events.jsonl` of a run; appends, so that a resumed run continues it. `listener` gets
    every event too (the progress display)."""

    def __init__(self, path: Path, listener: Callable[[Event], None] = lambda event: None) -> None:
        """A last line that a crash cut short is cut off. Raises AppendFailed, as `append` does."""
        self.path = path
        self._listener = listener
        self._file = LineFile(path)

    def append(self, event: Event) -> None:
        """Writes an event, whole or not at all. Raises AppendFailed, for a full disk say."""
        self._file.append(event.to_json())
        self._listener(event)

    def now(self, kind: EventKind, **fields: object) -> Event:
        """Appends an event that happens now, by the driver's clock."""
        event = Event(t=time.time(), kind=kind, **fields)  # type: ignore[arg-type]
        self.append(event)
        return event

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a run in the order written. A last line without an end, which is torn or still being written, is
    left out; in place of another that is no event comes a `WARNED`, of the time of the event before it."""
    before = 0.0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = Event.from_json(line.decode())
            except (ValueError, KeyError, TypeError, AttributeError):
                event = Event(before, EventKind.WARNED, detail=f"{path}: line {number} is torn, and is passed over")
            before = event.t
            yield event


def run_starts(path: Path) -> list[float]:
    """When each driver of a run started, in seconds since the epoch; empty where there is no journal yet."""
    if not path.exists():
        return []
    return [event.t for event in read_events(path) if event.kind is EventKind.RUN_STARTED]

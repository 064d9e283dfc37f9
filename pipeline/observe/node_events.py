"""What the journal says of single nodes, gangs and troubles, folded event by event: for who watches a run, or looks at
one that has ended.

May import pipeline.observe.journal and storage.address.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from pipeline.observe.journal import Event, EventKind
from storage.address import Address

_REMEMBERED = 4096
"""Nodes: more than a page shows of any run."""
_NOTES = 12
_NOTED = {
    EventKind.ALARM: "alarm",
    EventKind.WARNED: "warning",
    EventKind.GANG_LOST: "lost",
    EventKind.FAILED: "failed",
    EventKind.ROWS_MOVED: "rows moved",
}


@dataclass(frozen=True)
class Note:
    """Something that a person may want to know."""

    at: float
    """Seconds since the epoch."""
    kind: str
    text: str


@dataclass(frozen=True)
class Begun:
    """A node that was handed to a worker and has not ended."""

    worker: str
    since: float
    """Seconds since the epoch."""


@dataclass
class NodeEvents:
    """Owns the fold: give it every event in order."""

    begun: dict[Address, Begun] = field(default_factory=dict)
    seconds: OrderedDict[Address, float] = field(default_factory=OrderedDict)
    """How long the last nodes took."""
    workers: OrderedDict[Address, str] = field(default_factory=OrderedDict)
    """Who did the last nodes."""
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=_NOTES))
    last: float = 0.0
    """Time of the latest event, seconds since the epoch."""
    finished: bool = False
    """Whether the last driver came to the run's end."""

    def take(self, event: Event) -> None:
        """Goes on by one event."""
        self.last = max(self.last, event.t)
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED):
            self.finished = event.kind is EventKind.RUN_FINISHED
            self.begun.clear()
        if event.kind is EventKind.GANG_LOST:
            self.begun = {a: begun for a, begun in self.begun.items() if begun.worker != event.worker}
        if event.stage is not None and event.step is not None:
            self._take_node(event, Address(event.stage, event.step, event.shard or 0))
        if event.kind in _NOTED:
            step = None if event.step is None else f"step {event.step}" if event.stage is None else str(event.step)
            where = [part for part in (event.worker, event.stage, step) if part is not None]
            text = ": ".join(part for part in (" ".join(where), event.detail or "") if part)
            self.notes.append(Note(event.t, _NOTED[event.kind], text))

    def _take_node(self, event: Event, address: Address) -> None:
        if event.kind is EventKind.SUBMITTED:
            self.seconds.pop(address, None)
            self.workers.pop(address, None)
            if event.worker is not None:
                self.begun[address] = Begun(event.worker, event.t)
        elif event.kind in (EventKind.FINISHED, EventKind.FAILED):
            self.begun.pop(address, None)
        # Of a gang rank 0 comes first, and others only where they differ.
        if event.kind is EventKind.FINISHED and event.worker is not None and address not in self.seconds:
            self.seconds[address] = event.seconds or 0.0
            self.workers[address] = event.worker
            if len(self.seconds) > _REMEMBERED:
                self.seconds.popitem(last=False)
                self.workers.popitem(last=False)

"""What the journal says of single nodes, gangs and troubles, folded event by event: for who watches a run, or looks at
one that has ended.

May import pipeline.observe.journal and storage.address.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
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
class HandedOut:
    """A node that was handed to a worker and has not ended. It may have been queued there."""

    gang: str | None
    worker: str
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Ended:
    """A node that has its commit."""

    worker: str
    at: float
    """Seconds since the epoch."""
    seconds: float
    """How long it took."""


@dataclass
class NodeEvents:
    """Owns the fold: give it every event in order."""

    together: Collection[str] = ()
    """Gangs whose workers are lost and built together."""
    out: dict[Address, HandedOut] = field(default_factory=dict)
    ended: OrderedDict[Address, Ended] = field(default_factory=OrderedDict)
    """The last nodes."""
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=_NOTES))
    last: float = 0.0
    """Time of the latest event, seconds since the epoch."""
    finished: bool = False
    """Whether the last driver came to the run's end."""
    _free_since: dict[str, float] = field(default_factory=dict)
    """By worker: when it ended a node last."""
    _lost: dict[str, tuple[str | None, float]] = field(default_factory=dict)
    """By worker that is not back: its gang, and when it was lost."""

    def begun(self, address: Address, parents: Iterable[Address], threads: int) -> float | None:
        """When a worker that runs `threads` nodes at once began a node, in seconds since the epoch: at the earliest
        when it was handed it, its parents were done and, with one thread, nothing else ran there. None where the
        journal says nothing of it."""
        out = self.out.get(address)
        if out is None:
            return None
        times = [out.at, *(self.ended[parent].at for parent in parents if parent in self.ended)]
        times += [self._free_since.get(out.worker, 0.0)] if threads == 1 else []
        return max(times)

    def take(self, event: Event) -> None:
        """Goes on by one event."""
        self.last = max(self.last, event.t)
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED):
            self.finished = event.kind is EventKind.RUN_FINISHED
            self.out.clear()
            self._lost.clear()
        if event.kind in (EventKind.GANG_LOST, EventKind.GANG_BUILT):
            self._take_worker(event)
        if event.stage is not None and event.step is not None:
            self._take_node(event, Address(event.stage, event.step, event.shard or 0))
        if event.kind in _NOTED:
            step = None if event.step is None else f"step {event.step}" if event.stage is None else str(event.step)
            where = [part for part in (event.worker, event.stage, step) if part is not None]
            text = ": ".join(part for part in (" ".join(where), event.detail or "") if part)
            self.notes.append(Note(event.t, _NOTED[event.kind], text))

    def _take_node(self, event: Event, address: Address) -> None:
        if event.kind is EventKind.SUBMITTED:
            self.ended.pop(address, None)
            if event.worker is not None:
                self.out[address] = HandedOut(event.gang, event.worker, event.t)
        elif event.kind in (EventKind.FINISHED, EventKind.FAILED):
            self.out.pop(address, None)
        # Of a gang rank 0 comes first, and others only where they differ.
        if event.kind is EventKind.FINISHED and event.worker is not None and address not in self.ended:
            self.ended[address] = Ended(event.worker, event.t, event.seconds or 0.0)
            self._free_since[event.worker] = event.t
            if len(self.ended) > _REMEMBERED:
                self.ended.popitem(last=False)

    def _take_worker(self, event: Event) -> None:
        """Workers were lost with what they had, or are back."""

        def concerned(gang: str | None, worker: str | None) -> bool:
            return gang == event.gang if event.gang in self.together else worker == event.worker

        if event.kind is EventKind.GANG_LOST and event.worker is not None:
            self.out = {a: out for a, out in self.out.items() if not concerned(out.gang, out.worker)}
            self._lost.setdefault(event.worker, (event.gang, event.t))
            return
        for worker, (gang, at) in list(self._lost.items()):
            if concerned(gang, worker):
                del self._lost[worker]
                self.notes.append(Note(event.t, "recovered", f"{worker}: built again in {event.t - at:.1f} s"))

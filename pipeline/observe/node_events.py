"""State that is computed from the journal, event by event, for the live display and for the page of an ended run.

`NodeEvents` tracks which nodes are handed out or finished, and collects notes. `WorkerLosses` tracks lost trainers
until they train again, for the messages above the display and the metrics of a step:

    GANG_LOST ──► lost ──GANG_BUILT──► built ──an update ends──► trained ──a step is over──► reported
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.observe.journal import Event, EventKind
from storage.address import Address

_REMEMBERED = 4096
"""Number of finished nodes to keep: more than a page shows."""
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
    """A message for the page."""

    at: float
    """Seconds since the epoch."""
    kind: str
    text: str


@dataclass(frozen=True)
class HandedOut:
    """A node that was handed to a worker and has not ended; it may be queued there."""

    gang: str | None
    worker: str
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Ended:
    """A node whose output is committed."""

    worker: str
    at: float
    """Seconds since the epoch."""
    seconds: float
    """Duration."""


@dataclass
class NodeEvents:
    """State of nodes and workers. `take` must get every event, in order."""

    together: Collection[str] = ()
    """Gangs whose workers are lost and built together."""
    out: dict[Address, HandedOut] = field(default_factory=dict)
    ended: OrderedDict[Address, Ended] = field(default_factory=OrderedDict)
    """The nodes that finished last."""
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=_NOTES))
    last: float = 0.0
    """Time of the latest event, seconds since the epoch."""
    finished: bool = False
    """True if the last driver finished the run."""
    _free_since: dict[str, float] = field(default_factory=dict)
    """Time at which each worker last finished a node."""
    _lost: dict[str, tuple[str | None, float]] = field(default_factory=dict)
    """Gang and time of the loss, by lost worker that is not built again."""

    def begun(self, address: Address, parents: Iterable[Address], threads: int) -> float | None:
        """Return the earliest time at which a worker with `threads` threads can have started a node, in seconds since
        the epoch: the node is handed out, its parents are done and, with one thread, the worker is free. None if the
        journal has no such node in progress."""
        out = self.out.get(address)
        if out is None:
            return None
        times = [out.at, *(self.ended[parent].at for parent in parents if parent in self.ended)]
        times += [self._free_since.get(out.worker, 0.0)] if threads == 1 else []
        return max(times)

    def take(self, event: Event) -> None:
        """Update the state with one event."""
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
        # Of a gang, rank 0 comes first; other ranks are there only if their times differ.
        if event.kind is EventKind.FINISHED and event.worker is not None and address not in self.ended:
            self.ended[address] = Ended(event.worker, event.t, event.seconds or 0.0)
            self._free_since[event.worker] = event.t
            if len(self.ended) > _REMEMBERED:
                self.ended.popitem(last=False)

    def _take_worker(self, event: Event) -> None:
        """Remove a lost worker's nodes, or note that a worker is built again."""

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


# ---- lost trainers ---------------------------------------------------------------------------------------

_UPDATES = frozenset({"update_policy", "update_critic"})


@dataclass(frozen=True)
class WorkerLoss:
    """The loss of a worker of a training gang."""

    worker: str
    at: float
    """Time of the loss; all times are in seconds since the epoch."""
    built: float | None = None
    trained: float | None = None


@dataclass
class WorkerLosses:
    """Losses of training gangs that do not train again yet. `take` must get every event, in order."""

    step: int = 0
    """The step that is being trained."""
    _open: dict[str, WorkerLoss] = field(default_factory=dict)
    """Losses by gang. If a gang is lost several times before it trains again, the first loss counts."""
    _trainers: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """Update the state with one event."""
        gang = event.gang
        if gang is None:
            return
        if event.stage in _UPDATES:
            self._trainers.add(gang)
        loss = self._open.get(gang)
        if event.kind is EventKind.GANG_LOST and gang in self._trainers and loss is None:
            self._open[gang] = WorkerLoss(event.worker or gang, event.t)
        elif event.kind is EventKind.GANG_BUILT and loss is not None and loss.built is None:
            self._open[gang] = replace(loss, built=event.t)
        elif (
            event.kind is EventKind.FINISHED and event.stage in _UPDATES and loss is not None and loss.built is not None
        ):
            begun = event.t - (event.seconds or 0.0)
            if begun >= loss.at and loss.trained is None:
                self._open[gang] = replace(loss, trained=event.t)

    def over(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], dict[str, float]]:
        """Close a step: return messages about the trainers that train again, and the metrics of their losses."""
        lost_at, self.step = self.step, step + 1
        back = {gang: loss for gang, loss in self._open.items() if loss.trained is not None}
        self._open = {gang: loss for gang, loss in self._open.items() if gang not in back}
        replayed = sum(metrics.get(f"{role}/replayed_updates", 0.0) for role in ("policy", "critic"))
        lines = [_line(loss, lost_at, int(replayed)) for loss in back.values()]
        seconds = sum(loss.trained - loss.at for loss in back.values() if loss.trained is not None)
        return lines, {"trainer/lost_s": seconds} if back else {}


def _line(loss: WorkerLoss, step: int, replayed: int) -> str:
    built = "" if loss.built is None else f"rebuilt in {loss.built - loss.at:.0f} s, "
    updates = f"{replayed} update{'' if replayed == 1 else 's'} replayed"
    return f"{loss.worker} lost at step {step}; {built}{updates}"

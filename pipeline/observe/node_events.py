"""A record of the nodes in progress and of the latest finished nodes. Every event of the journal updates the record.
The live display and `/stageline` show it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.observe.incidents import Incident, WorkerLosses, incident_of_event
from pipeline.observe.journal import Event, EventKind
from storage.address import Address

_REMEMBERED = 4096
"""Maximum number of finished nodes that are kept. It is larger than `graph_view.MAX_NODES`."""
_INCIDENTS = 12
"""Maximum number of incidents that are kept. The oldest are dropped first."""


@dataclass(frozen=True)
class SubmittedNode:
    """A node that was handed to a worker and has not ended. The worker is running it or has it in its queue."""

    gang: str | None
    worker: str
    submitted_at: float
    """Time at which the node was handed to the worker, seconds since the epoch."""


@dataclass(frozen=True)
class FinishedNode:
    """A node whose output is committed."""

    worker: str
    finished_at: float
    """Time of the commit, seconds since the epoch."""
    seconds: float
    """Duration of the execution in seconds."""


@dataclass
class NodeEvents:
    """The current state of nodes and workers. `apply_event` must be called with every event, in order."""

    losses: WorkerLosses = field(default_factory=WorkerLosses)
    submitted: dict[Address, SubmittedNode] = field(default_factory=dict)
    finished: OrderedDict[Address, FinishedNode] = field(default_factory=OrderedDict)
    """The finished nodes, in the order in which they finished. If there are more than `_REMEMBERED` nodes, the oldest
    are dropped."""
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=_INCIDENTS))
    latest_event_s: float = 0.0
    """Time of the latest event, seconds since the epoch."""
    _free_since: dict[str, float] = field(default_factory=dict)
    """Worker -> time at which it last finished a node, seconds since the epoch."""

    def earliest_start(self, address: Address, parents: Iterable[Address], threads: int) -> float | None:
        """Return the earliest time at which a node in progress can have started, in seconds since the epoch. Return
        None if the node is not in progress.

        By this time the worker had received the node, and the node's parents had finished. Parents that are not in
        `finished` are ignored. If the worker has only one thread, the worker's previous node had finished too.

        Args:
            address: the node.
            parents: the parents of the node.
            threads: number of nodes that the worker can run at the same time."""
        out = self.submitted.get(address)
        if out is None:
            return None
        times = [
            out.submitted_at,
            *(self.finished[parent].finished_at for parent in parents if parent in self.finished),
        ]
        times += [self._free_since.get(out.worker, 0.0)] if threads == 1 else []
        return max(times)

    def apply_event(self, event: Event) -> None:
        """Update the state with one event."""
        self.latest_event_s = max(self.latest_event_s, event.t)
        self.losses.apply_event(event)
        incident = incident_of_event(event, self.losses)
        if incident is not None:
            self.incidents.append(incident)
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED):
            self.submitted.clear()
        if event.kind is EventKind.GANG_LOST:
            together = event.gang in self.losses.rebuilt_together
            lost = {
                a for a, o in self.submitted.items() if (o.gang == event.gang if together else o.worker == event.worker)
            }
            self.submitted = {address: out for address, out in self.submitted.items() if address not in lost}
        if event.stage is not None and event.step is not None:
            self._apply_node_event(event, Address(event.stage, event.step, event.shard or 0))

    def _apply_node_event(self, event: Event, address: Address) -> None:
        if event.kind is EventKind.SUBMITTED:
            self.finished.pop(address, None)
            if event.worker is not None:
                self.submitted[address] = SubmittedNode(event.gang, event.worker, event.t)
        elif event.kind in (EventKind.FINISHED, EventKind.FAILED):
            self.submitted.pop(address, None)
        # Rank 0's event comes first and is kept. Other ranks have an event only if their times differ.
        if event.kind is EventKind.FINISHED and event.worker is not None and address not in self.finished:
            self.finished[address] = FinishedNode(event.worker, event.t, event.seconds or 0.0)
            self._free_since[event.worker] = event.t
            if len(self.finished) > _REMEMBERED:
                self.finished.popitem(last=False)

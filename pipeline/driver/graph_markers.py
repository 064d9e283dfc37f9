"""The graph of the window as Dask's dashboard sees it: a marker for each node, with all of its edges.

    driver's thread, once a second:  dispatch ──marker_states──► wanted ──► the scheduler's loop
    scheduler's loop:                wanted ──difference──► tasks are added, change their state, are forgotten

    generate-commit-000003: waiting ─parents done─► queued ─a worker begins it─► processing ─committed─► memory

A marker is an entry among the scheduler's tasks that nobody computes: no worker hears of it, no client wants it, and
nothing that runs depends on it. So it can hold up nothing, and nothing that dies or stops can hold it up; its state is
what dispatch says. The tasks that compute (`attempts`) cannot carry these edges: Dask fetches what a task depends on,
and computes it again when it is lost.

What leaves the window is forgotten. Dask does so for a task only when nothing depends on it, so that a chain of tasks
over the whole run would never go; and it never forgets that a group of tasks depended on one that is gone, of which its
page of groups then fails. Here both are let go.

May import distributed, pipeline.driver.task_keys, pipeline.graph and storage.address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskGroup, TaskState

from pipeline.driver.task_keys import marker_key
from pipeline.graph.graph import GraphSpec
from pipeline.graph.status import NodeState, NodeStatus, with_steps_over
from storage.address import Address

MOST_MARKERS = 2000
"""More make Dask's page slow; a window of more nodes has none."""
_DASK_STATE = {
    NodeState.WAITING: "waiting",
    NodeState.READY: "queued",
    NodeState.QUEUED: "queued",
    NodeState.RUNNING: "processing",
    NodeState.DONE: "memory",
}
_STIMULUS = "stageline-markers"


@dataclass(frozen=True)
class Marker:
    """What the marker of a node should be."""

    state: str
    """Dask's word."""
    parents: tuple[Address, ...]
    priority: tuple[int, int]


def marker_states(spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int) -> dict[Address, Marker]:
    """Markers of the window, whose steps end before `admitted`, and of the eta + 1 steps before it, on whose
    publications the window's generation depends; parents before children. None where the window alone has more nodes
    than `MOST_MARKERS`."""
    if not statuses or len(statuses) > MOST_MARKERS:
        return {}
    shown = with_steps_over(spec, statuses, admitted, spec.staleness + 1, MOST_MARKERS)
    last = spec.steps - 1  # evaluations of the last versions serve no step: they stand in the last one's column
    return {
        status.node.address: Marker(
            _DASK_STATE[status.state],
            status.node.parents,
            (min(status.node.turn, last), status.node.priority[1]),
        )
        for status in shown
    }


class GraphMarkers(SchedulerPlugin):
    """Owns the markers in a scheduler of this process. Dask calls `transition`; all else is called by the run."""

    name = "stageline-markers"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wanted: Mapping[Address, Marker] = {}
        """The driver's thread: what was asked for last."""
        self._shown: dict[Address, TaskState] = {}
        """The scheduler's loop: the markers that are there."""
        scheduler.loop.add_callback(scheduler.add_plugin, self, name=self.name)

    def show(self, wanted: Mapping[Address, Marker]) -> None:
        """Has the scheduler's loop make the markers these, parents before children; returns at once."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._scheduler.loop.add_callback(self._apply, wanted)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task of any kind changes its state: with the last of a group, groups that depend on it forget it."""
        del start, args, kwargs
        if finish != "forgotten":
            return
        group = self._scheduler.tasks[key].group
        if _all_forgotten(group):
            for other in self._scheduler.task_groups.values():
                other.dependencies.discard(group)

    # ---- in the scheduler's loop -----------------------------------------------------------------------------------

    def _apply(self, wanted: Mapping[Address, Marker]) -> None:
        """`_shown` says at every moment what is there: what a page of Dask's raises ends one call, and the next goes
        on."""
        new = [address for address in wanted if address not in self._shown]
        for address in new:
            self._add(address, wanted[address])
        if new:
            self._announce(new)
        for address, marker in wanted.items():
            self._move(address, marker.state)
        for address in [address for address in self._shown if address not in wanted]:
            self._forget(address)

    def _add(self, address: Address, marker: Marker) -> None:
        task = self._scheduler.new_task(marker_key(address), None, "released")
        task.priority, task.who_has = marker.priority, set()  # Dask's page of a task lists who has it
        for parent in marker.parents:
            found = self._scheduler.tasks.get(marker_key(parent))
            if found is not None:
                task.add_dependency(found)
        self._shown[address] = task

    def _announce(self, new: Sequence[Address]) -> None:
        """Tells Dask's pages, as the scheduler does of tasks that are submitted."""
        tasks = [self._shown[address] for address in new]
        for plugin in list(self._scheduler.plugins.values()):
            plugin.update_graph(
                self._scheduler,
                client="stageline",
                keys={task.key for task in tasks},
                tasks=[task.key for task in tasks],
                annotations={},
                priority={task.key: task.priority for task in tasks},
                stimulus_id=_STIMULUS,
            )

    def _move(self, address: Address, state: str) -> None:
        task = self._shown[address]
        if state == task.state:
            return
        # Pages that draw durations take what goes from one to the other at once for computed, and want to know when.
        if task.state == "processing" and state == "memory":
            self._move(address, "released")
        before, task.state = task.state, state
        task.waiting_on = {p for p in task.dependencies if p.state != "memory"} if state == "waiting" else None
        self._tell(task, before)

    def _forget(self, address: Address) -> None:
        scheduler, task = self._scheduler, self._shown.pop(address)
        before, task.state = task.state, "forgotten"
        try:
            self._tell(task, before)  # while its edges are there, as Dask does
        finally:
            for child in task.dependents:
                child.dependencies.discard(task)
            for parent in task.dependencies:
                parent.dependents.discard(task)
            del scheduler.tasks[task.key]
            if _all_forgotten(task.group):
                task.group.prefix.remove_group(task.group)
                del scheduler.task_groups[task.group.name]

    def _tell(self, task: TaskState, before: str) -> None:
        """Dask's pages, of a change; they look again where the counter has moved."""
        self._scheduler.transition_counter += 1
        for plugin in list(self._scheduler.plugins.values()):
            plugin.transition(task.key, before, task.state, stimulus_id=_STIMULUS)


def _all_forgotten(group: TaskGroup) -> bool:
    """Whether the scheduler drops the group now."""
    return all(number == 0 or state == "forgotten" for state, number in group.states.items())

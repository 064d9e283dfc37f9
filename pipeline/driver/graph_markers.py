"""Show the graph on Dask's dashboard: one marker task for each node of the window (the open steps), with all edges.
Also define the keys of all Dask tasks.

    driver's thread, once a second:  dispatch ──marker_states──► wanted ──► the scheduler's loop
    scheduler's loop:                wanted ──difference──► markers are added, change their state, are removed

    generate-commit-000003: waiting ─parents done─► queued ─a worker begins it─► processing ─committed─► memory

A marker is a task in the scheduler's table that is never computed: no worker or client knows it, and no real task
depends on it. So it cannot block anything, and lost workers cannot block it. Its state comes from Dispatch. The real
tasks (`attempts.py`) cannot carry these edges: Dask would fetch the results of a task's dependencies, and would compute
a lost result again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskGroup, TaskState

from pipeline.graph.display import NodeState, NodeStatus, add_finished_steps
from pipeline.graph.graph import GraphSpec
from storage.address import Address

MAX_MARKERS = 2000
"""Maximum number of marker tasks on Dask's dashboard. With more, the dashboard's page would be slow. If the open steps
alone have more nodes than this, no markers are shown at all."""
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
    """The content that a node's marker should have: its state, the nodes it depends on, and its priority. A marker is a
    Dask task that is never computed. It only shows a node's state on Dask's dashboard."""

    state: str
    """Dask's name of the state."""
    parents: tuple[Address, ...]
    priority: tuple[int, int]


def marker_states(spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int) -> dict[Address, Marker]:
    """Return node address -> the marker that this node should have on Dask's dashboard, parents before children. These
    nodes have markers:
    - the nodes in `statuses`, which are those of the open steps
    - the nodes of finished steps between open steps
    - the nodes of the `spec.staleness` + 1 steps before the oldest open step, because generation in the open steps
      depends on the weights that these steps published

    If there would be more than `MAX_MARKERS` markers, the oldest finished steps are left out. The result is empty if
    `statuses` has no nodes, or more than `MAX_MARKERS`.

    `admitted`: number of steps that have been opened so far, finished steps included.
    """
    if not statuses or len(statuses) > MAX_MARKERS:
        return {}
    shown = add_finished_steps(spec, statuses, admitted, spec.staleness + 1, MAX_MARKERS)
    last = spec.steps - 1  # evaluations of the last versions serve no step of the run: show them in this column
    return {
        status.node.address: Marker(
            _DASK_STATE[status.state],
            status.node.parents,
            (min(status.node.scheduled_step, last), status.node.priority[1]),
        )
        for status in shown
    }


class GraphMarkers(SchedulerPlugin):
    """Owns the marker tasks in a Dask scheduler that runs in this process. A marker is a task that is never computed.
    It shows the state of one node of the run's graph on Dask's dashboard. Dask calls the method `transition`, and the
    driver calls the method `replace_markers`.

    Markers that are no longer wanted are removed here, because Dask would keep them. It keeps a task as long as other
    tasks depend on it, and each step depends on the step before. Dask also keeps a removed task group among the
    dependencies of other groups. Its dashboard page of groups would then fail, so the method `transition` removes these
    entries.
    """

    name = "stageline-markers"

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._wanted: Mapping[Address, Marker] = {}
        """The markers of the last call of `replace_markers`. Used by the driver's thread."""
        self._shown: dict[Address, TaskState] = {}
        """The markers that exist. Used by the scheduler's loop."""
        scheduler.loop.add_callback(scheduler.add_plugin, self, name=self.name)

    def replace_markers(self, markers: Mapping[Address, Marker]) -> None:
        """Replace the scheduler's markers, parents first. Does not wait."""
        if markers != self._wanted:
            self._wanted = markers
            self._scheduler.loop.add_callback(self._apply_markers, markers)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """When the last task of a group is forgotten, remove this group from the dependencies of all other groups."""
        del start, args, kwargs
        if finish != "forgotten":
            return
        group = self._scheduler.tasks[key].group
        if _is_group_forgotten(group):
            for other in self._scheduler.task_groups.values():
                other.dependencies.discard(group)

    # ---- In the scheduler's loop -----------------------------------------------------------------------------------

    def _apply_markers(self, markers: Mapping[Address, Marker]) -> None:
        """Add, change and remove markers until they match `markers`. After each single change `_shown` has exactly the
        existing markers. So if one of Dask's pages raises an error in between, the next call does the rest."""
        new = [address for address in markers if address not in self._shown]
        for address in new:
            self._add(address, markers[address])
        if new:
            self._announce(new)
        for address, marker in markers.items():
            self._set_state(address, marker.state)
        for address in [address for address in self._shown if address not in markers]:
            self._remove(address)

    def _add(self, address: Address, marker: Marker) -> None:
        task = self._scheduler.new_task(marker_key(address), None, "released")
        task.priority, task.who_has = marker.priority, set()  # Dask's page of a task reads `who_has`
        for parent in marker.parents:
            task_of_parent = self._scheduler.tasks.get(marker_key(parent))
            if task_of_parent is not None:
                task.add_dependency(task_of_parent)
        self._shown[address] = task

    def _announce(self, new: Sequence[Address]) -> None:
        """Announce new markers to Dask's pages in the way in which the scheduler announces submitted tasks."""
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

    def _set_state(self, address: Address, state: str) -> None:
        task = self._shown[address]
        if state == task.state:
            return
        # Dask's pages of durations would take a change from processing to memory for a computation, and look up when
        # it began and ended. So the marker is released in between.
        if task.state == "processing" and state == "memory":
            self._set_state(address, "released")
        before, task.state = task.state, state
        task.waiting_on = {p for p in task.dependencies if p.state != "memory"} if state == "waiting" else None
        self._announce_change(task, before)

    def _remove(self, address: Address) -> None:
        scheduler, task = self._scheduler, self._shown.pop(address)
        before, task.state = task.state, "forgotten"
        try:
            self._announce_change(task, before)  # before its edges are removed, as Dask does
        finally:
            for child in task.dependents:
                child.dependencies.discard(task)
            for parent in task.dependencies:
                parent.dependents.discard(task)
            del scheduler.tasks[task.key]
            if _is_group_forgotten(task.group):
                task.group.prefix.remove_group(task.group)
                del scheduler.task_groups[task.group.name]

    def _announce_change(self, task: TaskState, before: str) -> None:
        """Announce to Dask's pages that a task has left the state `before`. Count it in `transition_counter`, because
        the pages update only when this counter has changed."""
        self._scheduler.transition_counter += 1
        for plugin in list(self._scheduler.plugins.values()):
            plugin.transition(task.key, before, task.state, stimulus_id=_STIMULUS)


def _is_group_forgotten(group: TaskGroup) -> bool:
    """Return True if all tasks of the group are forgotten, so that the scheduler drops the group."""
    return all(number == 0 or state == "forgotten" for state, number in group.states.items())


# ---- Task keys -------------------------------------------------------------------------------------------
#
#     ("generate-000003", 1)          the task that computes shard 1 of step 3; a later attempt adds its name
#     ("generate-commit-000003", 1)   marker of the same node, which shows whether the node has its commit
#
# Dask takes the part before the number as the task's name, for counts and colours, and the whole first part as its
# group. So there is one group for each stage of a step. Groups named by the stage alone would depend on each other in
# circles, which Dask's page of groups cannot draw.

_COMMIT = "-commit"
_NAMES = {
    "value": "value-forward",
    "canary": "canary-check",
    "canary_logprob": "canary_logprob-forward",
    "evaluate_reference": "evaluate_reference-model",
}
"""Other names for some stages. Dask picks one of 18 colours by a hash of the name, and under their own names these
stages would share a colour with other stages."""


def task_key(address: Address, attempt: str | None = None) -> tuple[object, ...]:
    """Return the key of an attempt at a node. `attempt`: name of the attempt; None for the first attempt."""
    name = _NAMES.get(address.stage, address.stage)
    key = f"{name}-{address.step:06d}", address.shard
    return key if attempt is None else (*key, attempt)


def marker_key(address: Address) -> tuple[str, int]:
    """Return the key of a node's marker."""
    return f"{address.stage}{_COMMIT}-{address.step:06d}", address.shard


def marker_stage(key: object) -> str | None:
    """Return the stage that a marker's key contains, or None if `key` is not the key of a marker."""
    match key:
        case (str(group), int(_)) if (name := group.rpartition("-")[0]).endswith(_COMMIT):
            return name.removesuffix(_COMMIT)
    return None


def build_key(worker: str, incarnation: int, executor: str, task: str = "build") -> tuple[object, ...]:
    """Return the key of the task that builds a worker, or of another `task` that precedes the build. `incarnation`:
    number of the worker's process; `executor`: random name of the driver's executor."""
    return f"{task}-process", worker, incarnation, executor

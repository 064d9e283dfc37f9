"""Markers in a real scheduler without any worker: they have the graph's edges and dispatch's states, and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed import Scheduler
from distributed.diagnostics.graph_layout import GraphLayout
from distributed.diagnostics.progress import AllProgress, GroupTiming
from distributed.diagnostics.task_stream import TaskStreamPlugin

from pipeline.driver.cluster import scheduler_extensions
from pipeline.driver.dashboard import OrderedGroups, StepGraph
from pipeline.driver.graph_markers import MAX_MARKERS, GraphMarkers, marker_key, marker_states
from pipeline.graph.display import NodeState, NodeStatus, ObservedDispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec, Node, run_nodes, step_nodes, step_of_node
from stages.models.protocol import Role
from storage.address import Address

GANGS = (
    Gang("engine", frozenset({Role.GENERATE}), 1, 2),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC}), 1),
)
SPEC = GraphSpec(steps=12, shards=2, staleness=1, eval_every=3, has_canaries=True)
STATES = {"waiting": "waiting", "ready": "queued", "queued": "queued", "running": "processing", "done": "memory"}


def simulate(look: Callable[[ObservedDispatch, int], None], spec: GraphSpec = SPEC, last: str = "") -> None:
    """A whole run without workers; `look` is called after each node that is done, with the steps admitted by then.
    Nodes of the stage `last` end when no other runs."""
    dispatch = ObservedDispatch(GANGS)
    for gang in GANGS:
        dispatch.on_worker_up(gang.name, 0)
    flow = Flow(spec, dispatch, on_step=lambda step, nodes: None, on_unread=lambda version: None)
    flow.advance()
    while not flow.is_finished:
        dispatch.next_submits()
        nodes = [s.node for s in dispatch.statuses() if s.state is NodeState.RUNNING]
        running = min(nodes, key=lambda node: node.stage == last)
        dispatch.mark_done(running.address)
        flow.on_node_done(running)
        look(dispatch, flow.num_admitted_steps)


def check(scheduler: Scheduler, statuses: list[NodeStatus]) -> None:
    """The scheduler's own state says what dispatch says."""
    there = {s.node.address for s in statuses}
    for status in statuses:
        task = scheduler.tasks[marker_key(status.node.address)]
        assert task.state == STATES[status.state]
        edges = {parent.key for parent in task.dependencies}
        assert edges >= {marker_key(parent) for parent in status.node.parents if parent in there}
        assert not task.who_has, "nobody computes or holds a marker"
        assert not task.who_wants
        assert task.processing_on is None
    for task in scheduler.tasks.values():
        assert all(scheduler.tasks[parent.key] is parent for parent in task.dependencies)
        assert all(scheduler.tasks[child.key] is child for child in task.dependents)
    for group in scheduler.task_groups.values():
        assert all(scheduler.task_groups[other.name] is other for other in group.dependencies)


def with_scheduler(use: Callable[[Scheduler, GraphMarkers], None]) -> None:
    async def main() -> None:
        address = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0", "dashboard": False}
        async with Scheduler(**address, extensions=scheduler_extensions()) as scheduler:  # those of a run
            markers = GraphMarkers(scheduler)
            await asyncio.sleep(0)
            assert markers.name in scheduler.plugins
            use(scheduler, markers)

    asyncio.run(main())


def test_markers_have_the_graphs_edges_and_dispatchs_states_and_keep_nothing() -> None:
    sizes = []

    def use(scheduler: Scheduler, markers: GraphMarkers) -> None:
        pages = [GraphLayout(scheduler), AllProgress(scheduler), GroupTiming(scheduler), TaskStreamPlugin(scheduler)]
        for page in pages:
            scheduler.add_plugin(page, name=type(page).__name__)

        def look(dispatch: ObservedDispatch, admitted: int) -> None:
            statuses = dispatch.statuses()
            markers._apply_markers(marker_states(SPEC, statuses, admitted))
            check(scheduler, statuses)
            sizes.append((len(scheduler.tasks), len(scheduler.task_groups), len(scheduler.task_prefixes)))

        simulate(look)
        assert max(sizes) == (0, 0, 0) or sizes[-1][0] == 0, "the run is over: all are forgotten"
        assert pages[0].x == {}

    with_scheduler(use)
    most = [max(of_step) for of_step in zip(*sizes, strict=True)]
    assert most[0] <= 8 * len(step_nodes(SPEC, 3)), (
        "the window, two steps before it, and some that evaluations hold open"
    )
    assert most[1] <= 8 * 13
    assert most[2] <= 13, "one for each stage"


def test_every_staleness_edge_is_seen() -> None:
    seen: set[tuple[object, object]] = set()

    def use(scheduler: Scheduler, markers: GraphMarkers) -> None:
        def look(dispatch: ObservedDispatch, admitted: int) -> None:
            markers._apply_markers(marker_states(SPEC, dispatch.statuses(), admitted))
            for task in scheduler.tasks.values():
                seen.update((parent.key, task.key) for parent in task.dependencies)

        simulate(look)

    with_scheduler(use)
    wanted: set[tuple[object, object]] = set()
    for node in run_nodes(SPEC):
        wanted |= {(marker_key(parent), marker_key(node.address)) for parent in node.parents}
    # Every later canary reads the first one, which leaves the window with its step.
    from_first = {edge for edge in wanted if edge[0] == marker_key(Address("canary", 0))}
    assert seen - from_first == wanted - from_first


def test_a_step_that_ends_before_an_older_one_keeps_its_edges() -> None:
    """If evaluating takes longer than training, the step that made the version ends after its successors."""
    over_early: set[int] = set()
    missing: list[Address] = []

    def look(dispatch: ObservedDispatch, admitted: int) -> None:
        statuses = dispatch.statuses()
        markers = marker_states(SPEC, statuses, admitted)
        open_steps = {step_of_node(status.node) for status in statuses}
        over_early.update(set(range(min(open_steps, default=admitted), admitted)) - open_steps)
        waiting = [marker for marker in markers.values() if marker.state != "memory"]
        wanted = [parent for marker in waiting for parent in marker.parents if parent.stage == "publish"]
        missing.extend(parent for parent in wanted if parent not in markers)
        if markers:
            at = {address.step for address in markers if address.stage == "advantage"}
            assert at == set(range(min(at), admitted))

    simulate(look, last="evaluate")
    assert over_early, "the run is one of those"
    assert missing == []


def test_no_marker_stands_behind_the_last_step() -> None:
    nodes = [NodeStatus(node, NodeState.RUNNING) for node in step_nodes(SPEC, SPEC.steps - 1)]
    markers = marker_states(SPEC, nodes, SPEC.steps)
    assert max(marker.priority[0] for marker in markers.values()) == SPEC.steps - 1


def test_dasks_pages_draw_them() -> None:
    """The two pages that have places of our own; Dask's page of groups fails on any graph like ours."""

    def use(scheduler: Scheduler, markers: GraphMarkers) -> None:
        graph, groups = StepGraph(scheduler), OrderedGroups(scheduler)

        def look(dispatch: ObservedDispatch, admitted: int) -> None:
            markers._apply_markers(marker_states(SPEC, dispatch.statuses(), admitted))
            graph.update()
            groups.update()
            assert set(graph.layout.x) == set(scheduler.tasks)
            for name, group in scheduler.task_groups.items():
                assert all(
                    groups.nodes_layout[o.name]["x"] < groups.nodes_layout[name]["x"] for o in group.dependencies
                )

        simulate(look)
        drawn = list(graph.node_source.data["name"])
        assert "generate-commit" in drawn

    with_scheduler(use)


def test_a_page_that_raises_leaves_the_markers_whole() -> None:
    class Broken(GraphLayout):
        def transition(self, *args: object, **kwargs: object) -> None:
            raise KeyError("startstops")

    def use(scheduler: Scheduler, markers: GraphMarkers) -> None:
        nodes = [NodeStatus(node, NodeState.RUNNING) for node in run_nodes(SPEC)][:20]
        broken = Broken(scheduler)
        scheduler.add_plugin(broken, name="broken")
        for _ in range(200):
            try:
                markers._apply_markers(marker_states(SPEC, nodes, 2))
            except KeyError:
                continue
            break
        scheduler.remove_plugin("broken")
        check(scheduler, nodes)
        markers._apply_markers({})
        assert not scheduler.tasks
        assert not scheduler.task_groups

    with_scheduler(use)


def test_a_window_too_large_for_the_page_has_none() -> None:
    spec = GraphSpec(steps=3, shards=MAX_MARKERS // 4, staleness=1)
    nodes: list[Node] = list(run_nodes(spec))
    assert marker_states(spec, [NodeStatus(node, NodeState.WAITING) for node in nodes], 3) == {}
    assert marker_states(spec, [], 3) == {}

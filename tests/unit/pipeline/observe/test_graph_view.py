"""The record behind the page `/stageline`, from a ledger and a journal, and what the page makes of it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from pipeline.graph.display import NodeState, NodeStatus
from pipeline.graph.graph import Gang, GraphSpec, run_nodes, step_nodes
from pipeline.observe.curves import MAX_POINTS, RunCurves
from pipeline.observe.graph_page import HEADERS, grid_svg, log_names, read_log_end, render_fragment, render_page
from pipeline.observe.graph_view import (
    MAX_FINISHED_STEPS,
    CurveCache,
    GraphView,
    RunFacts,
    RunningNode,
    gangs_by_role,
    node_views,
    nodes_to_show,
    recorded_view,
    short_address,
)
from pipeline.observe.incidents import Incident, WorkerLosses
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role
from storage.address import Address
from storage.ledger import Ledger
from tests.support.commits import commit_empty

SPEC = GraphSpec(steps=5, shards=2, staleness=1, eval_every=2)
GANGS = (
    Gang("engine", frozenset({Role.GENERATE}), 2, 2),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC}), 1),
)
FACTS = RunFacts("run", SPEC.steps, SPEC.staleness)
EVIL = "<script>alert('x')</script>\"&"


def recorded(folder: Path, done: Collection[Address], *events: Event, spec: GraphSpec = SPEC) -> GraphView:
    """Return the view of a run with these commits; its journal begins with the run's start."""
    ledger = Ledger(str(folder / "ledger"))
    for address in done:
        metrics = {"score/mean": 0.25} if address.stage == "evaluate_score" else {}
        if address.stage == "advantage":
            metrics = {"reward/mean": float(address.step), "kl/ref": 0.5}
        commit_empty(ledger, address, finished=2.0, **metrics)
    return recorded_view(FACTS, spec, GANGS, ledger, [Event(1.0, EventKind.RUN_STARTED), *events])


def of_step(step: int) -> list[Address]:
    """All nodes of the steps before this one."""
    return [node.address for node in run_nodes(replace(SPEC, steps=step))]


def state(view: GraphView, stage: str, step: int, shard: int = 0) -> NodeState:
    return next(node.state for node in view.nodes if node.address == Address(stage, step, shard))


# ---- a run's directory ---------------------------------------------------------------------------------------------


def test_a_run_that_died_in_its_third_step(tmp_path: Path) -> None:
    """A resumed run begins with these nodes; nodes that a worker had begun are shown as running."""
    done = [a for a in of_step(2) if a != Address("evaluate_score", 2)]
    done += [Address("generate", 2, 0), Address("generate", 2, 1)]
    begun = Event(5.0, EventKind.SUBMITTED, "score", 2, 1, gang="score", worker="score-0")
    view = recorded(tmp_path, done, begun, Event(6.0, EventKind.ALARM, rule="kl", step=1, detail="KL is high"))
    assert (view.is_live, view.is_finished, view.steps_done, view.time_s) == (False, False, 2, 6.0)
    assert state(view, "generate", 2) is NodeState.DONE
    assert state(view, "score", 2, 0) is NodeState.READY
    assert state(view, "score", 2, 1) is NodeState.RUNNING
    assert state(view, "generate", 3) is NodeState.READY, "weights v2 are published, as eta = 1 asks"
    assert state(view, "generate", 4) is NodeState.WAITING
    assert (Address("publish", 2), Address("generate", 3, 1)) in view.staleness_edges
    assert (Address("publish", 3), Address("generate", 4, 0)) in view.staleness_edges
    gangs = {gang.name: gang for gang in view.gangs}
    assert gangs["score"].running_nodes == (RunningNode(Address("score", 2, 1), 5.0),)
    assert gangs["engine"].wait_reason == "generate 3.0 waits for a worker"
    assert view.curves.metrics == {"reward/mean": [0.0, 1.0], "kl/ref": [0.5, 0.5]}
    assert view.curves.held_out == {"eval/reward_mean": [(0, 0.25, None)]}, "that of version 2 is not complete"
    assert [(one.where, one.text) for one in view.incidents] == [("step 1", "kl: KL is high")]
    assert {one.version: one.readers for one in view.versions}[2][:2] == (
        Address("generate", 3),
        Address("generate", 3, 1),
    )


def test_a_run_that_died_before_anything(tmp_path: Path) -> None:
    view = recorded(tmp_path, [])
    assert (view.steps_done, view.curves) == (0, RunCurves([], 0, {}, {}))
    assert state(view, "publish", 0) is NodeState.READY
    assert state(view, "generate", 0) is NodeState.WAITING
    assert {gang.name: gang.wait_reason for gang in view.gangs}["engine"] == (
        "generate 0.0 waits for publish 0.0 (waits for a worker)"
    )
    assert "No step is finished yet" in render_fragment(view)


def test_a_run_that_came_to_its_end(tmp_path: Path) -> None:
    view = recorded(tmp_path, of_step(5), Event(9.0, EventKind.RUN_FINISHED))
    assert (view.is_finished, view.steps_done) == (True, 5)
    assert {node.state for node in view.nodes} == {NodeState.DONE}
    assert {node.address for node in view.nodes} == set(of_step(5))
    assert all(gang.wait_reason is None and not gang.running_nodes for gang in view.gangs)
    assert [point.version for point in view.curves.held_out["eval/reward_mean"]] == [0, 2, 4, 5]


def test_only_the_last_steps_of_a_long_run_are_shown(tmp_path: Path) -> None:
    spec = replace(SPEC, steps=30, eval_every=0)
    done = [n.address for n in run_nodes(replace(spec, steps=20))]
    view = recorded(tmp_path, done, spec=spec)
    assert {n.scheduled_step for n in view.nodes} == set(range(20 - MAX_FINISHED_STEPS, 20 + 3))


def test_what_a_dead_run_was_doing_and_what_was_queued(tmp_path: Path) -> None:
    """Both shards were handed to the scorer ahead of their generation; it had begun the first when the driver died."""
    done = [*of_step(2), Address("generate", 2, 0), Address("generate", 2, 1)]
    scorer = {"gang": "score", "worker": "score-0"}
    events = [Event(1.0 + shard, EventKind.SUBMITTED, "score", 2, shard, **scorer) for shard in (0, 1)]
    events.append(Event(3.0, EventKind.SUBMITTED, "advantage", 2, 0, **scorer))
    engine = {"gang": "engine", "worker": "engine-0"}
    events += [Event(5.0 + s, EventKind.FINISHED, "generate", 2, s, seconds=1.0, **engine) for s in (0, 1)]
    view = recorded(tmp_path, done, *events)
    assert state(view, "score", 2, 0) is NodeState.RUNNING
    assert state(view, "score", 2, 1) is NodeState.QUEUED
    assert state(view, "advantage", 2) is NodeState.WAITING
    [score] = [gang for gang in view.gangs if gang.name == "score"]
    assert (score.running_nodes, score.num_queued) == ((RunningNode(Address("score", 2, 0), 5.0),), 1)
    assert "score 2.0 (1 s), 1 queued" in render_fragment(view)
    [train] = [gang for gang in view.gangs if gang.name == "train"]
    assert train.wait_reason == "reference 2.0 waits for a worker"
    more = [*done, *(Address(stage, 2, s) for stage in ("reference", "logprob", "value") for s in (0, 1))]
    view = recorded(tmp_path / "later", more, *events)
    [train] = [gang for gang in view.gangs if gang.name == "train"]
    assert train.wait_reason == "update_policy 2.0 waits for score 2.0 (running)"
    assert "running when the driver ended" in render_fragment(view)


def test_a_driver_elsewhere_is_not_a_dead_one(tmp_path: Path) -> None:
    view = recorded(tmp_path, of_step(2))
    assert "not finished; latest event" in render_fragment(view)
    driven = render_fragment(replace(view, is_driven=True))
    assert "running in another process; latest event" in driven
    assert "not finished" not in driven
    assert "driver ended" not in driven


def test_every_column_is_a_step_of_the_run_and_has_its_evaluations(tmp_path: Path) -> None:
    """Evaluations of the last versions serve no existing step, so they stand with the last step."""
    spec = replace(SPEC, steps=12, eval_every=1)
    view = recorded(tmp_path, [n.address for n in run_nodes(spec)], spec=spec)
    columns = {
        scheduled_step: [n.address for n in view.nodes if n.scheduled_step == scheduled_step]
        for scheduled_step in {n.scheduled_step for n in view.nodes}
    }
    assert set(columns) == set(range(12 - MAX_FINISHED_STEPS, 12))
    assert [sum(a.stage == "evaluate" for a in columns[scheduled_step]) for scheduled_step in sorted(columns)] == [
        1
    ] * 5 + [3]
    assert Address("evaluate", 12) in columns[11]
    early = recorded(tmp_path / "early", [], spec=spec)
    assert {n.scheduled_step for n in early.nodes} == {-1, 0, 1, 2}, "the start's weights, and the steps of the window"


def test_a_step_that_ended_before_an_older_one_is_shown() -> None:
    """Evaluations hold steps 5 and 7 open; 6 is over."""
    spec = replace(SPEC, steps=12)
    statuses = [NodeStatus(node, NodeState.WAITING) for step in (5, 7, 8) for node in step_nodes(spec, step)]
    nodes = node_views(nodes_to_show(spec, statuses, 9), gangs_by_role(GANGS), NodeEvents(), 9)
    assert {node.scheduled_step for node in nodes} == set(range(-1, 9))
    there = {node.address: node for node in nodes}
    assert there[Address("generate", 6)].state is NodeState.DONE
    assert there[Address("publish", 7)].state is NodeState.DONE


def test_a_long_curve_is_thinned_and_read_once(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "ledger"))
    spec = GraphSpec(steps=2 * MAX_POINTS + 9, shards=1, staleness=0)
    cache = CurveCache(spec, ledger)
    for step in (0, 1, 2, 3):
        commit_empty(ledger, Address("advantage", step), **{"reward/mean": float(step), "kl/ref": 0.0})
    assert cache.read_curves(4).steps == [0, 1, 2, 3]
    assert cache.read_curves(4, max_reads=0).steps == [0, 1, 2, 3], "they are kept"
    assert len(range(*slice((spec.steps - 1) % 3, spec.steps, 3).indices(spec.steps))) <= MAX_POINTS
    assert all((spec.steps - 1 - step) % 3 == 0 for step in cache.read_curves(spec.steps).steps)


# ---- the journal ---------------------------------------------------------------------------------------------------


def test_events_of_a_node_and_of_its_loss() -> None:
    seen, node = NodeEvents(), Address("generate", 0, 1)
    place = {"stage": "generate", "step": 0, "shard": 1}
    seen.apply_event(Event(1.0, EventKind.SUBMITTED, worker="engine-1", **place))
    assert (seen.submitted[node].worker, seen.earliest_start(node, (), 2)) == ("engine-1", 1.0)
    seen.apply_event(Event(2.0, EventKind.GANG_LOST, gang="engine", worker="engine-1", detail="its process ended"))
    assert seen.submitted == {}
    seen.apply_event(Event(2.5, EventKind.GANG_BUILT, gang="engine", worker="engine-1"))
    seen.apply_event(Event(3.0, EventKind.SUBMITTED, worker="engine-0", **place))
    seen.apply_event(Event(4.0, EventKind.FINISHED, worker="engine-0", rank=0, seconds=0.5, **place))
    seen.apply_event(Event(4.0, EventKind.FINISHED, worker="engine-1", rank=1, seconds=0.9, **place))
    assert (seen.submitted, seen.finished[node].seconds, seen.finished[node].worker) == ({}, 0.5, "engine-0")
    assert [(one.kind, one.where, one.text) for one in seen.incidents] == [
        ("lost", "engine-1", "its process ended"),
        ("recovered", "engine-1", "built again in 0.5 s"),
    ]


def test_a_gang_is_lost_and_recovers_as_one() -> None:
    """Rank 1 is lost, and the last to be built is rank 0; a pool's replica comes up for the first time meanwhile."""
    seen = NodeEvents(WorkerLosses(rebuilt_together={"train"}))
    seen.apply_event(Event(1.0, EventKind.SUBMITTED, "logprob", 0, 0, gang="train", worker="train-0"))
    seen.apply_event(Event(2.0, EventKind.GANG_LOST, gang="train", worker="train-1", detail="killed"))
    assert seen.submitted == {}
    seen.apply_event(Event(2.0, EventKind.GANG_LOST, gang="engine", worker="engine-1", detail="killed"))
    seen.apply_event(Event(3.0, EventKind.GANG_BUILT, gang="engine", worker="engine-0"))
    seen.apply_event(Event(6.0, EventKind.GANG_BUILT, gang="train", worker="train-0"))
    seen.apply_event(Event(7.0, EventKind.GANG_BUILT, gang="train", worker="train-0"))
    recovered = [(one.where, one.text) for one in seen.incidents if one.kind == "recovered"]
    assert recovered == [("train-1", "built again in 4.0 s")]


def test_a_node_begins_when_it_can() -> None:
    """Handed out ahead of its parent, and queued behind another on a worker with one thread."""
    seen, node, parents = NodeEvents(), Address("score", 0, 1), (Address("generate", 0, 1),)
    scorer = {"gang": "score", "worker": "score-0"}
    assert seen.earliest_start(node, parents, 1) is None
    for shard in (0, 1):
        seen.apply_event(Event(1.0, EventKind.SUBMITTED, "score", 0, shard, **scorer))
    seen.apply_event(Event(4.0, EventKind.FINISHED, "generate", 0, 1, gang="engine", worker="engine-0", seconds=3.0))
    seen.apply_event(Event(6.0, EventKind.FINISHED, "score", 0, 0, seconds=2.0, **scorer))
    assert seen.earliest_start(node, parents, threads=1) == 6.0
    assert seen.earliest_start(node, parents, threads=2) == 4.0, "the other may have run beside it"


def test_what_is_remembered_is_bounded() -> None:
    seen = NodeEvents()
    for step in range(6000):
        seen.apply_event(Event(1.0, EventKind.SUBMITTED, "score", step, 0, worker="s"))
        seen.apply_event(Event(2.0, EventKind.FINISHED, "score", step, 0, worker="s", seconds=1.0))
        seen.apply_event(Event(2.0, EventKind.WARNED, detail=str(step)))
    assert (len(seen.finished), len(seen.incidents), seen.submitted) == (4096, 12, {})


# ---- the page ------------------------------------------------------------------------------------------------------


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def test_the_grid_has_a_cell_for_each_node_and_an_edge_for_each_bound(tmp_path: Path) -> None:
    view = recorded(tmp_path, [*of_step(2), Address("generate", 2, 0)])
    svg = drawn(grid_svg(view))
    cells = [e for e in svg.iter("rect") if e.get("class", "").split()[0] in set(NodeState)]
    assert len(cells) == len(view.nodes)
    edges = {(e.get("data-from"), e.get("data-to")) for e in svg.iter("path") if e.get("data-from")}
    one_a_step = {(short_address(p), short_address(c)) for p, c in view.staleness_edges if c.shard == 0}
    assert edges == one_a_step
    assert ("publish 3.0", "generate 4.0") in edges
    waiting = next(e for e in svg.iter("path") if e.get("data-from") == "publish 3.0")
    assert waiting.get("class") == "edge waits"


def test_many_shards_are_one_bar(tmp_path: Path) -> None:
    view = recorded(tmp_path, [], spec=replace(SPEC, shards=40))
    assert len(grid_svg(view)) < 60_000
    drawn(grid_svg(view))


def test_whatever_came_from_the_run_is_escaped(tmp_path: Path) -> None:
    view = recorded(tmp_path, of_step(1))
    facts = RunFacts(EVIL, 5, 1, ((EVIL, f"https://x/{EVIL}"), ("label", f"javascript:{EVIL}")), (f"{EVIL}.log",))
    gangs = tuple(replace(gang, name=EVIL, wait_reason=EVIL) for gang in view.gangs)
    nodes = tuple(replace(node, worker=EVIL) for node in view.nodes)
    incidents = (Incident(0.0, "alarm", EVIL, EVIL), Incident(0.0, EVIL, "where", "text"))
    view = replace(view, facts=facts, gangs=gangs, nodes=nodes, incidents=incidents)
    text = render_page(view)
    assert EVIL not in text
    assert "alert('x')" not in text
    assert text.count("<script>") == 1, "the page's own, which the policy names"
    assert 'href="javascript' not in text
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)


def test_only_logs_are_served(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    assert log_names(logs) == ()
    logs.mkdir()
    (logs / "train-0.log").write_bytes(b"x" * 100_000 + b"end\xff")
    (tmp_path / "config.yaml").write_text("secret")
    assert log_names(logs) == ("train-0.log",)
    assert (read_log_end(logs, "train-0.log") or "").endswith("end�")
    assert len(read_log_end(logs, "train-0.log") or "") <= 64 << 10
    assert read_log_end(logs, "../config.yaml") is None
    assert read_log_end(logs, "other.log") is None

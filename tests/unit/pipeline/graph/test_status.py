"""A node's status as people see it: dispatch's states from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.display import NodeState, NodeStatus, with_steps_over
from pipeline.graph.graph import Gang, GraphSpec, step_nodes, step_of
from stages.models.protocol import Role
from storage.address import Address

SPEC = GraphSpec(steps=2, shards=1, staleness=0)
GANGS = (
    Gang("engine", frozenset({Role.GENERATE}), 1),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC}), 1),
)


def states(dispatch: Dispatch) -> dict[str, str]:
    return {status.node.stage: status.state.value for status in dispatch.statuses()}


def test_a_node_waits_is_ready_runs_and_is_done() -> None:
    dispatch = Dispatch(GANGS)
    dispatch.admit(step_nodes(SPEC, 0))
    assert states(dispatch)["publish"] == "waiting", "publish v1; v0 has the same stage and comes first"
    assert [s.state for s in dispatch.statuses() if s.node.address == Address("publish", 0)] == [NodeState.READY]
    for gang in GANGS:
        assert not dispatch.is_up(gang.name)
        dispatch.worker_up(gang.name, 0)
        assert dispatch.is_up(gang.name)
    dispatch.next_submits()
    [publish] = [s for s in dispatch.statuses() if s.node.address == Address("publish", 0)]
    assert (publish.state, publish.worker) == (NodeState.RUNNING, ("train", 0))
    dispatch.done(publish.node.address)
    dispatch.next_submits()
    now = states(dispatch)
    assert (now["generate"], now["score"], now["advantage"]) == ("running", "waiting", "waiting")
    [score] = [s for s in dispatch.statuses() if s.node.stage == "score"]
    assert score.worker == ("score", 0), "handed out ahead of its parent: it still waits for that"


def test_a_lost_node_is_ready_again_and_says_so() -> None:
    dispatch = Dispatch(GANGS)
    dispatch.admit(step_nodes(SPEC, 0))
    dispatch.worker_up("train", 0)
    dispatch.next_submits()
    dispatch.worker_down("train", 0)
    [publish] = [s for s in dispatch.statuses() if s.node.address == Address("publish", 0)]
    assert (publish.state, publish.worker, publish.losses) == (NodeState.READY, None, 1)


def test_what_its_worker_does_later_is_queued() -> None:
    spec = replace(SPEC, shards=2)
    dispatch = Dispatch(GANGS)
    dispatch.admit(step_nodes(spec, 0))
    for gang in GANGS:
        dispatch.worker_up(gang.name, 0)
    for address in (Address("publish", 0), Address("generate", 0, 0), Address("generate", 0, 1)):
        dispatch.next_submits()
        dispatch.done(address)
    dispatch.next_submits()
    now = {status.node.address: status.state for status in dispatch.statuses()}
    assert now[Address("score", 0, 0)] is NodeState.RUNNING
    assert now[Address("score", 0, 1)] is NodeState.QUEUED
    assert now[Address("advantage", 0)] is NodeState.WAITING
    dispatch.done(Address("score", 0, 0))
    now = {status.node.address: status.state for status in dispatch.statuses()}
    assert now[Address("score", 0, 1)] is NodeState.RUNNING


def test_steps_that_are_over_are_there_between_open_ones_too() -> None:
    """Evaluations hold steps 5 and 7 open; 6, and the newest, are over."""
    spec = replace(SPEC, steps=12, eval_every=2)
    open_steps = [NodeStatus(node, NodeState.RUNNING) for step in (5, 7) for node in step_nodes(spec, step)]
    shown = with_steps_over(spec, open_steps, admitted=9, past=2, most=1000)
    assert [s.node.address for s in shown] == [n.address for step in range(3, 9) for n in step_nodes(spec, step)]
    assert {step_of(s.node) for s in shown if s.state is NodeState.DONE} == {3, 4, 6, 8}
    few = with_steps_over(spec, open_steps, 9, 2, most=len(open_steps) + 2 * len(step_nodes(spec, 1)))
    assert {step_of(s.node) for s in few} == {5, 6, 7, 8}, "of those that are over the latest"
    assert with_steps_over(spec, open_steps, 9, 2, most=0) == open_steps
    assert {step_of(s.node) for s in with_steps_over(spec, [], 12, 2, 1000)} == {10, 11}


@pytest.mark.parametrize("latest", [False, True])
def test_the_step_of_a_node(latest: bool) -> None:
    spec = GraphSpec(steps=9, shards=2, staleness=2, eval_every=1, canaries=True, latest=latest)
    for step in range(spec.steps):
        assert {step_of(node) for node in step_nodes(spec, step)} == {step}

"""What people are told of a node: dispatch's states, seen from outside."""

from __future__ import annotations

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.gangs import Gang
from pipeline.graph.graph import GraphSpec, step_nodes
from pipeline.graph.status import NodeState
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

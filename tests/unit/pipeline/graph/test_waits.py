"""The wait of an idle gang, followed over parents to running nodes."""

from __future__ import annotations

from dataclasses import replace

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.display import NodeState
from pipeline.graph.graph import Gang, GraphSpec, step_nodes
from stages.models.protocol import Role
from storage.address import Address

SPEC = GraphSpec(steps=2, shards=2, staleness=0, recompute_logprobs=False)
GANGS = (
    Gang("gen", frozenset({Role.GENERATE}), 1),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), 1),
)


def dispatch_of(*up: str) -> Dispatch:
    dispatch = Dispatch(GANGS)
    for gang in up:
        dispatch.worker_up(gang, 0)
    dispatch.admit(step_nodes(SPEC, 0))
    return dispatch


def finish(dispatch: Dispatch, *addresses: Address) -> None:
    dispatch.next_submits()
    for address in addresses:
        dispatch.done(address)
    dispatch.next_submits()


def test_gangs_wait_for_what_runs_elsewhere() -> None:
    """One slot: shard 0 is generated, shard 1 waits for the slot; its score was handed out ahead, and does not run."""
    dispatch = dispatch_of("gen", "score", "train")
    finish(dispatch, Address("publish", 0))
    found = dispatch.waits()
    assert found.keys() == {"score", "train"}
    assert found["train"].node == Address("reference", 0, 0)
    assert found["train"].running == (Address("generate", 0, 0),)
    assert found["score"].node == Address("score", 0, 0)
    assert dispatch.idle("train")
    assert not dispatch.idle("gen")
    assert dispatch.busy_replicas("gen") == {0}


def test_a_chain_is_followed_to_its_ends() -> None:
    """Everything of both shards is done but one score; the trainer's next node is an update, behind `advantage`."""
    dispatch = dispatch_of("gen", "score", "train")
    finish(dispatch, Address("publish", 0))
    for shard in (0, 1):
        finish(dispatch, Address("generate", 0, shard))
    for shard in (0, 1):
        finish(dispatch, Address("reference", 0, shard))
        finish(dispatch, Address("value", 0, shard))
    finish(dispatch, Address("score", 0, 0))
    wait = dispatch.waits()["train"]
    assert wait.node == Address("update_policy", 0)
    assert (wait.running, wait.ready) == ((Address("score", 0, 1),), ())
    assert str(wait) == ("update_policy/step_000000/shard_0000 waits for score/step_000000/shard_0001 (running)")


def test_what_a_worker_does_before_is_what_is_waited_for() -> None:
    """The next step's score began while this step's advantages still lacked the critic's values: they come after it, on
    the same worker, and that score is what keeps the trainer."""
    spec = replace(SPEC, shards=1, staleness=1)
    dispatch = Dispatch(GANGS)
    for gang in GANGS:
        dispatch.worker_up(gang.name, 0)
    for step in (0, 1):
        dispatch.admit(step_nodes(spec, step))
    finish(dispatch, Address("publish", 0))
    for stage in ("generate", "score"):
        finish(dispatch, Address(stage, 0))
    finish(dispatch, Address("generate", 1))
    for step in (0, 1):
        finish(dispatch, Address("reference", step))
    finish(dispatch, Address("value", 0))
    states = {status.node.address: status.state for status in dispatch.statuses()}
    assert states[Address("advantage", 0)] is NodeState.QUEUED
    wait = dispatch.waits()["train"]
    assert (wait.node, wait.running, wait.ready) == (Address("update_policy", 0), (Address("score", 1),), ())


def test_a_node_without_a_worker_is_where_a_chain_ends() -> None:
    dispatch = dispatch_of("score", "train")
    finish(dispatch, Address("publish", 0))
    wait = dispatch.waits()["train"]
    assert (wait.running, wait.ready) == ((), (Address("generate", 0, 0),))
    assert "gen" not in dispatch.waits(), "it is not idle but down"


def test_a_gang_without_nodes_waits_for_nothing() -> None:
    dispatch = Dispatch(GANGS)
    dispatch.worker_up("train", 0)
    assert dispatch.idle("train")
    assert dispatch.waits() == {}

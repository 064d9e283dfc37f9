"""The wait of an idle gang, followed over parents to running nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.graph.display import NodeState, NodeStatus, ObservedDispatch, WorkerQueues, add_finished_steps
from pipeline.graph.graph import Gang, GraphSpec, Node, step_nodes, step_of_node
from stages.models.protocol import Role
from storage.address import Address

SPEC = GraphSpec(steps=2, shards=2, staleness=0, recompute_logprobs=False)
GANGS = (
    Gang("gen", frozenset({Role.GENERATE}), 1),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), 1),
)


def dispatch_of(*up: str) -> ObservedDispatch:
    dispatch = ObservedDispatch(GANGS)
    for gang in up:
        dispatch.on_worker_up(gang, 0)
    dispatch.admit(step_nodes(SPEC, 0))
    return dispatch


def finish(dispatch: ObservedDispatch, *addresses: Address) -> None:
    dispatch.next_submits()
    for address in addresses:
        dispatch.mark_done(address)
    dispatch.next_submits()


def test_gangs_wait_for_what_runs_elsewhere() -> None:
    """One slot: shard 0 is generated, shard 1 waits for the slot; its score was handed out ahead, and does not run."""
    dispatch = dispatch_of("gen", "score", "train")
    finish(dispatch, Address("publish", 0))
    found = dispatch.find_waits()
    assert found.keys() == {"score", "train"}
    assert found["train"].node == Address("reference", 0, 0)
    assert found["train"].running_nodes == (Address("generate", 0, 0),)
    assert found["score"].node == Address("score", 0, 0)
    assert dispatch.is_idle("train")
    assert not dispatch.is_idle("gen")
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
    wait = dispatch.find_waits()["train"]
    assert wait.node == Address("update_policy", 0)
    assert (wait.running_nodes, wait.ready_nodes) == ((Address("score", 0, 1),), ())
    assert str(wait) == ("update_policy/step_000000/shard_0000 waits for score/step_000000/shard_0001 (running)")


def test_what_a_worker_does_before_is_what_is_waited_for() -> None:
    """The next step's score began while this step's advantages still lacked the critic's values: they come after it, on
    the same worker, and that score is what keeps the trainer."""
    spec = replace(SPEC, shards=1, staleness=1)
    dispatch = ObservedDispatch(GANGS)
    for gang in GANGS:
        dispatch.on_worker_up(gang.name, 0)
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
    wait = dispatch.find_waits()["train"]
    assert (wait.node, wait.running_nodes, wait.ready_nodes) == (
        Address("update_policy", 0),
        (Address("score", 1),),
        (),
    )


def test_a_node_without_a_worker_is_where_a_chain_ends() -> None:
    dispatch = dispatch_of("score", "train")
    finish(dispatch, Address("publish", 0))
    wait = dispatch.find_waits()["train"]
    assert (wait.running_nodes, wait.ready_nodes) == ((), (Address("generate", 0, 0),))
    assert "gen" not in dispatch.find_waits(), "it is not idle but down"


def test_a_gang_without_nodes_waits_for_nothing() -> None:
    dispatch = ObservedDispatch(GANGS)
    dispatch.on_worker_up("train", 0)
    assert dispatch.is_idle("train")
    assert dispatch.find_waits() == {}


SCORER = ("score", 0)


def node_of(step: int, shard: int = 0, stage: str = "score") -> Node:
    return Node((step, 1), Address(stage, step, shard), (), (), 0)


def running(queues: WorkerQueues, *nodes: Node) -> list[bool]:
    return [queues.is_running(one.address) for one in nodes]


def test_a_worker_does_one_after_the_other_and_the_most_urgent_first() -> None:
    queues, late, first, second = WorkerQueues(), node_of(1), node_of(0, 0), node_of(0, 1)
    for one in (late, second, first):
        queues.hand_out(one, SCORER, 1, ())
    assert running(queues, late, first, second) == [True, False, False], "it interrupts nothing that it began"
    assert queues.nodes_before(first.address) == (late.address,)
    assert queues.nodes_before(late.address) == ()
    queues.remove_done(late.address)
    assert running(queues, first, second) == [True, False]


def test_what_waits_for_its_parents_does_not_run() -> None:
    queues, parents, child = WorkerQueues(), (Address("generate", 0, 0), Address("generate", 0, 1)), node_of(0)
    queues.hand_out(child, SCORER, 1, parents)
    queues.remove_done(parents[0])
    assert running(queues, child) == [False]
    assert queues.nodes_before(child.address) == ()
    queues.remove_done(parents[1])
    assert running(queues, child) == [True]


def test_a_node_that_is_handed_out_again_counts_once() -> None:
    """Lost with a parent, and handed to another replica: what is left of the first time moves nothing."""
    queues, parents, child = WorkerQueues(), (Address("generate", 0, 0), Address("generate", 0, 1)), node_of(0)
    queues.hand_out(child, SCORER, 1, parents)
    queues.remove_lost(child.address)
    queues.remove_done(parents[0])
    assert running(queues, child) == [False]
    queues.hand_out(child, ("score", 1), 1, parents[1:])
    queues.remove_done(parents[1])
    assert running(queues, child) == [True]
    other = node_of(1)
    queues.hand_out(other, SCORER, 1, ())
    assert running(queues, other) == [True], "the first replica is free"


def test_a_queued_node_that_is_lost_leaves_its_place() -> None:
    queues, nodes = WorkerQueues(), [node_of(step) for step in range(3)]
    for one in nodes:
        queues.hand_out(one, SCORER, 1, ())
    queues.remove_lost(nodes[1].address)
    queues.remove_done(nodes[0].address)
    assert running(queues, *nodes) == [False, False, True]
    queues.remove_lost(nodes[2].address)
    assert running(queues, *nodes) == [False, False, False]


def test_as_many_run_as_there_are_threads_and_one_that_only_waits_takes_none() -> None:
    queues, nodes = WorkerQueues(), [node_of(0, shard, "generate") for shard in range(3)]
    for one in nodes:
        queues.hand_out(one, ("generate", 0), 2, ())
    assert running(queues, *nodes) == [True, True, False]
    queues.free_thread_of(nodes[0].address)
    assert running(queues, *nodes) == [True, True, True]


ONE_SHARD = GraphSpec(steps=2, shards=1, staleness=0)


def states(dispatch: ObservedDispatch) -> dict[str, str]:
    return {status.node.stage: status.state.value for status in dispatch.statuses()}


def test_a_node_waits_is_ready_runs_and_is_done() -> None:
    dispatch = ObservedDispatch(GANGS)
    dispatch.admit(step_nodes(ONE_SHARD, 0))
    assert states(dispatch)["publish"] == "waiting", "publish v1; v0 has the same stage and comes first"
    assert [s.state for s in dispatch.statuses() if s.node.address == Address("publish", 0)] == [NodeState.READY]
    for gang in GANGS:
        assert not dispatch.is_up(gang.name)
        dispatch.on_worker_up(gang.name, 0)
        assert dispatch.is_up(gang.name)
    dispatch.next_submits()
    [publish] = [s for s in dispatch.statuses() if s.node.address == Address("publish", 0)]
    assert (publish.state, publish.worker) == (NodeState.RUNNING, ("train", 0))
    dispatch.mark_done(publish.node.address)
    dispatch.next_submits()
    now = states(dispatch)
    assert (now["generate"], now["score"], now["advantage"]) == ("running", "waiting", "waiting")
    [score] = [s for s in dispatch.statuses() if s.node.stage == "score"]
    assert score.worker == ("score", 0), "handed out ahead of its parent: it still waits for that"


def test_a_lost_node_is_ready_again_and_says_so() -> None:
    dispatch = ObservedDispatch(GANGS)
    dispatch.admit(step_nodes(ONE_SHARD, 0))
    dispatch.on_worker_up("train", 0)
    dispatch.next_submits()
    dispatch.on_worker_down("train", 0)
    [publish] = [s for s in dispatch.statuses() if s.node.address == Address("publish", 0)]
    assert (publish.state, publish.worker, publish.num_losses) == (NodeState.READY, None, 1)


def test_what_its_worker_does_later_is_queued() -> None:
    spec = replace(ONE_SHARD, shards=2)
    dispatch = ObservedDispatch(GANGS)
    dispatch.admit(step_nodes(spec, 0))
    for gang in GANGS:
        dispatch.on_worker_up(gang.name, 0)
    for address in (Address("publish", 0), Address("generate", 0, 0), Address("generate", 0, 1)):
        dispatch.next_submits()
        dispatch.mark_done(address)
    dispatch.next_submits()
    now = {status.node.address: status.state for status in dispatch.statuses()}
    assert now[Address("score", 0, 0)] is NodeState.RUNNING
    assert now[Address("score", 0, 1)] is NodeState.QUEUED
    assert now[Address("advantage", 0)] is NodeState.WAITING
    dispatch.mark_done(Address("score", 0, 0))
    now = {status.node.address: status.state for status in dispatch.statuses()}
    assert now[Address("score", 0, 1)] is NodeState.RUNNING


def test_steps_that_are_over_are_there_between_open_ones_too() -> None:
    """Evaluations hold steps 5 and 7 open; 6, and the newest, are over."""
    spec = replace(ONE_SHARD, steps=12, eval_every=2)
    open_steps = [NodeStatus(node, NodeState.RUNNING) for step in (5, 7) for node in step_nodes(spec, step)]
    shown = add_finished_steps(spec, open_steps, admitted=9, num_finished=2, max_nodes=1000)
    assert [s.node.address for s in shown] == [n.address for step in range(3, 9) for n in step_nodes(spec, step)]
    assert {step_of_node(s.node) for s in shown if s.state is NodeState.DONE} == {3, 4, 6, 8}
    few = add_finished_steps(spec, open_steps, 9, 2, max_nodes=len(open_steps) + 2 * len(step_nodes(spec, 1)))
    assert {step_of_node(s.node) for s in few} == {5, 6, 7, 8}, "of those that are over the latest"
    assert add_finished_steps(spec, open_steps, 9, 2, max_nodes=0) == open_steps
    assert {step_of_node(s.node) for s in add_finished_steps(spec, [], 12, 2, 1000)} == {10, 11}


@pytest.mark.parametrize("latest", [False, True])
def test_the_step_of_a_node(latest: bool) -> None:
    spec = GraphSpec(steps=9, shards=2, staleness=2, eval_every=1, has_canaries=True, uses_latest=latest)
    for step in range(spec.steps):
        assert {step_of_node(node) for node in step_nodes(spec, step)} == {step}

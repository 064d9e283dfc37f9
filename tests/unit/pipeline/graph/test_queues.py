"""The node that a worker is running, derived from the nodes that it was handed."""

from __future__ import annotations

from pipeline.graph.display import WorkerQueues
from pipeline.graph.graph import Node
from storage.address import Address

SCORER = ("score", 0)


def node(step: int, shard: int = 0, stage: str = "score") -> Node:
    return Node((step, 1), Address(stage, step, shard), (), (), 0)


def running(queues: WorkerQueues, *nodes: Node) -> list[bool]:
    return [queues.is_running(one.address) for one in nodes]


def test_a_worker_does_one_after_the_other_and_the_most_urgent_first() -> None:
    queues, late, first, second = WorkerQueues(), node(1), node(0, 0), node(0, 1)
    for one in (late, second, first):
        queues.hand_out(one, SCORER, 1, ())
    assert running(queues, late, first, second) == [True, False, False], "it interrupts nothing that it began"
    assert queues.before(first.address) == (late.address,)
    assert queues.before(late.address) == ()
    queues.done(late.address)
    assert running(queues, first, second) == [True, False]


def test_what_waits_for_its_parents_does_not_run() -> None:
    queues, parents, child = WorkerQueues(), (Address("generate", 0, 0), Address("generate", 0, 1)), node(0)
    queues.hand_out(child, SCORER, 1, parents)
    queues.done(parents[0])
    assert running(queues, child) == [False]
    assert queues.before(child.address) == ()
    queues.done(parents[1])
    assert running(queues, child) == [True]


def test_a_node_that_is_handed_out_again_counts_once() -> None:
    """Lost with a parent, and handed to another replica: what is left of the first time moves nothing."""
    queues, parents, child = WorkerQueues(), (Address("generate", 0, 0), Address("generate", 0, 1)), node(0)
    queues.hand_out(child, SCORER, 1, parents)
    queues.lost(child.address)
    queues.done(parents[0])
    assert running(queues, child) == [False]
    queues.hand_out(child, ("score", 1), 1, parents[1:])
    queues.done(parents[1])
    assert running(queues, child) == [True]
    other = node(1)
    queues.hand_out(other, SCORER, 1, ())
    assert running(queues, other) == [True], "the first replica is free"


def test_a_queued_node_that_is_lost_leaves_its_place() -> None:
    queues, nodes = WorkerQueues(), [node(step) for step in range(3)]
    for one in nodes:
        queues.hand_out(one, SCORER, 1, ())
    queues.lost(nodes[1].address)
    queues.done(nodes[0].address)
    assert running(queues, *nodes) == [False, False, True]
    queues.lost(nodes[2].address)
    assert running(queues, *nodes) == [False, False, False]


def test_as_many_run_as_there_are_threads_and_one_that_only_waits_takes_none() -> None:
    queues, nodes = WorkerQueues(), [node(0, shard, "generate") for shard in range(3)]
    for one in nodes:
        queues.hand_out(one, ("generate", 0), 2, ())
    assert running(queues, *nodes) == [True, True, False]
    queues.step_aside(nodes[0].address)
    assert running(queues, *nodes) == [True, True, True]

"""The window along the run: when steps open, when they are over, when weights may go, what a resumed run does again."""

from __future__ import annotations

import pytest

from pipeline.graph.graph import GraphSpec, run_nodes, step_nodes
from storage.address import Address
from tests.support.commits import addresses_up_to
from tests.support.flows import FlowMachine


@pytest.mark.parametrize(("staleness", "generated"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_generation_runs_eta_steps_ahead(staleness: int, generated: list[int]) -> None:
    """While step 0 is not trained, steps 0 .. eta can be generated (by version 0), and no more."""
    machine = FlowMachine(GraphSpec(steps=9, shards=1, staleness=staleness))
    machine.finish_all(("update_policy", 0))
    assert machine.steps("generate") == generated


def test_window_arithmetic() -> None:
    """eta = 1: three steps are held, counted from the oldest that is not trained. With `update_policy[k]` to come, the
    steps held are k, k+1, k+2; step k+3 is not."""
    machine = FlowMachine(GraphSpec(steps=9, shards=1, staleness=1))
    for k in range(4):
        machine.finish_all(("update_policy", k))
        assert machine.flow.num_trained_steps == k
        assert [machine.dispatch.is_done(Address("update_critic", k + ahead)) for ahead in range(1, 4)] == [
            False,
            False,
            True,  # a node that is not held counts as done
        ]


@pytest.mark.parametrize("critic", [True, False])
def test_run_ends_when_every_step_is_over(critic: bool) -> None:
    spec = GraphSpec(steps=4, shards=2, staleness=1, eval_every=2, has_critic=critic)
    machine = FlowMachine(spec)
    assert not machine.flow.is_finished
    machine.finish_all()
    assert machine.flow.is_finished
    assert sorted(machine.over) == [0, 1, 2, 3]
    assert len(machine.ran) == len(set(machine.ran)) == len(list(run_nodes(spec)))


def test_a_late_evaluation_keeps_its_step_open_but_not_the_run_back() -> None:
    """The evaluation of version 1 belongs to step 0's nodes. Training continues meanwhile."""
    machine = FlowMachine(GraphSpec(steps=3, shards=1, staleness=0, eval_every=1))
    machine.finish_all(("evaluate", 1))
    assert machine.over == [1, 2]
    assert not machine.flow.is_finished
    machine.finish_all()
    assert machine.over == [1, 2, 0]
    assert machine.flow.is_finished


def test_a_late_canary_keeps_its_weights_but_not_the_run_back() -> None:
    machine = FlowMachine(GraphSpec(steps=3, shards=2, staleness=1, has_canaries=True))
    machine.finish_all(("canary", 1))
    assert machine.flow.num_trained_steps == 3
    assert machine.unread == [0, 2]
    machine.finish_all()
    assert machine.unread == [0, 2, 1]
    assert machine.flow.is_finished


def test_weights_go_with_their_last_reader() -> None:
    """eta = 1: version 0 is read by generate[0], generate[1] and its evaluation; version 1 by generate[2]."""
    machine = FlowMachine(GraphSpec(steps=3, shards=2, staleness=1, eval_every=3))
    machine.finish_all(("evaluate", 0), ("update_policy", 0))
    assert machine.unread == [], "every shard has read version 0, its evaluation has not"
    machine.finish_all(("update_policy", 0))
    assert machine.unread == [0]
    machine.finish_all()
    assert machine.unread == [0, 1, 3], "version 2 would generate step 3, which is not part of the run"


def test_resume_runs_only_what_is_missing() -> None:
    spec = GraphSpec(steps=4, shards=1, staleness=0)
    machine = FlowMachine(spec, addresses_up_to(spec, Address("publish", 2)), published=[2])
    assert sorted(machine.over) == [0, 1]
    assert machine.flow.num_trained_steps == 2
    machine.finish_all()
    assert machine.flow.is_finished
    expected = [n.address for n in run_nodes(spec) if n.scheduled_step >= 2]
    assert sorted(machine.ran) == sorted(expected)


def test_resume_publishes_again_what_is_gone_and_still_wanted() -> None:
    """Published weights live in memory. After a reboot version 2 is gone: generate[2] needs it. Version 1, whose
    readers have all committed, is not missed."""
    spec = GraphSpec(steps=4, shards=1, staleness=0)
    machine = FlowMachine(spec, addresses_up_to(spec, Address("publish", 2)), published=[])
    machine.finish_all()
    assert machine.steps("publish") == [2, 3, 4]
    assert machine.flow.is_finished


def test_resume_in_the_middle_of_a_step() -> None:
    """One of two shards was generated: the other, and all that follows, is run; version 0 is read once more."""
    spec = GraphSpec(steps=1, shards=2, staleness=0)
    machine = FlowMachine(spec, [Address("publish", 0), Address("generate", 0, 1)], published=[0])
    machine.finish_all()
    assert [a for a in machine.ran if a.stage == "generate"] == [Address("generate", 0, 0)]
    assert machine.unread == [0]


def test_resume_of_a_finished_run_does_nothing() -> None:
    spec = GraphSpec(steps=3, shards=2, staleness=1, eval_every=1)
    machine = FlowMachine(spec, [node.address for node in run_nodes(spec)])
    assert machine.flow.is_finished
    assert machine.ran == []


def test_resumed_weights_without_readers_are_let_go() -> None:
    """A crash between the last reader's commit and the release left version 0 in memory."""
    spec = GraphSpec(steps=3, shards=1, staleness=0)
    machine = FlowMachine(spec, addresses_up_to(spec, Address("publish", 1)), published=[0, 1])
    assert machine.unread == [0]


def test_behind_closed_steps_weights_are_let_go_too() -> None:
    """Version 3 was published in step 2, which the flow does not see; its last reader is generate[4]."""
    spec = GraphSpec(steps=8, shards=1, staleness=1)
    committed = [node.address for step in (4, 5, 6) for node in step_nodes(spec, step)]
    machine = FlowMachine(spec, committed, published=[3, 6], first_step=4)
    assert machine.over == [4, 5, 6]
    assert 3 in machine.unread
    machine.finish_all()
    assert machine.flow.is_finished
    assert machine.steps("update_policy") == [7]


def test_what_lost_its_commit_runs_before_a_trainer_needs_it() -> None:
    """Steps 0 to 2 are done, but a shard of step 1 and an update of the policy are gone (their records were damaged): a
    trainer that is built anew may have to train through step 1 again, and finds nothing there until they are back."""
    spec = GraphSpec(steps=5, shards=2, staleness=1)
    lost = {Address("generate", 1, 1), Address("update_policy", 1)}
    done = {node.address for node in run_nodes(spec) if node.scheduled_step < 3 and node.address.step < 3} - lost
    machine = FlowMachine(spec, done, published=[3])
    machine.finish_all()
    assert machine.flow.is_finished
    assert machine.steps("update_policy") == [1, 3, 4]
    back = max(machine.ran.index(address) for address in lost)
    trained = [a for a in machine.ran if a.stage in ("logprob", "update_policy", "publish") and a.step > 1]
    assert trained
    assert all(machine.ran.index(address) > back for address in trained)


def test_a_critic_that_lags_holds_nothing_back() -> None:
    """An ordinary kill leaves this: nothing that an update has read is missing."""
    spec = GraphSpec(steps=3, shards=1, staleness=1)
    done = {node.address for node in run_nodes(spec) if node.address.step < 1 and node.stage != "update_critic"}
    machine = FlowMachine(spec, done, published=[0, 1])
    machine.finish_all(("update_critic", 0), ("value", 1))
    assert Address("logprob", 1) in machine.ran


def test_thousands_of_committed_steps_are_passed_in_a_loop() -> None:
    """Python's stack holds about a thousand calls: a run must be resumable however far it has come."""
    spec = GraphSpec(steps=5_001, shards=1, staleness=1)
    committed = addresses_up_to(spec, Address("publish", 5_000))
    machine = FlowMachine(spec, committed, published=[4_999])
    assert machine.over == list(range(5_000))
    assert machine.flow.num_trained_steps == 5_000
    machine.finish_all()
    assert machine.flow.is_finished
    assert machine.steps("update_policy") == [5_000]

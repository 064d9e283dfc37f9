"""Dispatch as a state machine: events in, instructions out. No Dask, no clock."""

from __future__ import annotations

import random

import pytest

from pipeline.graph.dispatch import Dispatch, Submit
from pipeline.graph.graph import Gang, GraphSpec, Mode, Node, gangs_of, run_nodes
from stages.models.protocol import Role
from storage.address import Address

TRAINING = frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE})


class Machine:
    """Owns a dispatch on usable workers, and what it has handed out that has not ended."""

    def __init__(self, *gangs: Gang, up: bool = True) -> None:
        self.dispatch = Dispatch(gangs)
        self.gangs = gangs
        self.out: dict[Address, Submit] = {}
        self.order: list[Submit] = []
        if up:
            for gang in gangs:
                for worker in range(1 if gang.is_ordered else gang.workers):
                    self.dispatch.on_worker_up(gang.name, worker)

    def step(self) -> list[str]:
        """Hands out what can be; each as "stage step.shard > gang.replica"."""
        submits = self.dispatch.next_submits()
        for submit in submits:
            self.out[submit.node.address] = submit
        self.order += submits
        return [f"{short(s.node.address)} > {s.gang}.{s.replica}" for s in submits]

    def done(self, stage: str, step: int = 0, shard: int = 0) -> list[str]:
        address = Address(stage, step, shard)
        del self.out[address]
        assert self.dispatch.mark_done(address)
        return self.step()

    def down(self, gang: str, worker: int = 0) -> set[str]:
        return self.forget(self.dispatch.on_worker_down(gang, worker))

    def lost(self, stage: str, step: int = 0, shard: int = 0) -> set[str]:
        return self.forget(self.dispatch.reset_lost([Address(stage, step, shard)]))

    def forget(self, addresses: list[Address]) -> set[str]:
        for address in addresses:
            del self.out[address]
        assert len(set(addresses)) == len(addresses)
        return {short(address) for address in addresses}


def short(address: Address) -> str:
    return f"{address.stage} {address.step}.{address.shard}"


def pool(workers: int, slots: int = 1) -> Gang:
    return Gang("gen", frozenset({Role.GENERATE}), workers, slots)


def scorers(workers: int = 1) -> Gang:
    return Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), workers)


def trainer(workers: int = 1) -> Gang:
    return Gang("train", TRAINING, workers)


def node(stage: str, step: int = 0, shard: int = 0, *parents: Address, priority: int = 0) -> Node:
    return Node((step, priority), Address(stage, step, shard), parents, (), step)


def shards(count: int, step: int = 0) -> list[Node]:
    return [node("generate", step, shard) for shard in range(count)]


# ---- slots ---------------------------------------------------------------------------------------------------------


def test_a_shard_goes_where_a_slot_is_free() -> None:
    """Two replicas of two slots; the fast one finishes first and gets all the rest."""
    machine = Machine(pool(2, slots=2), scorers(), trainer())
    machine.dispatch.admit(shards(7))
    assert machine.step() == [f"generate 0.{shard} > gen.{shard % 2}" for shard in range(4)]
    assert machine.step() == []
    assert machine.done("generate", 0, 1) == ["generate 0.4 > gen.1"]
    assert machine.done("generate", 0, 4) == ["generate 0.5 > gen.1"]
    assert machine.done("generate", 0, 5) == ["generate 0.6 > gen.1"]
    assert machine.done("generate", 0, 0) == []


def test_the_oldest_step_goes_first() -> None:
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("generate", 1), node("generate", 0, 1), node("generate", 0, 0)])
    assert machine.step() == ["generate 0.0 > gen.0"]
    assert machine.done("generate", 0, 0) == ["generate 0.1 > gen.0"]
    assert machine.done("generate", 0, 1) == ["generate 1.0 > gen.0"]


def test_nothing_is_handed_out_before_a_worker_is_up() -> None:
    machine = Machine(pool(2), scorers(), trainer(), up=False)
    machine.dispatch.admit(shards(2))
    assert machine.step() == []
    machine.dispatch.on_worker_up("gen", 1)
    assert machine.step() == ["generate 0.0 > gen.1"]


def test_lost_replica() -> None:
    """Its nodes wait again and go to the other replica's slots. It comes back with all its slots."""
    machine = Machine(pool(2, slots=1), scorers(), trainer())
    machine.dispatch.admit(shards(3))
    machine.step()
    assert machine.dispatch.can_run_without("gen", 0)
    assert machine.down("gen", 0) == {"generate 0.0"}
    assert not machine.dispatch.can_run_without("gen", 1)
    assert machine.step() == []
    assert machine.done("generate", 0, 1) == ["generate 0.0 > gen.1"], "older than shard 2"
    machine.dispatch.on_worker_up("gen", 0)
    assert machine.step() == ["generate 0.2 > gen.0"]
    assert [s.attempt for s in machine.order if s.node.address == Address("generate", 0)] == [0, 1]


def test_a_canary_that_waits_for_a_slot_keeps_no_rows_where_they_are() -> None:
    machine = Machine(pool(1, slots=1), scorers(), trainer())
    canary = Node((0, 9), Address("canary", 0), (), (), 0)
    machine.dispatch.admit([*shards(2), canary])
    assert machine.step() == ["generate 0.0 > gen.0"]
    assert machine.dispatch.versions_waiting_for_slot("gen") == {0: 1}
    assert machine.done("generate", shard=0) == ["generate 0.1 > gen.0"]
    assert machine.dispatch.versions_waiting_for_slot("gen") == {}
    assert machine.done("generate", shard=1) == ["canary 0.0 > gen.0"]


def test_a_node_that_only_waits_gives_its_slot_up_once() -> None:
    """Its rows are in another replica. When it is done or lost, the slot that it gave up is not freed again."""
    machine = Machine(pool(workers=2))
    machine.dispatch.admit(shards(5))
    assert machine.step() == ["generate 0.0 > gen.0", "generate 0.1 > gen.1"]
    assert machine.dispatch.versions_waiting_for_slot("gen") == {0: 3}
    for _ in range(2):
        machine.dispatch.release_slot(Address("generate", 0, 0))
    assert machine.step() == ["generate 0.2 > gen.0"]
    assert machine.done("generate", shard=0) == []
    assert machine.done("generate", shard=2) == ["generate 0.3 > gen.0"]
    machine.dispatch.release_slot(Address("generate", 0, 1))
    assert machine.step() == ["generate 0.4 > gen.1"]
    assert machine.dispatch.versions_waiting_for_slot("gen") == {}
    assert machine.lost("generate", shard=1) == {"generate 0.1"}
    assert machine.step() == [], "it has no slot to come back to yet"
    machine.dispatch.release_slot(Address("generate", 0, 9))
    assert machine.down("gen", 1) == {"generate 0.4"}
    assert machine.dispatch.replicas_up("gen") == {0}


def test_suspect_replica_that_comes_back_with_the_node_done() -> None:
    """Replica 0 is overdue with shard 0, which goes to replica 1; then both finish it."""
    machine = Machine(pool(2), scorers(), trainer())
    machine.dispatch.admit(shards(3))
    machine.step()
    machine.down("gen", 0)
    assert machine.done("generate", 0, 1) == ["generate 0.0 > gen.1"]
    assert machine.dispatch.mark_done(Address("generate", 0))  # the first attempt's commit; the second still runs
    assert not machine.dispatch.mark_done(Address("generate", 0)), "the second commit changes nothing"
    machine.dispatch.on_worker_up("gen", 0)
    assert machine.step() == ["generate 0.2 > gen.0"]
    assert machine.dispatch.times_lost(Address("generate", 0)) == 1


# ---- ordered gangs --------------------------------------------------------------------------------------------------


def test_ranks_get_one_node_at_a_time_numbered_in_order() -> None:
    """Two nodes at once could reach two ranks in different orders, and their collectives would meet crosswise."""
    machine = Machine(pool(1), scorers(), trainer(2))
    machine.dispatch.admit([node("value", 0, s, priority=4) for s in range(2)] + [node("logprob", 0, 0, priority=3)])
    assert machine.step() == ["logprob 0.0 > train.0"]
    assert machine.done("logprob") == ["value 0.0 > train.0"]
    assert machine.done("value") == ["value 0.1 > train.0"]
    assert [s.sequence for s in machine.order] == [0, 1, 2]
    assert {s.mode for s in machine.order} == {Mode.ORDERED}


def test_a_single_rank_has_two() -> None:
    machine = Machine(pool(1), scorers(), trainer(1))
    machine.dispatch.admit([node("value", 0, s) for s in range(3)])
    assert machine.step() == ["value 0.0 > train.0", "value 0.1 > train.0"]
    assert machine.done("value", 0, 0) == ["value 0.2 > train.0"]


def test_a_more_urgent_child_keeps_the_second_place() -> None:
    """The critic's update does not slip in between the policy's and its publication; where there is no such child, or
    it waits for something else too, the second place is used."""
    update = node("update_policy", priority=1)
    critic = node("update_critic", priority=3)
    machine = Machine(trainer())
    publish = Node((0, 2), Address("publish", 1), (update.address,), (), 1)
    machine.dispatch.admit([update, critic, publish])
    assert machine.step() == ["update_policy 0.0 > train.0"]
    assert machine.done("update_policy") == ["publish 1.0 > train.0", "update_critic 0.0 > train.0"]


def test_a_child_that_waits_for_another_gang_keeps_no_place() -> None:
    update, critic, score = node("update_policy", priority=1), node("update_critic", priority=3), node("score")
    machine = Machine(trainer(), scorers())
    machine.dispatch.admit([update, critic, score, node("value", 0, 0, update.address, score.address, priority=2)])
    assert set(machine.step()) == {
        "update_policy 0.0 > train.0", "update_critic 0.0 > train.0", "score 0.0 > score.0",
    }  # fmt: skip


def test_ordered_nodes_wait_for_their_parents_to_be_done() -> None:
    """A parent on the same gang must be done too: a submitted parent may fail."""
    machine = Machine(pool(1), scorers(), trainer(1))
    update = Address("update_policy", 0)
    machine.dispatch.admit([node("update_policy", 0), node("publish", 1, 0, update)])
    assert machine.step() == ["update_policy 0.0 > train.0"]
    assert machine.done("update_policy", 0) == ["publish 1.0 > train.0"]


def test_lost_gang() -> None:
    """The death of any rank takes the gang down. Its numbers continue, so that no rank sees one twice."""
    machine = Machine(pool(1), scorers(), trainer(2))
    machine.dispatch.admit([node("value", 0, s) for s in range(2)])
    machine.step()
    assert machine.down("train", 1) == {"value 0.0"}
    assert machine.step() == []
    machine.dispatch.on_worker_up("train", 0)
    assert machine.step() == ["value 0.0 > train.0"]
    assert machine.order[-1].sequence == 1
    assert machine.order[-1].attempt == 1


# ---- free nodes ----------------------------------------------------------------------------------------------------


def test_free_nodes_run_ahead_of_their_parents() -> None:
    """Scores are submitted when their shards are, spread over the replicas by load: Dask holds them back."""
    machine = Machine(pool(1, slots=3), scorers(2), trainer())
    machine.dispatch.admit(shards(3) + [node("score", 0, s, Address("generate", 0, s)) for s in range(3)])
    first = machine.step()
    assert first[:3] == [f"generate 0.{s} > gen.0" for s in range(3)]
    assert first[3:] == ["score 0.0 > score.0", "score 0.1 > score.1", "score 0.2 > score.0"]


def test_free_nodes_do_not_run_ahead_into_the_next_turn() -> None:
    """The chain of advantages would otherwise be one Dask graph as long as the run."""
    machine = Machine(pool(1), scorers(), trainer())
    before = Address("advantage", 0)
    machine.dispatch.admit([node("advantage", 0), node("advantage", 1, 0, before)])
    assert machine.step() == ["advantage 0.0 > score.0"]
    assert machine.done("advantage", 0) == ["advantage 1.0 > score.0"]


def test_what_hangs_on_a_lost_node_waits_again() -> None:
    """Losing a replica resets the scores that were submitted on top of its shards, not the others; only the shard has a
    loss to its name."""
    machine = Machine(pool(2), scorers(), trainer())
    tower = [
        *shards(2),
        *(node("score", 0, s, Address("generate", 0, s), priority=1) for s in range(2)),
        node("advantage", 0, 0, Address("score", 0, 0), Address("score", 0, 1), priority=5),
    ]
    machine.dispatch.admit(tower)
    assert len(machine.step()) == 5
    assert machine.down("gen", 1) == {"generate 0.1", "score 0.1", "advantage 0.0"}
    assert machine.step() == []
    assert [machine.dispatch.times_lost(Address(stage, 0, 1)) for stage in ("generate", "score")] == [1, 0]
    assert machine.done("generate", 0, 0) == ["generate 0.1 > gen.0", "score 0.1 > score.0", "advantage 0.0 > score.0"]


def test_a_done_child_stays_done() -> None:
    """Its output is in the store, whatever happens to its parent's process."""
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("generate"), node("score", 0, 0, Address("generate", 0))])
    machine.step()
    machine.done("generate")
    machine.done("score")
    assert machine.down("gen") == set()
    assert machine.dispatch.is_done(Address("score", 0))


def test_lost_counts_once_for_each_attempt() -> None:
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("score")])
    machine.step()
    assert machine.lost("score") == {"score 0.0"}
    assert machine.dispatch.reset_lost([Address("score", 0)]) == [], "it is not out any more"
    assert machine.dispatch.times_lost(Address("score", 0)) == 1


# ---- what is there already ------------------------------------------------------------------------------------------


def test_committed_nodes_are_done_at_once() -> None:
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("generate"), node("score", 0, 0, Address("generate", 0))], [Address("generate", 0)])
    assert machine.step() == ["score 0.0 > score.0"]


def test_retired_parents_count_as_done() -> None:
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("publish", 0)], [Address("publish", 0)])
    machine.dispatch.retire([Address("publish", 0)])
    assert machine.dispatch.is_done(Address("publish", 0))
    machine.dispatch.admit([node("generate", 1, 0, Address("publish", 0))])
    assert machine.step() == ["generate 1.0 > gen.0"]


def test_a_node_that_is_not_done_cannot_be_retired() -> None:
    machine = Machine(pool(1), scorers(), trainer())
    machine.dispatch.admit([node("generate")])
    with pytest.raises(AssertionError, match=r"generate/step_000000/shard_0000 is retired before it is done"):
        machine.dispatch.retire([Address("generate", 0)])


def test_gangs_of_a_placement() -> None:
    roles = {Role.GENERATE: "all", Role.SCORE: "all", Role.POLICY: "t", Role.CRITIC: "t", Role.REFERENCE: "t"}
    both = gangs_of(roles, {"all": 3, "t": 2}, {"all": 4, "t": 1})
    assert both == [Gang("all", frozenset({Role.GENERATE, Role.SCORE}), 3, 4), Gang("t", TRAINING, 2, 1)]
    assert [gang.is_ordered for gang in both] == [False, True]
    modes = [both[0].mode(Role.GENERATE), both[0].mode(Role.SCORE), both[1].mode(Role.CRITIC)]
    assert modes == [Mode.SLOT, Mode.FREE, Mode.ORDERED]


# ---- any order of events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_losses_ends_with_everything_done(seed: int) -> None:
    """A whole run under random deaths: every node is handed out only on parents that are done (or, free, out), no
    replica has more than its slots, no gang of ranks more than one node, and the run ends."""
    rng = random.Random(seed)
    machine = Machine(pool(2, slots=2), scorers(2), trainer(2))
    spec = GraphSpec(steps=4, shards=3, staleness=1, eval_every=2, has_canaries=True)
    graph = {n.address: n for n in run_nodes(spec)}
    machine.dispatch.admit(graph.values())
    done: set[Address] = set()
    dead: list[tuple[str, int]] = []
    deaths = 0
    for _ in range(5000):
        machine.step()
        for submit in machine.out.values():
            allowed = done | (machine.out.keys() if submit.mode is Mode.FREE else set())
            assert allowed.issuperset(submit.node.parents)
        on = [(s.gang, s.replica) for s in machine.out.values() if s.mode is not Mode.FREE]
        assert all(on.count(("gen", replica)) <= 2 for replica in (0, 1))
        assert on.count(("train", 0)) <= 1
        assert not [where for where in dead if where in on]
        if len(done) == len(graph):
            break
        if dead and rng.random() < 0.5:
            machine.dispatch.on_worker_up(*dead.pop(rng.randrange(len(dead))))
        elif deaths < 40 and rng.random() < 0.2:
            where = rng.choice([("gen", 0), ("gen", 1), ("score", 0), ("score", 1), ("train", 0)])
            if where not in dead:
                machine.down(*where)
                dead.append(where)
                deaths += 1
        finishable = sorted(a for a, s in machine.out.items() if done.issuperset(s.node.parents))
        if finishable:
            address = rng.choice(finishable)
            del machine.out[address]
            assert machine.dispatch.mark_done(address)
            done.add(address)
    assert done == set(graph)
    assert deaths > 5
    sequences = [s.sequence for s in machine.order if s.mode is Mode.ORDERED]
    assert sequences == list(range(len(sequences)))

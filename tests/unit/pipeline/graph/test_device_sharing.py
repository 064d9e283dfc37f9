"""Gangs that have their devices in turn: who is handed nodes when, and which instructions pass the devices on."""

from __future__ import annotations

import random

import pytest

from pipeline.graph.device_sharing import Handover
from pipeline.graph.display import ObservedDispatch
from pipeline.graph.graph import Gang, GraphSpec, run_nodes
from stages.models.protocol import Role
from storage.address import Address

GENERATE = Gang("generate", frozenset({Role.GENERATE}), workers=2, concurrent_shards=1)
SCORE = Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), workers=1)
TRAIN = Gang("train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), workers=2)
GANGS = (GENERATE, SCORE, TRAIN)
TURNS = (("generate", "train"),)


class Played:
    """Owns a run that is played through dispatch, with every node and every pass over when the player says so."""

    def __init__(self, spec: GraphSpec, device_sharing: tuple[tuple[str, ...], ...] = TURNS) -> None:
        self.dispatch = ObservedDispatch(GANGS, device_sharing)
        self.left = {node.address for node in run_nodes(spec)}
        self.out: dict[Address, str] = {}
        self.handover: list[str] = []
        self.passes: list[Handover] = []
        for gang in GANGS:
            for worker in range(1 if gang.is_ordered else gang.workers):
                self.dispatch.on_worker_up(gang.name, worker)
        self.dispatch.admit(run_nodes(spec))

    def go_on(self) -> None:
        """Carries out what dispatch says, and asserts that nobody works on devices that another gang has."""
        for submit in self.dispatch.next_submits():
            self.out[submit.node.address] = submit.gang
        for one in self.dispatch.next_handovers():
            assert one.giver not in self.out.values()
            self.passes.append(one)
            self.handover.append(one.giver)
        assert not {"generate", "train"} <= set(self.out.values())
        assert not self.handover or not {"generate", "train"} & set(self.out.values())

    def finish(self, address: Address) -> None:
        del self.out[address]
        self.left.discard(address)
        self.dispatch.mark_done(address)

    def play(self, choose: random.Random) -> None:
        """Play to the end, in any possible order."""
        while self.left:
            self.go_on()
            events = [*sorted(self.out), *self.handover]
            assert events, f"nothing goes on, and {len(self.left)} nodes are left: {self.dispatch.find_waits()}"
            event = choose.choice(events)
            if isinstance(event, str):
                self.handover.remove(event)
                self.dispatch.on_handed_over(event)
            else:
                self.finish(event)


def generating(spec: GraphSpec) -> Played:
    """A run in which version 0 is published, and the first shards are out."""
    played = Played(spec)
    played.go_on()
    played.finish(Address("publish", 0))
    played.go_on()
    assert played.passes == [Handover("train", "generate")]
    played.dispatch.on_handed_over("train")
    played.passes, played.handover = [], []
    played.go_on()
    assert set(played.out.values()) - {"score"} == {"generate"}
    return played


def spec(staleness: int, **more: object) -> GraphSpec:
    defaults = {"steps": 6, "shards": 3, "staleness": staleness, "eval_every": 3, "eval_shards": 2}
    return GraphSpec(**{**defaults, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_in_turns_ends_whatever_ends_when(staleness: int, seed: int) -> None:
    played = Played(spec(staleness, recompute_logprobs=True, has_canaries=True))
    played.play(random.Random(seed))
    givers = [one.giver for one in played.passes]
    assert givers[::2] == ["train"] * len(givers[::2]), "which publishes version 0"
    assert givers[1::2] == ["generate"] * len(givers[1::2])


def test_staleness_saves_turns() -> None:
    """Everything that may be generated ahead is generated before the devices are passed on."""
    passes = []
    for staleness in (0, 3):
        played = Played(spec(staleness, steps=12, eval_every=0))
        played.play(random.Random(0))
        passes.append(len(played.passes))
    assert passes[1] < passes[0]


def test_devices_are_passed_when_nothing_is_out_and_nothing_ready() -> None:
    played = generating(spec(0, steps=2, shards=2, eval_every=0))
    played.finish(Address("generate", 0, 0))
    played.go_on()
    assert not played.passes, "the other shard is still out"
    assert played.dispatch.find_waits()["train"].devices_of == "generate"
    played.finish(Address("generate", 0, 1))
    played.go_on()
    assert played.passes == [Handover("generate", "train")]
    assert "train" not in played.out.values(), "its turn begins when the others have left"
    played.dispatch.on_handed_over("generate")
    played.handover = []
    played.go_on()
    assert "train" in played.out.values()
    assert "generate" not in str(played.dispatch.find_waits().get("train"))


def test_a_gang_that_lost_its_workers_keeps_its_turn_while_it_has_something_to_do() -> None:
    played = generating(spec(0, steps=2, shards=2, eval_every=0))
    for replica in (0, 1):
        for address in played.dispatch.on_worker_down("generate", replica):
            del played.out[address]
    played.go_on()
    assert not played.passes
    played.dispatch.on_worker_up("generate", 1)
    played.go_on()
    assert set(played.out.values()) - {"score"} == {"generate"}


def test_a_shard_whose_rows_are_in_another_replica_keeps_the_turn() -> None:
    """The shard has no slot any more, but its rows are still on the devices."""
    played = generating(spec(0, steps=2, shards=2, eval_every=0))
    played.dispatch.release_slot(Address("generate", 0, 0))
    played.finish(Address("generate", 0, 1))
    played.go_on()  # the reference has the other shard to read
    assert not played.passes
    played.finish(Address("generate", 0, 0))
    played.go_on()
    assert played.passes == [Handover("generate", "train")]


def test_a_replica_that_takes_turns_cannot_be_spared() -> None:
    """Overdue, it would stay on devices that another gang is to have."""
    spared = []
    for device_sharing in ((), TURNS):
        dispatch = ObservedDispatch(GANGS, device_sharing)
        for replica in (0, 1):
            dispatch.on_worker_up("generate", replica)
        spared.append(dispatch.can_run_without("generate", 0))
    assert spared == [True, False]


def test_a_wait_for_the_devices_names_who_has_them() -> None:
    played = generating(spec(1, steps=3, shards=2, eval_every=0))
    for shard in (0, 1):
        played.finish(Address("generate", 0, shard))
    played.go_on()
    wait = played.dispatch.find_waits()["train"]
    assert str(wait).endswith("waits for the devices, which generate holds")

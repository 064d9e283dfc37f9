"""`latest`: which version a shard is handed out with, and when weights may go, on any order in which nodes may end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import pytest

from pipeline.graph.graph import (
    GraphSpec,
    Node,
    generation_version,
    generation_versions,
    run_nodes,
    weight_readers,
)
from storage.address import Address
from tests.support.flows import FlowMachine

READERS = ("generate", "evaluate", "canary")


class Weights:
    """Owns what a board of published weights would hold, and fails where somebody reads what is not there."""

    def __init__(
        self,
        spec: GraphSpec,
        there: Iterable[int],
        committed: Iterable[Address],
        sampled_versions: Mapping[Address, int],
    ) -> None:
        self.spec, self.sampled_versions = spec, sampled_versions
        self.there = set(there)
        self.unread: list[int] = []
        self.reading: dict[Address, int] = {}
        self.committed = set(committed)
        self.given: dict[Address, int] = {}
        """The version that each committed shard of training rows was sampled with."""

    def hand_out(self, node: Node) -> None:
        if node.stage not in READERS:
            return
        assert node.version in self.there, f"{node.address} is to read v{node.version}; there are {self.there}"
        if node.stage == "generate":
            step = node.address.step
            assert max(0, step - self.spec.staleness) <= node.version <= step
            newest = max(version for version in self.there if version <= step)
            asked = newest if self.spec.uses_latest else max(0, step - self.spec.staleness)
            assert node.version == self.sampled_versions.get(node.address, asked)
        self.reading[node.address] = node.version

    def done(self, node: Node) -> None:
        self.committed.add(node.address)
        if node.stage == "publish":
            self.there.add(node.version)
        elif node.stage == "generate":
            self.given[node.address] = self.reading[node.address]
        self.reading.pop(node.address, None)

    def release(self, version: int) -> None:
        """Release a version: nobody reads it now, and every later reader can use another version."""
        assert version not in self.reading.values()
        others = [a for a in weight_readers(self.spec, version) if a.stage != "generate" or not self.spec.uses_latest]
        assert self.committed.issuperset(others)
        assert version not in self.unread
        self.unread.append(version)
        self.there.discard(version)


class Machine(FlowMachine):
    """A machine whose nodes end, and are lost, in an order that a seed draws."""

    def __init__(
        self,
        spec: GraphSpec,
        seed: int,
        committed: Iterable[Address] = (),
        published: Iterable[int] = (),
        sampled_versions: Mapping[Address, int] | None = None,
        slots: int = 4,
    ) -> None:
        self.draw = random.Random(seed)
        self.weights = Weights(spec, published, committed, sampled_versions or {})
        super().__init__(spec, committed, published, sampled_versions, slots)

    def on_unread(self, version: int) -> None:
        self.weights.release(version)

    def submit(self) -> None:
        before = {*self.out}
        super().submit()
        for address in [address for address in self.out if address not in before]:
            self.weights.hand_out(self.out[address])

    def lose(self, address: Address) -> None:
        for reset in self.dispatch.reset_lost([address]):
            self.out.pop(reset)
            self.weights.reading.pop(reset, None)

    def finish(self, address: Address) -> None:
        self.weights.done(self.out[address])
        super().finish(address)

    def run(self, most: int | None = None, losses: float = 0.0) -> None:
        """End nodes, `most` of them at most. `losses`: how often one is lost instead."""
        while not self.flow.is_finished and (most is None or len(self.ran) < most):
            address = self.draw.choice(self.ready())
            if self.draw.random() < losses:
                self.lose(address)
            else:
                self.finish(address)
            self.submit()


def spec_of(staleness: int, **changes: object) -> GraphSpec:
    settings = {"steps": 9, "shards": 3, "eval_every": 2, "eval_shards": 2, "has_canaries": True, "uses_latest": True}
    return GraphSpec(staleness=staleness, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("latest", [False, True])
def test_any_order_keeps_the_bound_and_the_weights_that_are_read(staleness: int, latest: bool) -> None:
    """`Weights` fails where a version outside [max(0, i - eta), i] is handed out, one that is gone, or not the newest;
    and where one is let go that somebody reads. In the end all are gone that anybody might have read."""
    spec = spec_of(staleness, uses_latest=latest)
    newer = 0
    for seed in range(25):
        machine = Machine(spec, seed, slots=1 + seed % 4)
        machine.run(losses=0.1)
        assert sorted(machine.ran) == sorted(node.address for node in run_nodes(spec))
        assert sorted(machine.weights.unread) == [v for v in range(10) if weight_readers(spec, v)]
        given = machine.weights.given
        newer += sum(version > generation_version(spec, a.step) for a, version in given.items())
    assert (newer > 0) == (latest and staleness > 0)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_run_that_goes_on_from_anywhere_keeps_the_bound(staleness: int) -> None:
    """Committed outputs stay. Of lost published weights only those are published again that no other version can
    replace."""
    spec = spec_of(staleness)
    for seed in range(25):
        before = Machine(spec, seed, slots=2)
        before.run(most=random.Random(seed).randrange(len(list(run_nodes(spec)))))
        committed, there = before.weights.committed, before.weights.there
        lost = seed % 3 == 0
        after = Machine(spec, seed + 1, committed, () if lost else there, slots=1 + seed % 4)
        after.run(losses=0.1)
        publications = {a.step for a in after.ran if a.stage == "publish"}
        assert sorted({a for a in after.ran if a.stage != "publish"}) == sorted(
            node.address for node in run_nodes(spec) if node.address not in committed and node.stage != "publish"
        )
        newest = max((a.step for a in committed if a.stage == "publish"), default=0)
        again = {v for v in publications if Address("publish", v) in committed}
        own = {a.step for a in weight_readers_left(spec, committed)}
        assert again <= own | {newest}
        assert lost or not again


def weight_readers_left(spec: GraphSpec, committed: set[Address]) -> set[Address]:
    """Evaluations and canaries without a commit."""
    readers = {a for v in range(spec.steps + 1) for a in weight_readers(spec, v) if a.stage != "generate"}
    return readers - committed


def test_without_staleness_both_are_the_same_run() -> None:
    """Node by node: parents, versions, and the order in which a seed has them run."""
    machines = [Machine(spec_of(0, uses_latest=latest), 7) for latest in (False, True)]
    for machine in machines:
        machine.run(losses=0.1)
    assert machines[0].ran == machines[1].ran
    assert machines[0].weights.given == machines[1].weights.given
    assert machines[0].weights.unread == machines[1].weights.unread


def test_the_bound_is_the_same_edge() -> None:
    for latest in (False, True):
        nodes = {node.address: node for node in run_nodes(spec_of(2, uses_latest=latest))}
        assert nodes[Address("generate", 5, 1)].parents == (Address("publish", 3),)
    assert list(generation_versions(spec_of(2), 5)) == [3, 4, 5]
    assert list(generation_versions(spec_of(2), 1)) == [0, 1]
    assert list(generation_versions(spec_of(2, uses_latest=False), 5)) == [3]


def test_a_shard_that_waits_takes_the_newest_and_one_that_runs_keeps_its_own() -> None:
    """eta = 2. Two shards of step 1 hold all slots while step 0 is trained: step 2 could start with version 0, and
    starts with version 1. What was running stays at version 0."""
    machine = Machine(spec_of(2, shards=4, eval_every=0, has_canaries=False), 0)
    machine.finish_all(("generate", 1))
    assert [machine.out[Address("generate", 1, s)].version for s in range(4)] == [0] * 4
    machine.finish(Address("generate", 1, 3))
    machine.submit()
    assert machine.out[Address("generate", 2, 0)].version == 1


def test_a_shard_that_is_lost_takes_what_is_newest_then() -> None:
    machine = Machine(spec_of(2, shards=4, eval_every=0, has_canaries=False), 0)
    machine.finish_all(("generate", 1))
    machine.lose(Address("generate", 1, 2))
    machine.submit()
    assert machine.out[Address("generate", 1, 2)].version == 1


def test_rows_wait_for_the_version_that_they_would_take() -> None:
    """A migrating row must not wait for versions that its shard would bring, only for those of its edge."""
    machine = Machine(spec_of(2, shards=4, eval_every=0, has_canaries=False), 0)
    machine.finish_all(("generate", 1))
    assert machine.dispatch.versions_waiting_for_slot("gen").keys() == {1}


def test_a_canary_and_an_evaluation_come_before_the_next_version() -> None:
    """Engines load new weights as soon as they can, so a node that needs version v follows the generation of step v."""
    nodes = {node.address: node for node in run_nodes(spec_of(2, eval_every=1))}
    for version in range(9):
        canary = nodes[Address("canary", version)]
        first = {Address("canary", 0)} if version else set()
        parents = {Address(stage, version) for stage in ("generate", "logprob", "publish")} | first
        assert canary.parents == tuple(sorted(parents))
        following = nodes.get(Address("generate", version + 1))
        evaluation = nodes[Address("evaluate", version)]
        assert following is None or (canary < following and evaluation < following)


def test_what_later_outputs_were_made_from_is_sampled_by_the_same_version_again() -> None:
    """The commit of a shard of step 3 is lost, after it was trained on: it was sampled by version 2, which is published
    again for it and for nothing else."""
    spec = spec_of(2, eval_every=0, has_canaries=False)
    lost = Address("generate", 3, 1)
    committed = {n.address for n in run_nodes(spec) if n.scheduled_step < 5 and n.address.step < 5} - {lost}
    machine = Machine(spec, 1, committed, [5], sampled_versions={lost: 2})
    assert Address("publish", 2) in machine.out
    machine.finish(Address("publish", 2))
    machine.submit()
    assert machine.out[lost].version == 2

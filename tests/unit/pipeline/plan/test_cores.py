"""Cores that workers share: times by hand, and what holds for any costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeline.graph.graph import Gang, GraphSpec
from pipeline.observe.timeline import Box
from pipeline.plan.cores import SharedClock, busy_others, shared_rate, thread_speedup, work_at, working_threads
from pipeline.plan.decode import DecodeSpeed, RowQueue
from pipeline.plan.lengths import FixedLengths
from pipeline.plan.scenario import scenario_of
from pipeline.plan.simulate import Execution, Scenario, SimulationResult, play
from stages.models.protocol import Role
from storage.address import Address
from tests.support.fixed_costs import FixedCosts
from tests.support.plans import costs, planned

GANGS = (
    Gang("generate", frozenset({Role.GENERATE}), 1),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    Gang("train", frozenset({Role.POLICY, Role.REFERENCE}), 1),
    Gang("critic", frozenset({Role.CRITIC}), 1),
)
ONE_EACH = {"generate": 1, "train": 1, "critic": 1}
UPDATES = FixedCosts({"update_policy": 4.0, "update_critic": 4.0})


def scenario(costs: FixedCosts, cores: int | None, threads: dict[str, int] | None = None, eta: int = 0) -> Scenario:
    spec = GraphSpec(1 if costs is UPDATES else 6, 2, eta)
    return Scenario(spec, GANGS, costs, FixedLengths(8), 2, cores=cores, threads=threads or ONE_EACH)


def played(given: Scenario) -> tuple[SimulationResult, dict[Address, Execution]]:
    found: list[Execution] = []
    result = play(given, found.append)
    return result, {one.submit.node.address: one for one in found}


@pytest.mark.parametrize(("cores", "seconds"), [(None, 4.0), (3, 4.0), (2, 4.0), (1, 8.0)])
def test_two_equal_nodes_on_one_core_take_twice_as_long(cores: int | None, seconds: float) -> None:
    assert played(scenario(UPDATES, cores))[0].wall_s == pytest.approx(seconds)


def test_a_node_is_slow_only_as_long_as_others_work() -> None:
    """One core. Both updates have done 2 of their seconds when the critic's ends at 4 s; the policy's other 2 follow.
    A node of two threads is as slow as the one that shares its core with a third: 8 s beside it."""
    result, nodes = played(scenario(FixedCosts({"update_policy": 4.0, "update_critic": 2.0}), 1))
    first = nodes[Address("update_critic", 0)]
    assert first.finished_s - first.started_s == pytest.approx(4.0)
    one = nodes[Address("update_policy", 0)]
    assert one.finished_s - one.started_s == pytest.approx(6.0)
    assert result.busy_s["train"] == pytest.approx(6 * 6.0)
    nodes = played(scenario(UPDATES, 2, {"train": 2, "critic": 1}))[1]
    assert nodes[Address("update_policy", 0)].finished_s == pytest.approx(8.0), "2 cores for 3 threads"


def test_a_gang_without_threads_waits_in_real_time() -> None:
    """eta = 1, one core. The scores of step 1 take 3 s whatever else works."""
    stages = {"update_policy": 4.0, "update_critic": 4.0, "score": 3.0}
    _, nodes = played(scenario(FixedCosts(stages), 1, eta=1))
    for address, one in nodes.items():
        if address.stage == "score":
            assert one.finished_s - one.started_s == pytest.approx(3.0)


class Queue(FixedCosts):
    """An engine of four places whose passes take a second."""

    def engine_queue(self) -> RowQueue[Execution]:
        return RowQueue(DecodeSpeed(4, 1e9, weights_s=1.0, context_s=0.0, token_s=0.0, attention_s=0.0), 0.0)


def test_passes_of_an_engine_are_slowed_like_other_nodes() -> None:
    """eta = 1, one core: the second step's 16 passes (2 shards x 8 tokens) beside the first step's update of 16 s."""
    _, nodes = played(scenario(Queue({"update_policy": 16.0}), 1, eta=1))
    update, shard = nodes[Address("update_policy", 0)], nodes[Address("generate", 1, 1)]
    assert nodes[Address("generate", 0, 0)].finished_s == pytest.approx(8.0), "alone"
    assert update.started_s == pytest.approx(16.0)
    assert update.finished_s == shard.finished_s == pytest.approx(48.0)


@pytest.mark.parametrize("seed", range(10))
def test_fewer_cores_never_make_a_node_faster_and_enough_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    stages = ("generate", "score", "reference", "logprob", "value", "advantage", "update_policy", "update_critic")
    given = (FixedCosts if seed % 2 else Queue)({stage: draw.uniform(0.1, 4.0) for stage in stages}, overhead_s=0.05)
    threads, eta = {gang: draw.randint(1, 3) for gang in ONE_EACH}, draw.randint(0, 2)
    free = played(scenario(given, None, threads, eta))
    enough = played(scenario(given, sum(threads.values()), threads, eta))
    assert enough[0].published_s == pytest.approx(free[0].published_s, rel=1e-12)
    for cores in (1, 2):
        result, nodes = played(scenario(given, cores, threads, eta))
        again = play(scenario(given, cores, threads, eta))
        assert again.published_s == result.published_s
        for address, one in nodes.items():
            before = free[1][address]
            assert one.finished_s - one.started_s >= (before.finished_s - before.started_s) * (1 - 1e-9), address
        work_s = sum(
            threads.get(one.submit.gang, 0) * (one.finished_s - one.started_s)
            for address, one in free[1].items()
            if address.stage != "generate" or type(given) is FixedCosts
        )
        assert result.wall_s >= work_s / cores * (1 - 1e-9), "no more than these cores"


def test_the_work_of_recorded_nodes() -> None:
    """Two cores. A trainer of two threads works from 0 to 10 s, an engine of one from 4 to 8 s, with two shards that
    overlap: three threads at half the speed, as the trainer's wait for one another. The scorer counts for nothing."""

    def box(stage: str, gang: str, start: float, end: float, shard: int = 0) -> Box:
        return Box(Address(stage, 0, shard), gang, f"{gang}-0", 0, start, end, 0.0)

    boxes = [
        box("update_policy", "train", 0.0, 10.0),
        box("generate", "generate", 4.0, 7.0),
        box("generate", "generate", 5.0, 8.0, 1),
        box("score", "score", 0.0, 9.0),
    ]
    work = work_at(boxes, {"train": 2, "generate": 1}, 2)
    assert work[4.0].work == pytest.approx(4.0)
    assert (work[8.0] - work[5.0]).work == pytest.approx(1.5)
    assert work[10.0].work == pytest.approx(4.0 + 4.0 / 2 + 2.0)
    assert work[10.0].crowded == 0.0, "the trainer is on both cores"
    on_three = work_at(boxes, {"train": 2, "generate": 1}, 3)
    assert {t: done.work for t, done in on_three.items()} == {t: t for t in (0.0, 4.0, 5.0, 7.0, 8.0, 9.0, 10.0)}
    done = on_three[10.0] - on_three[5.0]
    assert done.crowded == pytest.approx(3.0 / 2), "of 5 s with two other cores, one of them was busy for 3 s"
    assert done.alone_s(0.2) == pytest.approx(5.0 - 0.2 * 1.5)
    assert work_at([], {}, 2) == {}


def test_a_clock_says_when_it_will_have_done_some_work() -> None:
    clock = SharedClock(2)
    clock.add(3, 0.0)
    clock.add(1, 0.0)
    assert clock.time_of(3.0) == pytest.approx(6.0)
    clock.add(-3, 2.0)
    assert clock.time_of(3.0) == pytest.approx(4.0)
    assert clock.advance(3.0) == pytest.approx(2.0)


def test_the_rate_of_nodes_that_share_cores() -> None:
    """Single threads share evenly. Of a wider node all threads wait for those on the fullest core."""
    assert shared_rate([], 2) == shared_rate([1, 1], 2) == shared_rate([2], 2) == 1
    assert shared_rate([1, 1, 1], 2) == pytest.approx(2 / 3)
    assert shared_rate([2, 1], 2) == pytest.approx(1 / 2)
    assert shared_rate([3, 1], 2) == pytest.approx(1 / 2)
    assert shared_rate([16, 1], 16) == pytest.approx(1 / 2)
    assert shared_rate([1.5, 1], 2) == pytest.approx(1 / (1.25 + 0.5 * 0.75))


def test_a_node_is_slower_while_other_cores_work() -> None:
    """Each loses a fifth of its speed while the other works: of 4 s of work one has done 2 when the other's 2 end."""
    given = scenario(FixedCosts({"update_policy": 4.0, "update_critic": 2.0}), 2)
    _, nodes = played(replace(given, crowding=0.2))
    assert nodes[Address("update_critic", 0)].finished_s == pytest.approx(2 / 0.8)
    assert nodes[Address("update_policy", 0)].finished_s == pytest.approx(2 / 0.8 + 2)
    assert busy_others([1, 1, 1], 4) == pytest.approx(2 / 3)
    assert busy_others([], 2) == busy_others([2, 2], 2) == busy_others([1, 1], 1) == 0


def test_threads_of_gangs() -> None:
    """Ranks work together, replicas each for itself; a scorer without models needs no cores."""
    gangs = "{generate: {workers: 3, threads: 2}, score: {threads: 4}, all: {workers: 2, threads: 3}}"
    roles = "{generate: generate, score: score, reference: all, policy: all, critic: all}"
    run = planned("tiny", f"placement.gangs={gangs}", f"placement.roles={roles}", on_gpus=False)
    assert working_threads(run.config, share=1.0) == {"generate": 2, "all": 6}
    assert working_threads(run.config, share=0.0) == {"generate": 1, "all": 2}
    assert thread_speedup(4, 0.8) == pytest.approx(1 / (0.2 + 0.8 / 4))
    assert scenario_of(costs("tiny", "1x3xcpu"), FixedLengths(4)).cores == 3
    assert scenario_of(costs("tiny", "2x3xcpu"), FixedLengths(4)).cores is None
    assert scenario_of(costs("tiny", "1x8xH100-80"), FixedLengths(4)).cores is None

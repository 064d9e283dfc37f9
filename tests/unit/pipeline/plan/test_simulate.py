"""Runs on a virtual clock: their times by hand, and what a real run did with the same durations."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pipeline.graph.graph import Gang, GraphSpec, Node, run_nodes
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import busy_periods, read_boxes, total_length
from pipeline.plan.decode import DecodeSpeed, RowQueue
from pipeline.plan.lengths import FixedLengths
from pipeline.plan.scenario import journal_events, trace_events
from pipeline.plan.simulate import Execution, Failures, Scenario, SimulationResult, Stragglers, play
from stages.models.protocol import Role
from storage.address import Address
from tests.support.fixed_costs import FixedCosts

TRAIN = Gang("train", frozenset({Role.POLICY, Role.CRITIC, Role.REFERENCE}), 2)
APART = (
    Gang("generate", frozenset({Role.GENERATE}), 1),
    Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
    TRAIN,
)
CHAIN = FixedCosts(
    {
        "generate": 4.0,
        "score": 1.0,
        "reference": 2.0,
        "logprob": 3.0,
        "value": 3.0,
        "advantage": 0.5,
        "update_policy": 5.0,
        "publish": 0.25,
        "update_critic": 6.0,
    }
)


def scenario(spec: GraphSpec, costs: FixedCosts = CHAIN, gangs: Sequence[Gang] = APART, rows: int = 2) -> Scenario:
    return Scenario(spec, gangs, costs, FixedLengths(8), rows)


def played_all(given: Scenario) -> tuple[SimulationResult, list[Execution]]:
    found: list[Execution] = []
    return play(given, found.append), found


def test_times_of_a_synchronous_run() -> None:
    """eta = 0. Step 0 ends 0.25 + 4 + (2 + 3 + 3) + 0.5 + 5 + 0.25 = 18 s after the start. In later steps the critic's
    update (6) delays the forward passes by 6 - 4 = 2 s, as generation hides the rest of it: 4 + 2 + 8 + 0.5 + 5.25."""
    played = play(scenario(GraphSpec(4, 1, 0)))
    assert played.step_s == pytest.approx([18.0, 19.75, 19.75, 19.75])
    assert played.steady_s == pytest.approx(19.75)
    assert played.staleness == {0: 8}


def test_times_with_a_staleness_of_one() -> None:
    """eta = 1: generation (4) hides behind training, so a step takes what the trainer does: 2 + 3 + 3 + 5 + 0.25 + 6 =
    19.25. The advantage (0.5) hides behind the next step's reference (2), except in the last step."""
    played = play(scenario(GraphSpec(6, 1, 1)))
    assert played.step_s[2:] == pytest.approx([19.25, 19.25, 19.25, 17.75])
    assert played.busy_s["train"] == pytest.approx(6 * 19.25 + 0.25)
    assert played.staleness == {0: 2, 1: 10}


def test_a_worker_computes_while_it_commits() -> None:
    """eta = 1, as above. The reference, the log-probs and the values are committed for half a second each. The trainer
    computes the next node meanwhile: 19.25 - 3 * 0.5. The busy seconds and the critical path count no second twice."""
    behind = dict.fromkeys(("reference", "logprob", "value"), 0.5)
    gangs = (*APART[:2], Gang("train", TRAIN.roles, 1))
    played, found = played_all(scenario(GraphSpec(6, 1, 1), replace(CHAIN, behind=behind), gangs))
    assert played.step_s[2:4] == pytest.approx([17.75, 17.75])
    assert played.busy_s["train"] == pytest.approx(6 * 17.75 + 0.25)
    assert sum(played.path_s.values()) == pytest.approx(played.wall_s)
    of_trainer = sorted((one for one in found if one.submit.gang == "train"), key=lambda one: one.started_s)
    overlaps = [before.finished_s - after.started_s for before, after in itertools.pairwise(of_trainer)]
    assert max(overlaps) == pytest.approx(0.5)


def test_overheads_delay_what_waits_for_them() -> None:
    """Synchronous and without a critic: publish, generate, reference, logprob, advantage, update: six nodes a step."""
    spec = GraphSpec(4, 1, 0, has_critic=False)
    plain = play(scenario(spec))
    late = play(scenario(spec, replace(CHAIN, overhead_s=0.1)))
    assert late.steady_s - plain.steady_s == pytest.approx(0.6)
    assert late.path_s["bookkeeping"] == pytest.approx(0.1 + 6 * 0.1 * 4)


@dataclass(frozen=True)
class QueueCosts(FixedCosts):
    """An engine of two places whose passes take a second, and a second for the store of a shard. Beside other shards of
    the worker the store takes `beside_s` longer."""

    beside_s: float = 0.0

    def engine_queue(self) -> RowQueue[Any]:
        return RowQueue(DecodeSpeed(2, 1e9, weights_s=1.0, context_s=0.0, token_s=0.0, attention_s=0.0), 0.0)

    def after_rows_s(self, *, beside: bool) -> float:
        return 1.0 + self.beside_s * beside


def test_shards_of_a_replica_are_one_queue_of_rows() -> None:
    """Two shards of two rows of 4 tokens, two places: the first is generated in 4 s and stored until 5, the second
    waits for places in its engine until 4. With one slot it waits for the store, too; on two replicas it does not."""
    ends = {}
    for name, gang in {
        "shared": Gang("generate", frozenset({Role.GENERATE}), 1, 2),
        "in turn": Gang("generate", frozenset({Role.GENERATE}), 1, 1),
        "apart": Gang("generate", frozenset({Role.GENERATE}), 2, 1),
    }.items():
        given = scenario(GraphSpec(1, 2, 0), QueueCosts(CHAIN.stages), (gang, *APART[1:]))
        _, found = played_all(replace(given, lengths=FixedLengths(4), rows_per_shard=2))
        ends[name] = [one.finished_s - 0.25 for one in found if one.submit.node.stage == "generate"]
    assert ends == {"shared": [5.0, 9.0], "in turn": [5.0, 10.0], "apart": [5.0, 5.0]}


@pytest.mark.parametrize(("slots", "ends"), [(2, [5.5, 9.5]), (1, [5.0, 10.0])])
def test_shards_of_a_worker_slow_each_other_s_stores(slots: int, ends: list[float]) -> None:
    """As above. With two slots the stores take half a second longer, with one slot they do not."""
    gang = Gang("generate", frozenset({Role.GENERATE}), 1, slots)
    given = scenario(GraphSpec(1, 2, 0), QueueCosts(CHAIN.stages, beside_s=0.5), (gang, *APART[1:]))
    _, found = played_all(replace(given, lengths=FixedLengths(4), rows_per_shard=2))
    assert [one.finished_s - 0.25 for one in found if one.submit.node.stage == "generate"] == ends


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_new_version_is_loaded_before_its_first_shard(in_flight: bool) -> None:
    """eta = 1, two slots: version 1 samples step 2, and is loaded (2 s) when the first shard needs it."""
    gang = Gang("generate", frozenset({Role.GENERATE}), 1, 2)
    costs = FixedCosts({"generate": 40.0, "publish": 1.0}, loading_s=2.0)
    given = replace(scenario(GraphSpec(3, 1, 1, has_critic=False), costs, (gang, *APART[1:])), in_flight=in_flight)
    _, found = played_all(given)
    generated = {one.submit.node.address.step: one for one in found if one.submit.node.stage == "generate"}
    assert [generated[step].submit.node.version for step in range(3)] == [0, 0, 1]
    assert generated[0].finished_s == generated[1].finished_s == 41.0  # side by side, from 1 s on
    assert generated[2].started_s == 42.0  # when version 1 is published
    assert generated[2].finished_s == 84.0


def test_an_engine_that_drains_holds_newer_shards_back() -> None:
    """`latest`, eta = 1, one shard a step, 2 slots; generate[1] takes three times as long as the others."""

    class Slow(FixedCosts):
        def seconds(self, node: Node) -> float:
            slow = 3.0 if node.address == Address("generate", 1) else 1.0
            return slow * super().seconds(node)

    gang = Gang("generate", frozenset({Role.GENERATE}), 1, 2)
    costs = Slow({"generate": 10.0, "publish": 1.0})
    spec = GraphSpec(3, 1, 1, has_critic=False, uses_latest=True)
    starts = {}
    for in_flight in (False, True):
        given = replace(scenario(spec, costs, (gang, *APART[1:])), in_flight=in_flight)
        starts[in_flight] = next(one.started_s for one in played_all(given)[1] if one.submit.node.address.step == 2)
    # generate[0] 1..11, generate[1] 1..31, version 1 at 12: a free slot for generate[2] since 11
    assert starts == pytest.approx({False: 31.0, True: 12.0})


def test_gangs_that_share_devices_wait_for_one_another() -> None:
    """eta = 0 on the same devices: two hand-overs a step, each 1.5 s of the engine and 0.5 s of the trainer. Nothing of
    the trainer's overlaps with generation: 4 + 8 + 0.5 + 5.25 + 6 (the critic) + 2 * 2."""
    shared = replace(
        scenario(GraphSpec(4, 1, 0)),
        device_sharing=[["generate", "train"]],
        hand_over_s={"generate": 1.5, "train": 0.5},
    )
    played = play(shared)
    assert played.step_s[1:] == pytest.approx([27.75] * 3)
    assert played.path_s["hand over"] == pytest.approx(7 * 2 + 2)


def test_the_critical_path_fills_the_whole_time() -> None:
    played, found = played_all(scenario(GraphSpec(5, 3, 1, eval_every=2, has_canaries=True)))
    assert math.fsum(played.path_s.values()) == pytest.approx(played.wall_s)
    assert played.critical_path[-1].finished_s == played.wall_s == max(one.finished_s for one in found)
    for before, after in itertools.pairwise(played.critical_path):
        assert after.cause is before
        assert before.finished_s <= after.started_s


def test_every_node_runs_once_after_its_parents() -> None:
    spec = GraphSpec(5, 3, 2, eval_every=2, eval_shards=2, has_canaries=True, uses_latest=True)
    _, found = played_all(scenario(spec, replace(CHAIN, overhead_s=0.01)))
    ends = {one.submit.node.address: one.finished_s for one in found}
    assert sorted(ends) == sorted(node.address for node in run_nodes(spec))
    assert len(found) == len(ends)
    for one in found:
        assert all(ends[parent] <= one.started_s for parent in one.submit.node.parents)


# ---- chance ------------------------------------------------------------------------------------------------------


def test_the_seed_decides_which_nodes_straggle() -> None:
    spec = GraphSpec(20, 4, 1)
    given = replace(scenario(spec), stragglers=Stragglers(0.25, 3.0))
    slow: list[set[Address]] = []
    for seed in (1, 1, 2):
        _, found = played_all(replace(given, seed=seed))
        generated = [one for one in found if one.submit.node.stage == "generate"]
        seconds = {one.submit.node.address: one.finished_s - one.started_s for one in generated}
        assert {round(s, 6) for s in seconds.values()} == {4.0, 12.0}
        slow.append({address for address, s in seconds.items() if s > 5})
    assert slow[0] == slow[1] != slow[2]
    assert 8 <= len(slow[0]) <= 32  # of 80, 20 are expected


def test_failures_cost_their_rebuild_and_the_updates_since_a_checkpoint() -> None:
    """All steps are still trained; rarer checkpoints repeat more updates."""
    given = scenario(GraphSpec(60, 2, 1))
    plain = play(given)
    lost = {every: play(replace(given, failures=Failures(60.0, 30.0, every), seed=3)) for every in (1, 10)}
    for one in lost.values():
        assert one.failures > 5
        assert len(one.published_s) == 61
        assert one.wall_s > plain.wall_s
    assert lost[1].replayed_s == 0
    assert lost[10].replayed_s > 0
    assert lost[10].wall_s > lost[1].wall_s
    again = play(replace(given, failures=Failures(60.0, 30.0, 10), seed=3))
    assert again.published_s == lost[10].published_s


ALONE = tuple(Gang(str(role), frozenset({role}), 1) for role in Role)
FORWARD = ("score", "reference", "logprob", "value")


@pytest.mark.parametrize("gangs", [ALONE, APART], ids=["a gang per role", "roles on one gang"])
def test_more_staleness_is_never_slower_when_weights_move_freely(gangs: Sequence[Gang]) -> None:
    """For any seconds of the stages, if every role has a gang. On a gang of several roles, a node of a step ahead that
    has begun is not interrupted, so each step may wait for one such node."""
    draw = random.Random(11)
    for _ in range(25):
        stages = {stage: draw.uniform(0.1, 5.0) for stage in CHAIN.stages} | {"publish": 0.0}
        shards, steps = draw.choice((1, 2, 3)), 12
        walls = [play(scenario(GraphSpec(steps, shards, eta), FixedCosts(stages), gangs)).wall_s for eta in range(4)]
        waits = 0.0 if gangs is ALONE else steps * max(stages[stage] for stage in FORWARD)
        for tighter, looser in itertools.pairwise(walls):
            assert looser <= (tighter + waits) * (1 + 1e-9), stages


def calls_of_a_node(steps: int, shards: int, ranks: int) -> float:
    """Calls of functions per simulated node."""
    gang, spec = Gang("generate", frozenset({Role.GENERATE}), 2, 2), GraphSpec(steps, shards, 1)
    given = scenario(spec, replace(CHAIN, overhead_s=0.01), (gang, APART[1], replace(TRAIN, workers=ranks)))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        play(given)
    finally:
        sys.setprofile(None)
    return calls / sum(1 for _ in run_nodes(spec))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_node_costs_as_much_in_a_long_run_and_among_many_shards(ranks: int) -> None:
    """So a simulation, and the driver's part of a run, take time in proportion to steps and shards."""
    few = calls_of_a_node(10, 4, ranks)
    assert calls_of_a_node(40, 4, ranks) < 1.02 * few
    assert calls_of_a_node(10, 32, ranks) < 1.05 * few


# ---- records -----------------------------------------------------------------------------------------------------


def test_the_folds_of_the_report_read_a_simulated_journal() -> None:
    played, found = played_all(scenario(GraphSpec(4, 3, 1, eval_every=2)))
    events = [Event.from_json(event.to_json()) for event in journal_events(found)]
    busy = {gang: total_length(periods) for gang, periods in busy_periods(read_boxes(events)).items()}
    assert busy == pytest.approx(dict(played.busy_s))
    assert [event.t for event in events if event.kind is EventKind.PUBLISHED] == played.published_s


def test_a_trace_has_every_node_on_a_lane_of_its_own() -> None:
    gang = Gang("generate", frozenset({Role.GENERATE}), 1, 2)
    played, found = played_all(scenario(GraphSpec(2, 2, 1), gangs=(gang, *APART[1:])))
    events = json.loads(json.dumps(trace_events(found, played.critical_path)))
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(found)
    assert sum(event["args"]["critical path"] for event in spans) == len(played.critical_path)
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for event in spans:
        by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in by_lane.values():
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(sorted(lane)))

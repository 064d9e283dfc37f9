"""The search for plans: its result is that of playing every combination, and no pruning loses it."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

import pipeline.plan.options
import pipeline.plan.space
from pipeline.config.hardware import HardwareCluster, load_hardware
from pipeline.config.loading import load_config
from pipeline.config.memory import planned_run
from pipeline.config.preflight import check_shapes
from pipeline.errors import ConfigError
from pipeline.plan.calibration import KINDS, StageSpeed, typical
from pipeline.plan.lengths import FixedLengths, SameLengths
from pipeline.plan.search import Objective, combinations, played_plan, search
from pipeline.plan.space import Space, device_counts, role_groupings, space_of
from stages.engines.config import EngineConfig
from tests.support.paths import TINY, TINY_PROMPTS

H100 = "H100-80"


def space(devices: int, *changes: str, file: str = str(TINY), hardware: str = H100) -> Space:
    config = load_config([file], [f"prompts.url={TINY_PROMPTS}", *changes])
    loaded, on_gpus = load_hardware(hardware), hardware == H100
    if on_gpus:
        nodes = max(1, devices // loaded.gpus_per_node)
        cluster = HardwareCluster(nodes, min(devices, loaded.gpus_per_node), loaded)
    else:
        cluster = HardwareCluster(1, 0, loaded, devices)
    run = planned_run(config, check_shapes(config, on_gpus=on_gpus), on_gpus=on_gpus)
    lengths = FixedLengths(config.sampling.max_new_tokens)
    return space_of(run, cluster, typical(hardware, on_gpus=on_gpus), lengths, devices)


def random_space(draw: random.Random, devices: int, hardware: str = H100) -> Space:
    """A tiny model on devices that are a thousand times slower, so that no fixed cost hides its arithmetic."""
    changes = (
        ["ppo.advantage=group", "ppo.kl.where=loss", "rollout.responses_per_prompt=4"] if draw.random() < 0.5 else []
    )
    found = space(devices, f"rollout.shards={draw.choice((1, 2, 4))}", *changes, hardware=hardware)
    speeds = {
        kind: StageSpeed(
            10 ** draw.uniform(-5, -3), call_s=10 ** draw.uniform(-4, -2), node_s=10 ** draw.uniform(-3, -1)
        )
        for kind in KINDS
    }
    calibration = replace(found.calibration, overhead_s=10 ** draw.uniform(-4, -1.5), **speeds)
    tokens = SameLengths([draw.randint(1, 8) for _ in range(16)])
    shards = found.shards[-1:]
    return replace(found, calibration=calibration, lengths=tokens, shards=shards, staleness=(0, 1))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.plan.space, "STEPS", 5)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(("hardware", "seed"), [*((H100, seed) for seed in range(20)), *(("cpu", n) for n in range(5))])
def test_the_search_finds_what_playing_everything_finds(
    hardware: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = 3 if seed % 4 == 0 and hardware == H100 else 2
    given = random_space(random.Random(seed), devices, hardware)
    objective = Objective(per_device=seed % 3 == 0, staleness_price=0.1 * (seed % 2))
    found = search(given, objective, lambda config: None, most=10**6)
    monkeypatch.setattr(pipeline.plan.options, "pareto", list)  # nothing is pruned
    every = [played_plan(given, objective, one) for one in combinations(given)[0]]
    assert found.exact
    assert found.simulated <= len(every)
    assert found.plans[0].value == pytest.approx(min(plan.value for plan in every), rel=1e-9)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hardware", [H100, "cpu"])
def test_no_play_is_shorter_than_its_bounds(hardware: str, seed: int) -> None:
    given = random_space(random.Random(100 + seed), 2, hardware)
    for one in combinations(given)[0]:
        assert played_plan(given, Objective(), one).result.mean_s >= one.bound_s * (1 - 1e-9)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("seed", range(4))
def test_more_devices_never_cost_a_plan_more(seed: int) -> None:
    values = []
    for devices in (1, 2, 3):
        given = replace(random_space(random.Random(200 + seed), 3), devices=devices)
        values.append(search(given, Objective(), lambda config: None, most=10**6).plans[0].value)
    assert values[0] >= values[1] >= values[2]


def test_only_an_engine_that_can_free_its_devices_shares_them() -> None:
    config = load_config([str(TINY)], [f"prompts.url={TINY_PROMPTS}"])
    for engine, shares in ((EngineConfig(), True), (EngineConfig(kind="vllm"), False)):
        assert any(grouping.shares_devices for grouping in role_groupings(replace(config, engine=engine))) is shares


@pytest.mark.usefixtures("few_steps")
def test_a_search_reports_every_simulation() -> None:
    texts: list[str] = []
    found = search(random_space(random.Random(1), 2), Objective(), lambda config: None, watch=texts.append)
    assert sum("simulating" in text for text in texts) == found.simulated


@pytest.mark.usefixtures("few_steps")
def test_a_price_of_staleness_can_make_a_synchronous_plan_the_best() -> None:
    """A version of staleness that costs ten times the samples outweighs any time that it hides."""
    given = random_space(random.Random(3), 2)
    dear = search(given, Objective(staleness_price=10.0), lambda config: None).plans
    assert dear[0].config.staleness == 0
    free = {
        (plan.grouping, plan.config.staleness): plan for plan in search(given, Objective(), lambda config: None).plans
    }
    for plan in dear:
        if plan.config.staleness:
            assert plan.value > free[plan.grouping, plan.config.staleness].value


@pytest.mark.usefixtures("few_steps")
def test_gangs_on_a_host_may_have_more_threads_than_it_has_cores() -> None:
    given = random_space(random.Random(4), 2, "cpu")
    of_gangs = {
        tuple((option.gang, option.settings.threads) for option in one.options): one.devices
        for one in combinations(given)[0]
    }
    assert of_gangs[("generate", 1), ("train", 2), ("reference", 1)] == 2
    assert ((("generate", 2), ("train", 2), ("reference", 2))) not in of_gangs  # more than twice the cores


def test_the_numbers_of_devices_of_few_are_among_those_of_more() -> None:
    assert device_counts(4, 8) == [1, 2, 3, 4]
    assert device_counts(16, 8) == [8, 16]
    assert device_counts(64, 8) == [8, 16, 24, 32, 48, 64]
    for fewer, more in ((8, 8), (16, 64), (64, 512)):
        assert set(device_counts(fewer, 8)) <= set(device_counts(more, 8))


@pytest.mark.usefixtures("few_steps")
def test_a_bounded_search_says_so() -> None:
    found = search(random_space(random.Random(1), 3), Objective(), lambda config: None, most=1)
    assert not found.exact
    assert found.simulated < found.considered  # one of each grouping and bound


@pytest.mark.usefixtures("few_steps")
def test_refused_plans_are_left_out_with_their_reason() -> None:
    given = random_space(random.Random(2), 2)
    found = search(given, Objective(), lambda config: "no sharing" if config.placement.device_sharing else None)
    assert {plan.grouping for plan in found.plans} == {"apart"}
    assert found.refused["no sharing"] > 0
    numbers = itertools.count()
    with pytest.raises(ConfigError, match=r"refused: often; never 0; never 2; and \d+ other reasons$"):
        search(given, Objective(), lambda config: "often" if (n := next(numbers)) in (1, 3) else f"never {n}")


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("per_device", [False, True])
def test_more_nodes_are_no_worse_than_one(per_device: bool) -> None:
    """A small run: one node is enough. On several a gang has whole nodes, so what fits on a part of one is found by the
    search on one node."""
    objective, values = Objective(per_device), []
    for nodes in (1, 2, 4):
        values.append(search(space(8 * nodes), objective, lambda config: None, most=5).plans[0].value)
    assert values == sorted(values, reverse=True)


@pytest.mark.usefixtures("few_steps")
def test_of_equal_plans_the_one_with_less_staleness_comes_first() -> None:
    plans = search(random_space(random.Random(3), 2), Objective(), lambda config: None).plans
    assert {plan.config.staleness for plan in plans} == {0, 1}
    equal = [replace(plan, value=1.0 + 1e-9 * plan.config.staleness, devices=2) for plan in plans]
    first, last = min(equal, key=lambda plan: plan.rank), max(equal, key=lambda plan: plan.rank)
    assert (first.config.staleness, last.config.staleness) == (0, 1)
    assert min([*equal, replace(last, value=0.9)], key=lambda plan: plan.rank).value == 0.9


def test_a_model_that_fits_nowhere_is_refused_with_what_would_hold_it() -> None:
    given = space(2, "model.path=conf/model/llama-3.1-70b", "model.dtype=bfloat16", "engine.dtype=bfloat16")
    with pytest.raises(ConfigError) as refusal:
        search(replace(given, shards=given.shards[:1]), Objective(), lambda config: None)
    assert refusal.value.key == "--devices"
    assert "train" in str(refusal.value)
    (least,) = map(int, re.findall(r"it would fit on (\d+), with", str(refusal.value)))
    assert least % 8 == 0
    for devices, fits in ((least - 8, False), (least, True)):
        cluster = replace(given.cluster, nodes=devices // 8, gpus_per_node=8)
        larger = replace(given, devices=devices, cluster=cluster, shards=given.shards[:1])
        if fits:
            assert combinations(larger)[0]
        else:
            with pytest.raises(ConfigError):
                combinations(larger)

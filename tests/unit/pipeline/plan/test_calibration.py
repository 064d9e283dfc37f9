"""Calibrations: files, scaling, and fits to nodes whose speeds are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.hardware import read_cluster
from pipeline.errors import ConfigError
from pipeline.graph.graph import run_nodes
from pipeline.plan.calibrate import FEWEST_STEPS, Measurement, calibrate, compared, fit
from pipeline.plan.calibration import (
    KINDS,
    STAGE_KIND,
    STEP_SECONDS,
    Calibration,
    StageSpeed,
    check_hardware,
    load_calibration,
    scaled,
    to_yaml,
    typical,
)
from pipeline.plan.cores import WorkDone
from pipeline.plan.cost import costs_of
from pipeline.plan.observed import DraftedPasses, Observed, ObservedRun
from tests.support.paths import ROOT
from tests.support.plans import costs, nodes_by_stage, planned

CLUSTER = read_cluster("1xcpu")
TRUE = Calibration(
    description="the truth",
    hardware="cpu",
    generate=StageSpeed(0.2, call_s=0.004, node_s=0.05),
    forward=StageSpeed(0.4, call_s=0.003, node_s=0.02),
    update=StageSpeed(0.3, call_s=0.005, node_s=0.03),
    publish=StageSpeed(0.5, node_s=0.01),
    refit=StageSpeed(0.5, node_s=0.03),
    score=StageSpeed(1.0, call_s=0.001, node_s=0.02),
    advantage=StageSpeed(1.0, call_s=0.0001, node_s=0.02),
    link_efficiency=0.7,
)


def executed(
    name: str,
    *changes: str,
    scatter: float,
    steps: int = 6,
    gpu: str = "",
    processor: str = "avx2",
    truth: Calibration = TRUE,
    drafted: DraftedPasses | None = None,
) -> ObservedRun:
    """A run of the tiny model with the true speeds and random noise of mean 1."""
    run = planned("tiny", f"steps={steps}", *changes, on_gpus=False)
    true, draw = costs_of(run, CLUSTER, truth, 12.0), random.Random(name)
    config, nodes, clock = run.config, list[Observed](), 0.0
    for node in run_nodes(config.graph()):
        rows = config.rollout.rows if STAGE_KIND[node.stage] in ("update", "advantage") else config.rows_per_shard
        lengths = [draw.randint(1, config.sampling.max_new_tokens) for _ in range(rows)]
        noise = draw.lognormvariate(-(scatter**2) / 2, scatter)
        seconds = noise * true.seconds(node, [] if node.stage == "publish" else lengths)
        nodes.append(Observed(node, seconds, [] if node.stage == "publish" else lengths, "one", clock))
        clock += seconds + 1.0
    waits, refits = [0.01, 0.02, 0.09], [WorkDone(true.refit_s())] * steps
    return ObservedRun(name, run, nodes, waits, refits, steps, 12.0, drafted, gpu, processor)


def runs(scatter: float) -> list[ObservedRun]:
    large = ("rollout={rows: 256, shards: 2}", "sampling.max_new_tokens=200", "ppo={epochs: 2, minibatches: 1}")
    return [executed("one", scatter=scatter), executed("two", *large, scatter=scatter)]


def test_known_speeds_are_found_again() -> None:
    """Another run, of another size, is predicted within the noise of what it was calibrated on."""
    found = calibrate(runs(0.1), CLUSTER, "cpu")
    assert found.overhead_s == pytest.approx(0.04), "the mean of the waits"
    other = executed("other", "rollout={rows: 64, shards: 4}", "sampling.max_new_tokens=60", scatter=0.0)
    for stage, measured, predicted, _ in compared([other], CLUSTER, found):
        assert predicted == pytest.approx(measured, rel=0.15), stage
    for kind in ("generate", "forward", "update"):
        speed: StageSpeed = getattr(found, kind)
        assert speed.scatter == pytest.approx(0.1, abs=0.05)
        assert speed.nodes > 10


def test_the_runs_themselves_are_predicted() -> None:
    given = runs(0.2)
    for stage, measured, predicted, number in compared(given, CLUSTER, calibrate(given, CLUSTER, "cpu")):
        assert predicted == pytest.approx(measured, rel=0.2), stage
        assert number >= 1


def test_drafts_are_those_of_the_runs_that_made_some() -> None:
    """Two runs of three drafted; the means are theirs. A config without a drafter has none of them."""
    speculating = "engine.embedded.speculation.drafter=ngram"
    observed = [executed("one", scatter=0.0)]
    for passes in (DraftedPasses(1.5, 1.0), DraftedPasses(2.5, 4.0)):
        truth = replace(TRUE, tokens_per_pass=passes.tokens_per_pass, drafts_per_pass=passes.drafts_per_pass)
        observed.append(executed(f"drafted-{passes}", speculating, scatter=0.0, truth=truth, drafted=passes))
    found = calibrate(observed, CLUSTER, "cpu")
    assert (found.tokens_per_pass, found.drafts_per_pass) == (2.0, 2.5)
    assert found.generate.scatter == pytest.approx(0.0, abs=0.02), "one speed explains the passes of all three"
    for changes, fed in ([], 1.0), ([speculating], 3.5):
        assert costs_of(planned("tiny", *changes, on_gpus=False), CLUSTER, found, 12.0).engine.fed_per_pass == fed


def test_a_term_that_was_taken_for_small_may_be_large() -> None:
    """Three kinds of passes, with other shares of element-wise operations. A node has 15 ms of fixed costs, of which
    one was assumed."""
    works = [(0.140, 0.030), (0.044, 0.020), (0.008, 0.001)] * 9
    nodes = [Measurement("forward", r / 0.8 + e / 0.5 + 0.015, r, 0.0, e) for r, e in works]
    found, _ = fit(nodes, StageSpeed(0.3, 0.3, call_s=0.001, node_s=0.001))
    assert (found.efficiency, found.element_efficiency) == pytest.approx((0.8, 0.5), rel=0.05)
    assert found.node_s == pytest.approx(0.015, rel=0.05)


def test_a_stalled_node_counts_less() -> None:
    """One of many generations takes 100 times as long."""
    (given,) = (executed("one", scatter=0.05, steps=12),)
    place = next(i for i, one in enumerate(given.nodes) if one.node.stage == "generate")
    nodes = list(given.nodes)
    nodes[place] = replace(nodes[place], seconds=100 * nodes[place].seconds)
    sound, stalled = (calibrate([replace(given, nodes=n)], CLUSTER, "cpu").generate for n in (given.nodes, nodes))
    usual = costs("tiny", "1xcpu", calibration=replace(TRUE, generate=sound))
    node = nodes_by_stage(usual)["generate"]
    other = replace(usual, calibration=replace(TRUE, generate=stalled))
    assert other.seconds(node, [6] * 8) < 1.5 * usual.seconds(node, [6] * 8)


CALLS_COST = replace(TRUE, forward=StageSpeed(0.25, call_s=0.010, node_s=0.004))
"""A machine on which a micro-batch costs more than a node."""


def with_stores(one: ObservedRun) -> ObservedRun:
    """The run with the seconds on the store of each node: the true cost of a node of its kind."""
    stored = [replace(node, store_s=getattr(CALLS_COST, STAGE_KIND[node.node.stage]).node_s) for node in one.nodes]
    return replace(one, nodes=stored)


def test_measured_seconds_on_the_store_tell_calls_from_nodes() -> None:
    """A node of short rows with one micro-batch, and of long rows with four: two kinds of nodes, three unknown numbers.
    The store's seconds are most of one of them, so that four micro-batches of short rows are predicted better."""
    few, many = ("rollout={rows: 16, shards: 2}", "rollout={rows: 64, shards: 2}")
    given = [
        executed("few", few, scatter=0.0, truth=CALLS_COST),
        executed("many", many, "sampling.max_new_tokens=48", scatter=0.0, truth=CALLS_COST),
    ]
    other, errors = executed("other", many, scatter=0.0, truth=CALLS_COST), []
    for runs_given in ([with_stores(one) for one in given], given):
        found = compared([other], CLUSTER, calibrate(runs_given, CLUSTER, "cpu"))
        errors.append(max(abs(predicted / of - 1) for stage, of, predicted, _ in found if stage == "reference"))
    assert errors[0] < 0.8 * errors[1]


def test_stores_beside_other_shards_are_told_from_stores_alone() -> None:
    """Stores take 5 ms; beside other shards of the worker 20 ms, and the shard as much longer."""
    one, nodes = executed("one", "rollout.shards=4", scatter=0.0), []
    for node in one.nodes:
        beside = node.node.stage == "generate" and node.node.address.shard < 2
        store_s = 0.020 if beside else 0.005
        nodes.append(replace(node, store_s=store_s, beside=beside, seconds=node.seconds + 0.015 * beside))
    found = calibrate([replace(one, nodes=nodes)], CLUSTER, "cpu")
    assert found.beside_s == pytest.approx(0.015)
    (shards,) = (c for c in compared([replace(one, nodes=nodes)], CLUSTER, found) if c[0] == "generate")
    assert shards[2] == pytest.approx(shards[1], rel=0.05)
    without = [replace(node, beside=False, store_s=0.005) for node in one.nodes]
    assert calibrate([replace(one, nodes=without)], CLUSTER, "cpu").beside_s == 0.0


def test_nodes_beside_busy_cores_tell_how_much_they_are_slowed() -> None:
    """Every second node of a trainer ran beside an engine, and did 4/5 of its work in the same time."""
    one, nodes = executed("one", scatter=0.05, steps=20), []
    for node in one.nodes:
        beside = node.node.address.step % 2 == 0
        seconds = node.seconds / 0.8 if beside else node.seconds
        nodes.append(replace(node, seconds=seconds, crowded_s=seconds * beside))
    crowded = replace(one, nodes=nodes)
    found = calibrate([crowded], CLUSTER, "cpu")
    assert found.crowding == pytest.approx(0.2, abs=0.02)
    always = replace(one, nodes=[replace(node, crowded_s=0.9 * node.seconds) for node in one.nodes])
    assert calibrate([always], CLUSTER, "cpu").crowding == 0.0, "nothing tells it from slower cores"
    totals = {stage: (measured, predicted) for stage, measured, predicted, _ in compared([crowded], CLUSTER, found)}
    measured, predicted = totals["update_policy"]
    assert predicted == pytest.approx(measured, rel=0.05)
    assert measured == pytest.approx(sum(of.seconds for of in one.nodes if of.node.stage == "update_policy"), rel=0.02)


def test_turnarounds_count_to_nodes_and_not_to_waits() -> None:
    """The waits of 0.04 s begin with the turnaround of 0.01 s, which is a part of the node that ended."""
    (given,) = (replace(executed("one", scatter=0.0), turnarounds=[0.01] * 5),)
    found = calibrate([given], CLUSTER, "cpu")
    assert found.turnaround_s == pytest.approx(0.01)
    assert found.overhead_s == pytest.approx(0.03)
    node = nodes_by_stage(costs("tiny", "1xcpu"))["reference"]
    with_and_without = [costs("tiny", "1xcpu", calibration=replace(TRUE, turnaround_s=s)) for s in (0.01, 0.0)]
    late, plain = (of.seconds(node, [6] * 8) for of in with_and_without)
    assert late - plain == pytest.approx(0.01)


def test_what_equal_nodes_cannot_tell_is_named() -> None:
    """All responses of one run have one token; runs with other lengths tell passes from nodes."""
    alike = executed("one", "sampling={max_new_tokens: 1}", scatter=0.01)
    assert "generate" in calibrate([alike], CLUSTER, "cpu").extrapolated
    assert "generate" not in calibrate(runs(0.01), CLUSTER, "cpu").extrapolated


@pytest.mark.parametrize(
    "given",
    [
        [executed("short", scatter=0.0, steps=FEWEST_STEPS - 1)],
        [executed("here", scatter=0.0), executed("there", scatter=0.0, processor="avx512f")],
        [executed("twice", scatter=0.0), executed("twice", scatter=0.0)],
        [replace(executed("no journal", scatter=0.0), nodes=[])],
        [executed("gpus", scatter=0.0, gpu="NVIDIA H100 80GB HBM3")],
    ],
    ids=[
        "a run that is too short",
        "runs on two machines",
        "a run given twice",
        "a run without nodes",
        "a run on GPUs for a node without",
    ],
)
def test_runs_that_cannot_be_used_are_refused(given: Sequence[ObservedRun]) -> None:
    with pytest.raises(ConfigError) as caught:
        calibrate(given, CLUSTER, "cpu")
    assert caught.value.key == given[-1].name


def test_a_gpu_of_another_kind_is_refused() -> None:
    one = executed("one", scatter=0.0, gpu="NVIDIA A100-SXM4-80GB (capability 8.0)")
    one = replace(one, run=replace(one.run, on_gpus=True))
    with pytest.raises(ConfigError):
        calibrate([one], read_cluster("1x8xH100-80"), "H100-80")
    assert calibrate([one], read_cluster("1x8xA100-80"), "A100-80").hardware == "A100-80"


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    file.write_text(to_yaml(calibrate(runs(0.1), CLUSTER, "cpu")))
    assert load_calibration(file) == calibrate(runs(0.1), CLUSTER, "cpu")


@pytest.mark.parametrize(
    "changed",
    ["efficiency: 1.5", "efficiency: 0.0", "call_s: -1.0", "speed: 1.0", "tokens_per_pass: 1.5", "store_s: 0.1"],
)
def test_a_file_with_a_wrong_number_is_refused(tmp_path: Path, changed: str) -> None:
    file = tmp_path / "here.yaml"
    kinds = "".join(f"{kind}: {{{changed if kind == 'generate' else ''}}}\n" for kind in KINDS)
    file.write_text(f"description: x\nhardware: cpu\n{kinds}")
    with pytest.raises(ConfigError) as caught:
        load_calibration(file)
    assert caught.value.key == f"--calibration {file}: generate.{changed.partition(':')[0]}"


def test_another_file_is_refused_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it describes hardware"):
        load_calibration(ROOT / "conf/hardware/cpu.yaml")
    with pytest.raises(ConfigError, match="it is a directory"):
        load_calibration(tmp_path)


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    file.write_text(to_yaml(calibrate(runs(0.1), CLUSTER, "cpu")).partition("score:")[0])
    with pytest.raises(ConfigError, match="lacks score, advantage"):
        load_calibration(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_calibration(tmp_path / "none.yaml")


def test_a_calibration_of_other_hardware_is_refused() -> None:
    check_hardware(TRUE, "cpu")
    with pytest.raises(ConfigError):
        check_hardware(TRUE, "H100-80")


def test_a_published_step_time_scales_everything() -> None:
    assumed = typical("H100-80", on_gpus=True)
    whole, twice = (
        costs("slurm_70b", "16x8xH100-80", calibration=calibration)
        for calibration in (assumed, scaled(assumed, 10.0, 20.0, "a published step"))
    )
    for stage, node in nodes_by_stage(whole).items():
        lengths = [] if stage == "publish" else [100] * 64
        assert twice.seconds(node, lengths) == pytest.approx(2 * whole.seconds(node, lengths)), stage
    assert twice.calibration.overhead_s == 2 * assumed.overhead_s
    assert twice.refit_s() == pytest.approx(2 * whole.refit_s())
    shares = [[getattr(of, kind).efficiency for kind in KINDS] for of in (twice.calibration, assumed)]
    assert [2 * share for share in shares[0]] == pytest.approx(shares[1])


def test_a_step_time_that_no_hardware_reaches_is_refused() -> None:
    """The highest assumed efficiency is 0.7 (links), the lowest 0.45 (arithmetic). A step of 10 s can be scaled down to
    7 s, where links reach their peak, and up to 450 s, where arithmetic is at 1 % of its peak."""
    assumed = typical("H100-80", on_gpus=True)
    assert scaled(assumed, 10.0, 7.01, "fast").link_efficiency == pytest.approx(0.7 / 0.701)
    assert scaled(assumed, 10.0, 449.0, "slow").update.efficiency == pytest.approx(0.45 / 44.9)
    for seconds in (6.99, 451.0, 1e9):
        with pytest.raises(ConfigError, match=STEP_SECONDS):
            scaled(assumed, 10.0, seconds, "a step")


def test_nodes_that_only_store_fit_and_tell_nothing_apart() -> None:
    """On a busy machine the store of a short shard may take as long as the shard is measured to."""
    samples = [Measurement("generate", t, 0.01 * t, 2.0 + i, store_s=t) for i, t in enumerate((0.1, 0.2, 0.15, 0.12))]
    speed, distinct = fit(samples, typical("cpu", on_gpus=False).generate)
    assert not distinct
    assert (speed.call_s, speed.node_s) == (0.0, pytest.approx(0.1425))

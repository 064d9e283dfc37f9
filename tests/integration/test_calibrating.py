"""`stageline calibrate` on a run that happened."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pipeline.cli.answers import BAD_INPUT, SUCCESS
from pipeline.cli.calibrate import read_observed_run
from pipeline.cli.main import main
from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from pipeline.plan.calibration import KINDS, STAGE_KIND, load_calibration
from storage.address import Address
from tests.support.runs import QUIET, finish_in

STEPS = 5


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return finish_in(tmp_path_factory.mktemp("calibrate"), "small", f"steps={STEPS}", *QUIET)


def test_all_nodes_but_the_first_of_each_stage_on_a_worker_are_observed(config: RunConfig) -> None:
    """Every gang has one worker here."""
    found = read_observed_run(str(config.run_dir), read_cluster("1xcpu"))
    every = [node.address for node in run_nodes(config.graph())]
    seen = {one.node.address for one in found.nodes}
    for stage in STAGE_KIND:
        of_stage = {address for address in every if address.stage == stage}
        left_out = 2 if stage == "publish" else 1  # the last publication also writes the export
        assert len(of_stage & seen) == max(0, len(of_stage) - left_out), stage
    assert found.steps == STEPS
    assert all(one.seconds >= 0 for one in found.nodes)
    assert all(wait >= 0 for wait in found.waits)


def test_nodes_beside_busy_cores_are_observed_as_crowded(config: RunConfig) -> None:
    """On two cores the engine of the next step works beside the trainer. Without it both would have ended sooner."""
    found = read_observed_run(str(config.run_dir), read_cluster("1x2xcpu"))
    alone = found.alone(0.5)
    kinds = {STAGE_KIND[one.node.stage] for one in found.nodes if one.crowded_s > 0}
    assert kinds >= {"generate", "update"}
    for one, by_itself in zip(found.nodes, alone.nodes, strict=True):
        assert -1e-9 <= one.crowded_s <= one.seconds + 1e-9, one.node.address
        assert by_itself.seconds == pytest.approx(one.seconds - one.crowded_s / 2)
        assert by_itself.start_s == pytest.approx(one.start_s - one.start_crowded_s / 2)
    assert any(refit.crowded > 0 for refit in found.refits)
    assert all(after.work <= before.work for after, before in zip(alone.refits, found.refits, strict=True))
    of_stage = [one for one in found.nodes if one.node.stage == "update_policy"]
    for one, later in itertools.pairwise(sorted(of_stage, key=lambda one: one.start_s)):
        assert one.start_crowded_s + one.crowded_s <= later.start_crowded_s + 1e-9, "the clock goes on between nodes"


def test_a_node_is_observed_with_the_lengths_of_its_rows(config: RunConfig) -> None:
    found = {one.node.address: one for one in read_observed_run(str(config.run_dir), read_cluster("1xcpu")).nodes}
    store, last = open_history(config).store, STEPS - 1
    shards = [store.read(Address("generate", last, shard)).response_lengths.tolist() for shard in range(2)]
    assert [found[Address("generate", last, shard)].lengths for shard in range(2)] == shards
    assert found[Address("logprob", last, 1)].lengths == shards[1]
    assert found[Address("update_policy", last)].lengths == [*shards[0], *shards[1]]
    assert found[Address("publish", last)].lengths == []


def test_the_command_writes_what_simulate_reads(config: RunConfig, tmp_path: Path) -> None:
    file, words = tmp_path / "here.yaml", ["calibrate", str(config.run_dir), "--hardware", "1xcpu", "--write"]
    assert main([*words, str(file)]) == SUCCESS
    calibration = load_calibration(file)
    assert calibration.hardware == "cpu"
    assert calibration.overhead_s + calibration.turnaround_s > 0, "the seconds from a parent's end to a node's start"
    assert all(getattr(calibration, kind).nodes > 0 for kind in KINDS)
    assert main([*words, str(file)]) == BAD_INPUT, "the file is there already"


def test_a_plan_starts_from_a_run(config: RunConfig, tmp_path: Path) -> None:
    """Its config, its lengths and its speeds; the written plan is a new run, with predictions."""
    file = tmp_path / "plan.yaml"
    given = ["--from", str(config.run_dir), "steps=7", "--devices", "2xcpu", "--write", str(file)]
    assert main(["plan", *given]) == SUCCESS
    planned = load_config([file], [])
    assert (planned.steps, planned.rollout.rows) == (7, config.rollout.rows)
    assert planned.run_dir == config.run_dir.with_name(f"{config.name}-planned")
    assert planned.predicted_s["step"] > 0
    assert main(["plan", "--from", str(config.run_dir), "--devices", "8xH100-80"]) == BAD_INPUT, "it ran on CPUs"


def test_a_run_on_cpus_calibrates_no_gpu(config: RunConfig) -> None:
    assert main(["calibrate", str(config.run_dir), "--hardware", "1x8xH100-80"]) == BAD_INPUT


def test_a_published_step_time_needs_no_run(tmp_path: Path) -> None:
    file = tmp_path / "there.yaml"
    words = ["calibrate", "conf/run/slurm_70b.yaml", "--hardware", "16x8xH100-80", "--step-seconds"]
    assert main([*words, "120", "--lengths", "lognormal:340,0.7", "--write", str(file)]) == SUCCESS
    assert load_calibration(file).extrapolated == list(KINDS)
    assert main([*words, "0"]) == BAD_INPUT
    assert main([*words, "0.5"]) == BAD_INPUT, "no hardware is that fast"
    assert main([*words, "1e9"]) == BAD_INPUT, "or that slow"
    words[words.index("16x8xH100-80")] = "8xH100-80"
    assert main([*words, "120"]) == BAD_INPUT, "the job needs 16 nodes"

"""Jobs of a real Slurm that end otherwise than they were meant to, or are several: a lost node, `cancel`, an array, a
refusal. SmolLM2 on two nodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.launch.commands import read_record
from tests.support.paths import ROOT
from tests.support.runs import QUIET, arguments, placement
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_runs import (
    JOB,
    OVER,
    PLACED,
    eventually,
    job_of,
    printed,
    requeued,
    submitted,
    updated,
    wait_for,
    wait_for_update,
    wait_until_nothing_is_left,
)

pytestmark = pytest.mark.processes


def test_a_node_that_fails_is_replaced_and_a_cancelled_job_leaves_nothing(
    slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm ends the ranks' step with the node: nobody waits until the rank is overdue."""
    config, job = submitted(folder, "failing", "steps=60", "cluster.arrival_timeout_s=3600", *QUIET)
    wait_for_update(slurm, job, 0, config)
    slurm.kill_node("n2")
    eventually(lambda: slurm.show(job)["Restarts"] == "1", f"the gang cannot go on without its rank: {printed(config)}")
    slurm.start_node("n2")
    requeued(slurm, job, 1, config)
    done = next(step for step in range(60) if not updated(config, step))
    wait_for_update(slurm, job, done, config)
    run_dir = str(config.run_dir)
    assert main(["submit", f"{run_dir}/job/config.yaml"]) == 2, "a second job of the same run"
    assert f"job {job} is running already" in capsys.readouterr().err
    assert main(["cancel", run_dir]) == 0
    wait_until_nothing_is_left(slurm, config)
    wait_for(slurm, job, "CANCELLED", config)
    capsys.readouterr()
    assert main(["status", run_dir]) == 0
    assert f"goes on with `stageline submit {run_dir}/job/config.yaml`" in capsys.readouterr().out
    assert main(["check", run_dir]) == 0


@pytest.mark.smollm2
def test_three_demo_steps_on_two_nodes(slurm: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real model: as conf/run/demo.yaml has it, but for fewer rows."""
    monkeypatch.chdir(ROOT)  # the config's paths begin there
    few = ("rollout.rows=8", "prompts.held_out=8", "evaluate.every=0")
    where = "slurm.gangs={train: {nodes: 1}, generate: {nodes: 1}, score: {beside: generate}}"
    fixed = (f"runs_dir={folder}/runs", "name=smollm2", "cluster.dashboard=null", "slurm.gres=null", where, *QUIET)
    sources = ["conf/run/demo.yaml", "steps=3", *few, *fixed]
    assert main(["submit", *sources]) == 0
    config = load_config(sources[:1], sources[1:])
    wait_for(slurm, job_of(config), "COMPLETED", config)
    assert updated(config, 2)
    assert main(["check", str(config.run_dir)]) == 0


def test_a_sweep_is_an_array_of_runs(slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run fails, and does not hold up the others. Swept again, only this run continues: the others are done."""
    flag = folder / "broken"
    flag.touch()
    reward = ("reward.kind=tests.support.own_rewards:broken", f"reward.args.while_there={flag}")
    one = placement("{all: {}}", others="all")
    file, *changes = arguments(folder, "swept", one, "steps=1", "slurm.gres=null", *reward, *QUIET)
    runs = [folder / f"runs/swept-gain{value}" for value in (1, 2, 3)]
    ends = []
    for left_out in (set[Path](), {runs[0], runs[2]}):
        capsys.readouterr()
        assert main(["sweep", file, *changes, "reward.args.gain=1,2,3"]) == 0
        said = capsys.readouterr().out
        assert {run for run in runs if f"left out {run}: done" in said} == left_out
        swept = [run for run in runs if run not in left_out]
        (array,) = re.findall(rf"submitted job (\d+), an array of {len(swept)} ", said)
        records = [read_record(RunPaths(run).job) for run in swept]
        tasks = [f"{array}_{task}" for task in range(len(swept))]
        assert [record.job_id for record in records if record] == tasks
        eventually(lambda tasks=tasks: all(slurm.state(task) in OVER for task in tasks), "all are over")
        ends.append([slurm.state(task) for task in tasks])
        flag.unlink(missing_ok=True)
    assert ends == [["COMPLETED", "FAILED", "COMPLETED"], ["COMPLETED"]]
    assert main(["status", "--runs-dir", str(folder / "runs")]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(r"swept-gain\d +1/1 +\d+_\d +COMPLETED", table)) == 3
    assert [load_config([run / "config.yaml"]).reward.args["gain"] for run in runs] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ("slurm.partition=nowhere", "slurm.partition", "invalid partition specified: nowhere"),
        (
            "slurm.gangs={train: {nodes: 2}, generate: {nodes: 1, gpus_per_worker: 9}}",
            "slurm.gangs",
            "Requested node configuration is not available",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_slurms_reason(
    slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str], change: str, key: str, reason: str
) -> None:
    file, *changes = arguments(folder, "impossible", PLACED, *JOB, "slurm.gres=gpu", *QUIET, change)
    assert main(["submit", file, *changes]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"refused {key}: Slurm refuses the job: ")
    assert reason in error
    assert "asked for: " in error
    assert slurm.call("squeue", "--noheader", "--name=impossible") == ""

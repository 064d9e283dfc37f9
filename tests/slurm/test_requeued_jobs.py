"""Jobs of a real Slurm that lose a node or a process, and continue. They are compared bit for bit with an undisturbed
job: arrays of every stage, digests of every update."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.tracking import read_spool
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET
from tests.support.slurm_cluster import SlurmCluster, processes_with
from tests.support.slurm_runs import (
    STEPS,
    WHERE,
    eventually,
    job_of,
    nodes_of_workers,
    printed,
    requeued,
    submitted,
    updated,
    wait_for,
    wait_for_update,
    wait_until_nothing_is_left,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, folder: Path) -> RunConfig:
    """A plain job, from `submit` to its end."""
    tracking = (f"tracking.uri=sqlite:///{folder}/mlflow.db", "tracking.report=false", "cluster.dashboard=127.0.0.1:0")
    config, job = submitted(folder, "undisturbed", *tracking)
    assert "hetjob" not in (RunPaths(config.run_dir).job / "run.sbatch").read_text()
    eventually(lambda: nodes_of_workers(config.run_dir) == WHERE, f"every worker is on its node: {printed(config)}")
    wait_for(slurm, job, "COMPLETED", config)
    return config


def test_a_submitted_run_is_done(
    slurm: SlurmCluster, undisturbed: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, job = str(undisturbed.run_dir), job_of(undisturbed)
    assert main(["check", run_dir]) == 0
    wait_until_nothing_is_left(slurm, undisturbed)
    assert re.search(r"ssh -N -J \S+ -L \d+:127\.0\.0\.1:\d+ \S+", printed(undisturbed)), printed(undisturbed)
    opened = [item for _, item in read_spool(RunPaths(undisturbed.run_dir).mlflow_spool) if item["kind"] == "open"]
    tags = opened[0]["tags"]
    assert (tags["slurm_job_id"], tags["slurm_nodes"], tags["slurm_restarts"]) == (job, "n[1-3]", "0")
    capsys.readouterr()
    assert main(["status", run_dir]) == 0
    assert f"{STEPS} of {STEPS} steps" in (said := capsys.readouterr().out)
    assert f"{job} COMPLETED" in said
    assert main(["logs", run_dir, "--gang", "train", "--lines", "1"]) == 0
    assert {line.partition(" |")[0] for line in capsys.readouterr().out.splitlines()} == {"train-0", "train-1"}


def test_a_run_requeued_repeatedly_is_the_same_run(slurm: SlurmCluster, folder: Path, undisturbed: RunConfig) -> None:
    """A heterogeneous job: its time limit comes near while an engine hangs, it is requeued by hand, its driver is
    killed, and then one of its ranks."""
    config, job = submitted(folder, "requeued", "slurm.job=heterogeneous", *QUIET)
    assert "hetjob" in (RunPaths(config.run_dir).job / "run.sbatch").read_text()
    wait_for_update(slurm, job, 0, config)
    os.kill(process_id(config, "generate-0"), signal.SIGSTOP)  # else it might be done before Slurm looks
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    eventually(lambda: slurm.may_start(job, 1), f"restart 1: {printed(config)}")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # else its next start is over as soon
    requeued(slurm, job, 1, config)
    assert "Slurm wants the nodes back" in printed(config)

    done = next(step for step in range(STEPS) if not updated(config, step))
    wait_for_update(slurm, job, done, config)
    slurm.call("scontrol", "requeue", job)
    requeued(slurm, job, 2, config)

    done = next(step for step in range(STEPS) if not updated(config, step))
    wait_for_update(slurm, job, done, config)
    (driver,) = processes_with("pipeline.cli\0job\0", str(config.run_dir))
    os.kill(driver, signal.SIGKILL)
    before = process_id(config, "train-1")
    requeued(slurm, job, 3, config)
    assert "workers or the driver were lost" in printed(config)

    eventually(lambda: process_id(config, "train-1") != before, "rank 1 is built")
    os.kill(process_id(config, "train-1"), signal.SIGKILL)
    wait_for(slurm, job, "COMPLETED", config)
    assert slurm.show(job)["Restarts"] == "3", "a rank that dies is built again within the job"
    assert outputs(config) == outputs(undisturbed)
    assert main(["check", str(config.run_dir)]) == 0
    wait_until_nothing_is_left(slurm, config)


def test_a_run_that_loses_its_batch_node_is_the_same(slurm: SlurmCluster, folder: Path, undisturbed: RunConfig) -> None:
    """With it go the scheduler, the driver and a rank; the job starts again on the nodes that are left."""
    config, job = submitted(folder, "headless", "slurm.job=plain", *QUIET)
    wait_for_update(slurm, job, 1, config)
    assert slurm.show(job)["BatchHost"] == "n1"
    slurm.kill_node("n1")
    requeued(slurm, job, 1, config)
    assert "requeued: the batch node n1 failed (restart 0)" in printed(config)
    wait_for(slurm, job, "COMPLETED", config)
    assert (slurm.show(job)["BatchHost"], slurm.show(job)["Restarts"]) == ("n2", "1")
    assert outputs(config) == outputs(undisturbed)
    assert main(["check", str(config.run_dir)]) == 0
    wait_until_nothing_is_left(slurm, config)

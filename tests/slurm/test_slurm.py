"""Runs of the tiny model as jobs of a real Slurm: two ranks on two nodes, engine and scorer on a third.

What was disturbed is compared with what was not, bit for bit: arrays of every stage, digests of every update.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.launch.records import read_record
from pipeline.observe.tracking import read_spool
from storage.address import Address
from storage.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET, arguments, placement
from tests.support.slurm_cluster import SCHEDULES_S, SlurmCluster, processes_with
from tests.support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STEPS = 14
PLACED = placement(
    "{generate: {slots: 2}, score: {}, train: {workers: 2}}", generate="generate", score="score", others="train"
)
JOB = (
    f"steps={STEPS}",
    "slurm.gpus=false",
    "slurm.time_limit=0-00:30:00",
    "slurm.signal_lead_s=100",
    "slurm.gangs={train: {nodes: 2}, generate: {nodes: 1}, score: {beside: generate}}",
    "cluster.arrival_timeout_s=60",
)
WHERE = {"train 0": "n1", "train 1": "n2", "generate 0": "n3", "score 0": "n3"}
"""Gang and index of each worker -> its node, where the nodes are free."""


def eventually(happened: Callable[[], Any], what: str) -> Any:
    """`until`, asking Slurm less often: each question is a process."""
    return until(happened, what, every_s=0.25)


def submitted(folder: Path, name: str, *changes: str) -> tuple[RunConfig, str]:
    """A run that was submitted, and its job's number."""
    file, *overrides = arguments(folder, name, PLACED, *JOB, *changes)
    assert main(["submit", file, *overrides]) == 0
    config = load_config([file], overrides)
    return config, job_of(config)


def job_of(config: RunConfig) -> str:
    record = read_record(RunPaths(config.run_dir).job)
    assert record is not None
    return record.job_id


def printed(config: RunConfig) -> str:
    """By its job, so far."""
    record = read_record(RunPaths(config.run_dir).job)
    assert record is not None
    output = Path(record.output)
    return output.read_text() if output.exists() else ""


def updated(config: RunConfig, step: int) -> bool:
    """Whether both updates of a step are committed."""
    ledger = Ledger(str(RunPaths(config.run_dir).ledger))
    return all(ledger.find(Address(stage, step)) is not None for stage in ("update_policy", "update_critic"))


def wait_for(slurm: SlurmCluster, job: str, state: str, config: RunConfig) -> None:
    """Until a job is in a state; with what it printed, where it never is."""
    try:
        eventually(lambda: slurm.state(job) == state, f"job {job} is {state}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {slurm.state(job)} and printed:\n{printed(config)}") from None


def wait_for_update(slurm: SlurmCluster, job: str, step: int, config: RunConfig) -> None:
    """Until a step's updates are committed, or the job has come to its end before."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    eventually(lambda: updated(config, step) or slurm.state(job) in over, f"update {step}: {printed(config)}")
    assert updated(config, step), printed(config)


def requeued(slurm: SlurmCluster, job: str, times: int, config: RunConfig) -> None:
    """Waits until a job was requeued so often, and has it start again now and not in two minutes."""
    eventually(lambda: slurm.may_start(job, times), f"restart {times}: {printed(config)}")
    until(lambda: slurm.started_now(job), f"start {times}: {slurm.show(job)}", every_s=SCHEDULES_S)


def nodes_of_workers(run_dir: Path) -> dict[str, str]:
    """Gang and index of every `stageline worker` of a run -> the node that Slurm has it on."""
    found = {}
    for pid in processes_with(str(run_dir), "pipeline.cli", "SLURMD_NODENAME="):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "worker" in words and "--index" in words and "srun" not in words[0] and "bash" not in words[0]:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode()
            node = re.search(r"SLURMD_NODENAME=(\w+)", environment)
            assert node is not None
            found[f"{words[words.index('--gang') + 1]} {words[words.index('--index') + 1]}"] = node[1]
    return found


def nothing_left(slurm: SlurmCluster, config: RunConfig) -> bool:
    """Whether no process of any job and no published weights of the run are on this machine any more."""
    return not slurm.processes() and not list(Path("/dev/shm").glob(f"stageline-{config.name}-*"))


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, folder: Path) -> RunConfig:
    """A plain job, from `submit` to its end."""
    tracking = (f"tracking.uri=sqlite:///{folder}/mlflow.db", "tracking.plots=false", "cluster.dashboard=127.0.0.1:0")
    config, job = submitted(folder, "undisturbed", *tracking)
    assert "hetjob" not in (RunPaths(config.run_dir).job / "run.sbatch").read_text()
    eventually(lambda: nodes_of_workers(config.run_dir) == WHERE, f"every worker is on its node: {printed(config)}")
    wait_for(slurm, job, "COMPLETED", config)
    return config


def test_a_submitted_run_is_done_and_says_where_to_look(
    slurm: SlurmCluster, undisturbed: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, job = str(undisturbed.run_dir), job_of(undisturbed)
    assert main(["check", run_dir]) == 0
    eventually(lambda: nothing_left(slurm, undisturbed), "nothing is left")
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


def test_a_run_that_is_requeued_again_and_again_is_the_same_run(
    slurm: SlurmCluster, folder: Path, undisturbed: RunConfig
) -> None:
    """A heterogeneous job: its time limit comes near while an engine hangs, it is requeued by hand, its driver is
    killed, and then one of its ranks."""
    config, job = submitted(folder, "requeued", "slurm.job=heterogeneous", *QUIET)
    assert "hetjob" in (RunPaths(config.run_dir).job / "run.sbatch").read_text()
    wait_for_update(slurm, job, 0, config)
    os.kill(process_id(config, "generate-0"), signal.SIGSTOP)  # else it might be done before Slurm looks
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    eventually(lambda: slurm.may_start(job, 1), f"restart 1: {printed(config)}")
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # else its next attempt is over as soon
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
    eventually(lambda: nothing_left(slurm, config), "nothing is left")


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
    assert f"job {job} of" in capsys.readouterr().err
    assert main(["cancel", run_dir]) == 0
    eventually(lambda: nothing_left(slurm, config), "nothing is left")
    wait_for(slurm, job, "CANCELLED", config)
    capsys.readouterr()
    assert main(["status", run_dir]) == 0
    assert f"goes on with `stageline submit {run_dir}/job/config.yaml`" in capsys.readouterr().out
    assert main(["check", run_dir]) == 0


@pytest.mark.smollm2
def test_the_demo_runs_for_three_steps_on_two_nodes(
    slurm: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model: as conf/run/demo.yaml has it, but for fewer rows."""
    monkeypatch.chdir(ROOT)  # the config's paths begin there
    few = ("rollout.rows=8", "prompts.held_out=8", "evaluate.every=0")
    where = "slurm.gangs={train: {nodes: 1}, generate: {nodes: 1}, score: {beside: generate}}"
    fixed = (f"runs_dir={folder}/runs", "name=smollm2", "cluster.dashboard=null", "slurm.gpus=false", where, *QUIET)
    sources = ["conf/run/demo.yaml", "steps=3", *few, *fixed]
    assert main(["submit", *sources]) == 0
    config = load_config(sources[:1], sources[1:])
    wait_for(slurm, job_of(config), "COMPLETED", config)
    assert updated(config, 2)
    assert main(["check", str(config.run_dir)]) == 0


def test_a_sweep_is_an_array_of_runs(slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = placement("{all: {}}", others="all")
    file, *changes = arguments(folder, "swept", one, "steps=1", "slurm.gpus=false", *QUIET)
    assert main(["sweep", file, *changes, "ppo.kl.coef=0.02,0.05,0.1"]) == 0
    (array,) = re.findall(r"submitted job (\d+), an array of 3", capsys.readouterr().out)
    runs = [folder / f"runs/swept-coef{value}" for value in ("0.02", "0.05", "0.1")]
    records = [read_record(RunPaths(run).job) for run in runs]
    assert [record.job_id for record in records if record] == [f"{array}_{task}" for task in range(3)]
    for task in range(3):
        eventually(lambda task=task: slurm.state(f"{array}_{task}") == "COMPLETED", f"task {task}")
    assert main(["status", "--runs-dir", str(folder / "runs")]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(rf"swept-coef0\.\d+ +1/1 +{array}_\d +COMPLETED", table)) == 3
    assert [load_config([run / "config.yaml"]).ppo.kl.coef for run in runs] == [0.02, 0.05, 0.1]


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
    file, *changes = arguments(folder, "impossible", PLACED, *JOB, "slurm.gpus=true", *QUIET, change)
    assert main(["submit", file, *changes]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"refused {key}: Slurm refuses the job: ")
    assert reason in error
    assert "asked for: " in error
    assert slurm.call("squeue", "--noheader", "--name=impossible") == ""

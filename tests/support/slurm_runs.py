"""Runs of the tiny model as jobs of a real Slurm: two ranks on two nodes, engine and scorer on a third."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.launch.commands import read_record
from storage.address import Address
from tests.support.runs import arguments, placement
from tests.support.slurm_cluster import SlurmCluster, processes_with
from tests.support.waiting import until

STEPS = 14
PLACED = placement(
    "{generate: {concurrent_shards: 2}, score: {}, train: {workers: 2}}",
    generate="generate",
    score="score",
    others="train",
)
JOB = (
    f"steps={STEPS}",
    "slurm.gres=null",
    "slurm.time_limit=0-00:30:00",
    "slurm.signal_lead_s=100",
    "slurm.gangs={train: {nodes: 2}, generate: {nodes: 1}, score: {beside: generate}}",
    "cluster.arrival_timeout_s=300",
)
WHERE = {"train 0": "n1", "train 1": "n2", "generate 0": "n3", "score 0": "n3"}
"""Gang and index of each worker -> its node, where the nodes are free."""

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def eventually(happened: Callable[[], Any], what: str) -> Any:
    """`until`, asking Slurm less often: each question is a process."""
    return until(happened, what, every_s=0.25)


def submitted(folder: Path, name: str, *changes: str) -> tuple[RunConfig, str]:
    """A run that was submitted, and its job's number."""
    file, *overrides = arguments(folder, name, PLACED, *JOB, *changes)
    assert main(["submit", file, *overrides]) == 0
    config = load_config([file], [*overrides, "cluster.kind=attached"])  # as the job has it
    return config, job_of(config)


def job_of(config: RunConfig) -> str:
    record = read_record(RunPaths(config.run_dir).job)
    return record.job_id


def printed(config: RunConfig) -> str:
    """By its job, so far."""
    record = read_record(RunPaths(config.run_dir).job)
    output = Path(record.output)
    return output.read_text() if output.exists() else ""


def updated(config: RunConfig, step: int) -> bool:
    """Return True if both updates of a step are committed."""
    ledger = config.stored.ledger()
    return all(ledger.find(Address(stage, step)) is not None for stage in ("update_policy", "update_critic"))


def wait_for(slurm: SlurmCluster, job: str, state: str, config: RunConfig) -> None:
    """Until a job is in a state; with what it printed, where it never is."""
    try:
        eventually(lambda: slurm.state(job) == state, f"job {job} is {state}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {slurm.state(job)} and printed:\n{printed(config)}") from None


def wait_for_update(slurm: SlurmCluster, job: str, step: int, config: RunConfig) -> None:
    """Until a step's updates are committed, or the job has come to its end before."""
    eventually(lambda: updated(config, step) or slurm.state(job) in OVER, f"update {step}: {printed(config)}")
    assert updated(config, step), printed(config)


def requeued(slurm: SlurmCluster, job: str, times: int, config: RunConfig) -> None:
    """Waits until a job was requeued so often, and has it start again now and not in two minutes."""
    eventually(lambda: slurm.may_start(job, times), f"restart {times}: {printed(config)}")
    eventually(lambda: slurm.started_now(job), f"start {times}: {slurm.show(job)}")


def nodes_of_workers(run_dir: Path) -> dict[str, str | None]:
    """Gang and index of every `stageline worker` of a run -> the node that Slurm has it on."""
    found = {}
    for pid in processes_with(str(run_dir), "pipeline.cli", "SLURMD_NODENAME="):
        with suppress(psutil.Error):  # a process of a job that starts may be over before it is looked at
            process = psutil.Process(pid)
            words, node = process.cmdline(), process.environ().get("SLURMD_NODENAME")
            if "worker" in words and "--index" in words and "srun" not in words[0] and "bash" not in words[0]:
                found[f"{words[words.index('--gang') + 1]} {words[words.index('--index') + 1]}"] = node
    return found


def wait_until_nothing_is_left(slurm: SlurmCluster, config: RunConfig) -> None:
    """Until no process of any job and no published weights of the run are on this machine any more; with what is left,
    where something stays."""
    try:
        eventually(lambda: not left(slurm, config), "nothing is left")
    except AssertionError as error:
        said = f"{error}; left are {left(slurm, config)}, and the job printed:\n{printed(config)}"
        raise AssertionError(said) from None


def left(slurm: SlurmCluster, config: RunConfig) -> list[str]:
    """Processes of any job, by number, parent and command line, and the files of the run's published weights."""
    processes = []
    for pid in slurm.processes():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            processes.append(f"process {pid}, of {process.ppid()}: {' '.join(process.cmdline())}")
    board = RunPaths(config.run_dir).board(config.cluster.weights_dir)  # another run's may have its name, not its hash
    return processes + [str(path) for path in (*board.parent.glob(f"{board.name}*"), *board.glob("*"))]

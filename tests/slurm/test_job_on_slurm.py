"""The job's script: how it reacts to Slurm's signals, and to its driver's exit code. A stand-in takes the place of
Stageline, so that a job starts within a second."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch import requeues
from pipeline.launch.submission import SubmittedJob, array_script, submit_array, submit_run
from tests.support import stand_in
from tests.support.commits import commit_nothing
from tests.support.paths import TINY
from tests.support.runs import ONE_GANG, placement
from tests.support.slurm_cluster import URGENT, SlurmCluster, processes_with
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def submitted(
    slurm: SlurmCluster, folder: Path, name: str, *changes: str, most_lost: int = 20, most_idle: int = 3
) -> tuple[RunConfig, SubmittedJob]:
    """A job of one node whose driver is there. Its script has the two limits of its requeues."""
    config = of_stand_in(folder, name, *changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requeues, "MAX_LOST_STARTS", most_lost)
        patch.setattr(requeues, "MAX_REQUEUES_WITHOUT_PROGRESS", most_idle)
        job = submit_run(config)
    wait_for_output(job, "driver of start 0")
    return config, job


def of_stand_in(folder: Path, name: str, *changes: str) -> RunConfig:
    command = f"slurm.command='{sys.executable} {stand_in.__file__}'"
    fixed = [f"name={name}", "slurm.gres=null", "slurm.driver_cpus=1", command, *changes]
    config = load_config([TINY], fixed)
    config.runs_dir = str(folder)
    return config


def wait_for_output(job: SubmittedJob, text: str) -> None:
    def printed() -> str:
        return job.output.read_text() if job.output.exists() else ""

    until(lambda: text in printed(), f"{text!r} in {printed()!r}", every_s=0.1)


def end(config: RunConfig, code: int) -> None:
    """The driver ends with an exit code."""
    finish = RunPaths(config.run_dir).root / "finish"
    finish.with_suffix(".new").write_text(str(code))
    finish.with_suffix(".new").rename(finish)


def start_again(slurm: SlurmCluster, job: SubmittedJob, restart: int) -> None:
    """Waits until a job is requeued, and has it start now and not in two minutes."""
    until(lambda: slurm.may_start(job.job_id, restart), f"restart {restart}", every_s=0.25)
    until(lambda: slurm.started_now(job.job_id), f"start {restart}", every_s=0.25)
    wait_for_output(job, f"driver of start {restart}")


def wait_for(slurm: SlurmCluster, job: SubmittedJob, state: str) -> dict[str, str]:
    until(lambda: slurm.state(job.job_id) == state, f"job {job.job_id} is {state}", every_s=0.1)
    until(lambda: not slurm.processes(), "nothing is left", every_s=0.1)
    return slurm.show(job.job_id)


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (2, "FAILED"), (3, "FAILED")])
def test_a_lasting_failure_ends_the_job(slurm: SlurmCluster, tmp_path: Path, code: int, state: str) -> None:
    config, job = submitted(slurm, tmp_path, "ends")
    end(config, code)
    shown = wait_for(slurm, job, state)
    assert (shown["ExitCode"], shown["Restarts"]) == (f"{code}:0", "0")


def test_a_node_where_stageline_does_not_start_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = tmp_path / "stageline"
    there = f"exec {sys.executable} {stand_in.__file__}"
    lacking = "exec /nowhere/bin/python"
    command.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && {lacking}\n{there} "$@"\n')
    command.chmod(0o755)
    two = ("placement.gangs.train.workers=2", "slurm.gangs={train: {nodes: 2}}", "slurm.gres=null")
    config = load_config([TINY], [f"runs_dir={tmp_path}", "name=lacks", f"slurm.command={command}", *two])
    job = submit_run(config)
    assert wait_for(slurm, job, "FAILED")["ExitCode"] == "2:0"
    wait_for_output(job, "node n2: Stageline does not start there: ")
    assert "/nowhere/bin/python: No such file" in job.output.read_text()


def test_every_worker_sees_all_gpus_that_the_job_has_on_its_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Ranks reach one another by NVLink then, and gangs may share devices. Those that need no GPUs see none."""
    gangs = ("placement.gangs.train.workers=2", "placement.gangs.generate.workers=4")
    shared = (
        "placement.device_sharing=[[generate,train]]",
        "slurm.gangs={train: {nodes: 2}, generate: {beside: train}}",
    )
    config, job = submitted(slurm, tmp_path, "gpus", *gangs, *shared, "slurm.gres=gpu")
    until(lambda: job.output.read_text().count(" sees GPUs ") == 7, "all workers are there", every_s=0.1)
    seen = re.findall(r"(\w+) (\d) on (n\d) sees GPUs ([\d,]*);", job.output.read_text())
    end(config, 0)
    assert wait_for(slurm, job, "COMPLETED")["ExitCode"] == "0:0"
    gpus = {(gang, index): found for gang, index, _, found in seen}
    nodes = {(gang, index): node for gang, index, node, _ in seen}
    workers = [("train", "0"), ("train", "1"), *(("generate", str(index)) for index in range(4))]
    assert gpus == dict.fromkeys(workers, "0,1") | {("score", "0"): ""}
    assert nodes["train", "0"] == nodes["generate", "0"] != nodes["train", "1"] == nodes["generate", "3"]


def test_a_worker_that_is_killed_is_started_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    config, job = submitted(slurm, tmp_path, "killed", ONE_GANG)
    wait_for_output(job, "worker there")
    mine = (f"{stand_in.__file__}\0worker", str(tmp_path), "\0--index\0")
    killed = until(lambda: processes_with(*mine), "a worker")[0]
    os.kill(killed, signal.SIGKILL)
    wait_for_output(job, "worker all 0 ended with 137: started again\n")
    until(lambda: job.output.read_text().count("worker there\n") == 2, "another", every_s=0.1)
    end(config, 0)
    assert wait_for(slurm, job, "COMPLETED")["ExitCode"] == "0:0"


def test_whose_batch_node_fails_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm takes the node out of the one job and leaves that running; of the other, whose first component it was, it
    requeues this component alone."""
    engines = placement("{train: {}, engines: {workers: 2}}", generate="engines", score="engines", others="train")
    where = "slurm.gangs={train: {nodes: 1}, engines: {nodes: 2}}"
    component = (engines, where, "slurm.job=heterogeneous")
    ranks = placement("{train: {workers: 2}, engines: {}}", generate="engines", score="engines", others="train")
    plain = (ranks, "slurm.gangs={train: {nodes: 2}}", "slurm.sbatch=[--nodelist=n1]", "slurm.job=plain")
    config, job = submitted(slurm, tmp_path, "headless", *component)
    _, last = submitted(slurm, tmp_path, "given-up", *plain, most_lost=0)
    assert [slurm.show(one.job_id)["BatchHost"] for one in (job, last)] == ["n1", "n1"]
    for one in (job, last):
        watch = (str(one.output), "the batch node $host failed", "SLURMD_NODENAME=n2")
        until(lambda watch=watch: processes_with(*watch), "another node watches", every_s=0.1)
    slurm.kill_node("n1")
    until(lambda: slurm.state(last.job_id) == "CANCELLED", "no restart is left", every_s=0.25)
    until(lambda: slurm.may_start(job.job_id, restarts=1), "it is requeued, all of it", every_s=0.25)
    wait_for_output(job, "requeued: the batch node n1 failed (restart 0)\n")
    wait_for_output(last, "cancelled: the batch node n1 failed (restart 0)\n")
    until(lambda: slurm.started_now(job.job_id), "it is started, on other nodes", every_s=0.25)
    wait_for_output(job, "driver of start 1")
    end(config, 0)
    assert wait_for(slurm, job, "COMPLETED")["Restarts"] == "1"


def test_a_time_limit_uses_no_restart_but_must_leave_time_for_a_commit(slurm: SlurmCluster, tmp_path: Path) -> None:
    config, job = submitted(slurm, tmp_path, "slow", most_lost=0, most_idle=2)
    for restart in range(1, 3):
        slurm.call("scancel", "--batch", "--signal=USR1", job.job_id)
        start_again(slurm, job, restart)
    commit_nothing(config.run_dir, step=0)
    slurm.call("scancel", "--batch", "--signal=USR1", job.job_id)
    start_again(slurm, job, 3)
    end(config, 75)
    shown = wait_for(slurm, job, "FAILED")
    assert (shown["Restarts"], shown["ExitCode"]) == ("3", "75:0")
    wait_for_output(job, "not requeued: 1 start lost their driver, workers or batch node (at most 0)")


def test_what_slurm_itself_requeues_for_ever_ends_without_progress(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job of one node, whose script is gone with its node: only the next start can say that it is enough."""
    config, job = submitted(slurm, tmp_path, "hopeless", most_idle=1)
    slurm.kill_node(slurm.show(job.job_id)["BatchHost"])
    start_again(slurm, job, 1)
    slurm.call("scontrol", "requeue", job.job_id)
    until(lambda: slurm.may_start(job.job_id, restarts=2), "it is requeued", every_s=0.25)
    until(lambda: slurm.started_now(job.job_id) or slurm.state(job.job_id) == "FAILED", "it ends", every_s=0.25)
    assert wait_for(slurm, job, "FAILED")["ExitCode"] == "75:0"
    wait_for_output(job, "not requeued: 1 requeue in a row committed nothing new")
    assert "driver of start 2" not in job.output.read_text()
    wait_for_output(job, f"`stageline submit {RunPaths(config.run_dir).job}/config.yaml` continues")


def test_a_job_that_makes_room_goes_on_later(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Preemption: Slurm requeues by itself. It tells the script and the steps at once: either may be first to end the
    driver, so what the script prints of it is left open."""
    config, job = submitted(slurm, tmp_path, "preempted")
    urgent = ("--nodes=4", "--exclusive", f"--partition={URGENT}", f"--output={tmp_path}/urgent.out", "--wrap=true")
    first = slurm.call("sbatch", "--parsable", *urgent).strip()
    until(lambda: slurm.state(first) == "COMPLETED", "the urgent job is done", every_s=0.1)
    until(lambda: slurm.may_start(job.job_id, restarts=1), "the other is requeued", every_s=0.1)
    until(lambda: slurm.started_now(job.job_id), "it is started", every_s=0.25)
    wait_for_output(job, "driver of start 1")
    end(config, 0)
    assert wait_for(slurm, job, "COMPLETED")["Restarts"] == "1"


def test_without_a_driver_the_job_is_requeued_and_cancelled_it_leaves_nothing(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    config, job = submitted(slurm, tmp_path, "lost")
    end(config, 75)
    wait_for_output(job, "requeued: workers or the driver were lost, exit code 75 (restart 0)")
    (RunPaths(config.run_dir).root / "finish").unlink()
    until(lambda: slurm.may_start(job.job_id, restarts=1), "it is requeued", every_s=0.1)
    until(lambda: slurm.started_now(job.job_id), "it is started", every_s=0.25)
    wait_for_output(job, "driver of start 1")
    slurm.call("scancel", job.job_id)
    assert wait_for(slurm, job, "CANCELLED")["Restarts"] == "1"


def test_lines_of_the_environment_change_nothing_of_what_follows(slurm: SlurmCluster, tmp_path: Path) -> None:
    lines = "slurm.environment=['set -eu', 'set -o pipefail', 'trap \"exit 9\" EXIT ERR', 'run=/elsewhere']"
    config, job = submitted(slurm, tmp_path, "careful", lines)
    end(config, 75)
    wait_for_output(job, "requeued: workers or the driver were lost, exit code 75 (restart 0)")
    until(lambda: slurm.show(job.job_id)["Restarts"] == "1", "it is requeued", every_s=0.1)
    slurm.call("scancel", job.job_id)
    wait_for(slurm, job, "CANCELLED")


def test_who_is_told_before_the_driver_is_there_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As by the time limit, where loading modules takes long."""
    wait = f"touch {tmp_path}/waits; until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    job = submit_run(of_stand_in(tmp_path, "early", f"slurm.environment=['{wait}']"))
    until((tmp_path / "waits").exists, "the environment is being made", every_s=0.1)
    slurm.call("scancel", "--batch", "--signal=USR1", job.job_id)
    until(lambda: slurm.state(job.job_id) == "RUNNING", "it goes on", every_s=0.1)
    (tmp_path / "go").touch()
    wait_for_output(job, "requeued: Slurm wants the nodes back (restart 0)")
    assert "driver of start" not in job.output.read_text()
    until(lambda: slurm.show(job.job_id)["Restarts"] == "1", "it is requeued", every_s=0.1)
    slurm.call("scancel", job.job_id)
    wait_for(slurm, job, "CANCELLED")


def test_a_time_limit_without_room_for_the_signal_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The partition's default: Slurm would tell the job at once, and again after each requeue."""
    job = submit_run(of_stand_in(tmp_path, "brief", "slurm.signal_lead_s=60000"))
    shown = wait_for(slurm, job, "FAILED")
    assert (shown["ExitCode"], shown["Restarts"]) == ("2:0", "0")
    wait_for_output(job, "slurm.time_limit (null: the partition's) must be more than slurm.signal_lead_s = 60000 sec")


def test_an_output_file_may_have_any_name_but_a_few(slurm: SlurmCluster, tmp_path: Path) -> None:
    config, job = submitted(slurm, tmp_path / 'it\'s "one" #1 of 50%j $HOME', "odd")
    end(config, 0)
    assert wait_for(slurm, job, "COMPLETED")["ExitCode"] == "0:0"


def test_a_task_is_requeued_without_the_others_of_its_array(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The last one has the number of the array, by which Slurm would requeue those too that are done."""
    configs = [of_stand_in(tmp_path, name) for name in ("first", "last")]
    text = array_script(configs, tmp_path / "few-sweep/job")
    assert text is not None
    array = submit_array(configs, tmp_path / "few-sweep/job", text)
    first, last = (
        SubmittedJob(f"{array.job_id}_{task}", array.output.with_name(f"slurm-{array.job_id}_{task}.out"), array.script)
        for task in range(2)
    )
    for task in (first, last):
        wait_for_output(task, "driver of start 0")
    assert slurm.show(last.job_id)["JobId"] == array.job_id
    end(configs[0], 0)
    until(lambda: slurm.state(first.job_id) == "COMPLETED", "the first is done", every_s=0.1)
    end(configs[1], 75)
    until(lambda: slurm.may_start(last.job_id, restarts=1), "the last is requeued", every_s=0.1)
    assert (slurm.state(first.job_id), slurm.show(first.job_id)["Restarts"]) == ("COMPLETED", "0")
    slurm.call("scancel", array.job_id)


def test_a_job_that_is_held_is_not_over(slurm: SlurmCluster, tmp_path: Path) -> None:
    config, job = submitted(slurm, tmp_path, "held")
    slurm.call("scontrol", "requeuehold", "State=SpecialExit", job.job_id)
    until(lambda: slurm.state(job.job_id) == "SPECIAL_EXIT", "it is held", every_s=0.1)
    with pytest.raises(ConfigError, match=rf"job {job.job_id} is special_exit already"):
        submit_run(config)
    slurm.call("scancel", job.job_id)

"""Where a run comes from: the command that started it, and the job that Slurm runs it in (as of Slurm 22.05)."""

from __future__ import annotations

import platform
import sys

import pytest

from pipeline.observe.provenance import SlurmJob, dashboard_tags, short_command, slurm_job, tunnel_command


def test_outside_of_slurm_there_is_none() -> None:
    assert slurm_job({"PATH": "/bin"}) is None


def test_a_plain_job() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_HOST": "login"}
    assert slurm_job(environment) == SlurmJob("7", "n[1-3]", 0, "login")


def test_a_heterogeneous_one_that_was_requeued_has_the_nodes_of_all_components() -> None:
    environment = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n3",
        "SLURM_RESTART_COUNT": "2",
    }
    job = slurm_job(environment)
    assert job.tags() == {"slurm_job_id": "1", "slurm_nodes": "n[1-2],n3", "slurm_restarts": "2"}


def test_a_task_of_an_array_is_called_as_slurm_calls_it() -> None:
    job = slurm_job({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"})
    assert job.job_id == "8_1"


def test_the_tunnel_goes_through_the_login_host() -> None:
    command = tunnel_command("http://127.0.0.1:8787/status", "login")
    assert command == f"ssh -N -J login -L 8787:127.0.0.1:8787 {platform.node()}"


def test_the_tags_of_a_job_say_how_its_dashboard_is_reached() -> None:
    address = "http://127.0.0.1:8787/status"
    assert dashboard_tags(address, {}) == {"dashboard": address}
    in_job = dashboard_tags(address, {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_HOST": "login"})
    assert in_job == {"dashboard": address, "dashboard_tunnel": tunnel_command(address, "login")}


@pytest.mark.parametrize(
    ("argv", "short"),
    [
        (["/usr/bin/stageline", "run", "conf/demo.yaml", "name=a/b", "--json-lines"], "stageline run demo.yaml"),
        (["/x/pipeline/cli/__main__.py", "resume", "runs/demo/"], "stageline resume demo"),
        ([], ""),
    ],
)
def test_a_short_command_is_a_name(monkeypatch: pytest.MonkeyPatch, argv: list[str], short: str) -> None:
    """MLflow's page shows of a source what follows its last `/`."""
    monkeypatch.setattr(sys, "argv", argv)
    assert short_command() == short

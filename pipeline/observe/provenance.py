"""Facts about the origin of a run: versions of the code and of packages, the Slurm job, and the description that MLflow
shows (markdown)."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.observe.summary import Summary, summary_lines
from stages.native.software import installed_versions

SOFTWARE = ("stageline", "torch", "megatron-core", "transformers", "dask", "zarr", "mlflow-skinny", "omegaconf")
"""Packages whose versions are written to the summary."""


def git_commit() -> str:
    """Return the git commit of the running code. "+changes" is appended if tracked files were changed. Empty if the
    code is not in a repository, or if git is not installed."""
    if shutil.which("git") is None:
        return ""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False, env={**os.environ}
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    return commit + ("+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else "")


def driver_origin() -> dict[str, str]:
    """Return fields of a RUN_STARTED event: `command` (the driver's command line), `host` and `code` (the git commit).
    A field without a value is left out."""
    program, *arguments = sys.argv or [""]
    named = "python -m pipeline.cli" if program.endswith("__main__.py") else Path(program).name
    origin = {
        "command": f"{named} {shlex.join(arguments)}".strip(),
        "host": platform.node(),
        "code": git_commit(),
    }
    return {key: value for key, value in origin.items() if value}


def short_command() -> str:
    """Return the command of this process, e.g. `stageline run demo.yaml` or `stageline resume demo`. Options and words
    with `=` are left out. Paths are shortened to their last part, because MLflow's page shows only the text after the
    last `/`."""
    program, *arguments = sys.argv or [""]
    words = (Path(word).name for word in arguments if "=" not in word and not word.startswith("-"))
    return " ".join(["stageline" if program.endswith("__main__.py") else Path(program).name, *words])


def software_versions() -> dict[str, str]:
    """Return the versions of `SOFTWARE` and of Python."""
    return installed_versions(SOFTWARE) | {"python": platform.python_version()}


# ---- Slurm job -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job. If it was requeued, the fields describe its latest start."""

    job_id: str
    """Id of the job. For a task of a job array, it is the array's id and the task's number, such as 12_3."""
    nodes: str
    """The job's nodes in Slurm's notation. For a heterogeneous job, the nodes of all components."""
    restarts: int
    """Number of times that the job was requeued."""
    submitted_from: str | None
    """The host from which the job was submitted. None if Slurm does not say."""

    def tags(self) -> dict[str, str]:
        """Return the tags of the job for experiment tracking."""
        return {
            "slurm_job_id": self.job_id,
            "slurm_nodes": self.nodes,
            "slurm_restarts": str(self.restarts),
        }


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Return the Slurm job that these environment variables describe, or None outside of Slurm."""
    number = environment.get("SLURM_JOB_ID")
    if number is None:
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    components = range(int(environment.get("SLURM_HET_SIZE", "0")))
    lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{component}", "") for component in components]
    return SlurmJob(
        job_id=number if array is None else f"{array}_{task}",
        nodes=",".join(filter(None, lists)) or environment.get("SLURM_JOB_NODELIST", ""),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        submitted_from=environment.get("SLURM_SUBMIT_HOST"),
    )


def tunnel_command(dashboard: str, login_host: str | None) -> str:
    """Return the ssh command with which users forward a dashboard on this node to their own machine.

    Args:
        dashboard: URL of the dashboard.
        login_host: the host from which the job was submitted. It is used as jump host. None: no jump host."""
    address = urlsplit(dashboard)
    through = "" if login_host is None else f"-J {login_host} "
    return f"ssh -N {through}-L {address.port}:{address.hostname}:{address.port} {platform.node()}"


def dashboard_tags(dashboard: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return tags for experiment tracking: the address of the dashboard. In a Slurm job, also the ssh command with
    which users reach the dashboard."""
    job, tags = slurm_job(environment), {"dashboard": dashboard}
    return tags if job is None else tags | {"dashboard_tunnel": tunnel_command(dashboard, job.submitted_from)}


# ---- description in MLflow -------------------------------------------------------------------------------


def markdown_code(text: str) -> str:
    """Return text as one line of markdown code, or "-" if it is empty. Markup in the text has no effect."""
    one_line = " ".join(text.replace("`", "'").split())
    return f"`{one_line}`" if one_line else "-"


def run_description(sentence: str, facts: Mapping[str, str], result: str) -> str:
    """Return the run's description for MLflow (markdown): a sentence, a table of the facts that have a value, and the
    result."""
    rows = "\n".join(f"| {name} | {markdown_code(value.replace('|', '/'))} |" for name, value in facts.items() if value)
    return f"{sentence}\n\n| | |\n|---|---|\n{rows}\n\n**Result:** {result}\n"


_IN_NOTE = ("held_out", "kl", "speed", "overlap", "lost", "best", "hint")
"""Keys of the results that the run's description in MLflow contains."""


def result_text(status: str, summary: Summary | None, ended: str = "") -> str:
    """Return a text about the state and the results of a run. Without a `summary`, it has no results. `ended`: reason
    why the run ended before its last step, or empty."""
    why = f": {markdown_code(ended[:400])}" if ended else ""
    if summary is None:
        return f"{status.lower()}{why}"
    shown = [line for line in summary_lines(summary) if line.key in _IN_NOTE]
    results = [f"{line.label} {line.text}" for line in shown]
    return "; ".join([f"{status.lower()} after {summary.steps} steps in {summary.wall_s:.0f} s{why}", *results])

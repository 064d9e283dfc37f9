"""What Slurm's environment says of the job that this process is in: for tags, and for people. Standard library only."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class SlurmJob:
    """One attempt at a job."""

    job_id: str
    """With the number of its task, where it is one of an array: 12_3."""
    nodes: str
    """As Slurm writes them, those of every component of a heterogeneous job."""
    restarts: int
    """How often it was requeued."""
    submitted_from: str | None
    """The host on which it was submitted."""

    def tags(self) -> dict[str, str]:
        """For the run's tracking."""
        return {
            "slurm_job_id": self.job_id,
            "slurm_nodes": self.nodes,
            "slurm_restarts": str(self.restarts),
        }


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """The job that an environment is of; None outside of Slurm."""
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


def tunnel(dashboard: str, login: str | None) -> str:
    """The command that brings a dashboard of this node to the person's own machine, through the host that the job was
    submitted from. `dashboard`: its address, as a URL."""
    address = urlsplit(dashboard)
    through = "" if login is None else f"-J {login} "
    return f"ssh -N {through}-L {address.port}:{address.hostname}:{address.port} {platform.node()}"


def dashboard_tags(dashboard: str, environment: Mapping[str, str]) -> dict[str, str]:
    """For the run's tracking: where its dashboard is, and, of a job, how it is reached from elsewhere."""
    job, tags = slurm_job(environment), {"dashboard": dashboard}
    return tags if job is None else tags | {"dashboard_tunnel": tunnel(dashboard, job.submitted_from)}

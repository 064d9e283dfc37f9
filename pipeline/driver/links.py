"""Where a person can watch a run that goes on. May import pipeline.config and pipeline.observe."""

from __future__ import annotations

import os

from pipeline.config.run import RunConfig
from pipeline.observe.slurm_job import slurm_job, tunnel
from pipeline.observe.tracking import how_to_open


def terminal_links(config: RunConfig, dashboard: str | None) -> dict[str, str]:
    """What the terminal shows. `dashboard`: the address of Dask's `/status`, where there is one."""
    links = {}
    if dashboard is not None:
        links["Graph"] = f"{dashboard.removesuffix('/status')}/stageline"
        links["Dask dashboard"] = dashboard
        job = slurm_job(os.environ)
        if job is not None:
            links["to see it from elsewhere"] = tunnel(dashboard, job.submitted_from)
    return links | _tracking(config)


def page_links(config: RunConfig, dashboard: str) -> dict[str, str]:
    """What the run's own page on that dashboard shows."""
    root = dashboard.removesuffix("/status")
    links = {"Task stream": dashboard, "Dask's graph": f"{root}/graph", "Groups": f"{root}/groups"}
    return links | _tracking(config)


def _tracking(config: RunConfig) -> dict[str, str]:
    return {} if config.tracking.uri is None else {"MLflow": how_to_open(config.tracking.uri)}

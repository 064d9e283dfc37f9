"""Where a person can look at a run while it goes on: addresses, and the run's page on Dask's dashboard.

May import pipeline.config, pipeline.driver.{cluster, results, run_view} and below; Bokeh is loaded where there is a
dashboard.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import Cluster
from pipeline.driver.results import watch_runs
from pipeline.driver.run_view import RunView
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.status import NodeState
from pipeline.observe.graph_view import GangView, node_views
from pipeline.observe.history import History
from pipeline.observe.journal import run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.recorded_view import gang_views, ordered, role_gangs
from pipeline.observe.slurm_job import slurm_job, tunnel
from pipeline.workers.messages import worker_name
from storage.weights import WeightBoard


def links(config: RunConfig, workers: Cluster) -> dict[str, str]:
    """Where a person can watch the run."""
    found = {}
    if workers.dashboard is not None:
        found["Graph"] = f"{workers.dashboard.removesuffix('/status')}/stageline"
        found["Dask dashboard"] = workers.dashboard
        job = slurm_job(os.environ)
        if job is not None:
            found["to see it from elsewhere"] = tunnel(workers.dashboard, job.submitted_from)
    return found | dict(watch_runs(config))


def open_progress(config: RunConfig, screen: Screen, links: Mapping[str, str], first_step: int) -> Progress:
    """The display of the run, with the workers that are to come up."""
    gangs = config.gangs()
    return Progress(
        config.name,
        config.steps,
        links,
        console=screen.console,
        first_step=first_step,
        workers={worker_name(gang.name, index): gang.name for gang in gangs for index in range(gang.workers)},
        together=ordered(gangs),
        json_lines=screen.json_lines,
    )


def first_start(config: RunConfig, now: float) -> float:
    """When the run's first driver began, in seconds since the epoch; `now` where this is it."""
    return min(run_starts(RunPaths(config.run_dir).events), default=now)


def baseline(history: History) -> list[tuple[int, float]]:
    """(version, mean score) of the first evaluated version and the latest: where a run that goes on was."""
    versions = history.evaluated_versions()
    found = (history.evaluation(version) for version in dict.fromkeys((*versions[:1], *versions[-1:])))
    return [(evaluation.version, evaluation.mean) for evaluation in found if evaluation is not None]


def at_work(config: RunConfig, dispatch: Dispatch, flow: Flow, seen: NodeEvents) -> tuple[GangView, ...]:
    """What each gang does, or waits for, now."""
    gangs = config.gangs()
    busy = [status for status in dispatch.statuses() if status.state in (NodeState.RUNNING, NodeState.QUEUED)]
    nodes = node_views(busy, role_gangs(gangs), seen, flow.admitted)
    return gang_views(gangs, nodes, dispatch.waits(), dispatch.is_up)


def page(
    config: RunConfig,
    workers: Cluster,
    dispatch: Dispatch,
    flow: Flow,
    history: History,
    board: WeightBoard | None,
    seen: NodeEvents,
) -> RunView | None:
    """The run's page on Dask's dashboard, where there is one."""
    if workers.dashboard is None:
        return None
    root = workers.dashboard.removesuffix("/status")
    others = {"Task stream": workers.dashboard, "Dask's graph": f"{root}/graph", "Groups": f"{root}/groups"}
    open_page = importlib.import_module("pipeline.driver.dashboard").open_page  # loads Bokeh
    view: RunView = open_page(
        config, workers.scheduler, dispatch, flow, history.ledger, board, seen, others | dict(watch_runs(config))
    )
    return view

"""Live views of a run: the state behind its page on Dask's dashboard, the markers, the links, and the terminal display.

    driver's thread, once a second:   update() ──► markers
                                        └── if a view was requested in the last seconds ──► GraphView
    the dashboard's loop:             await request_view() ──► waits for the next update() ──► GraphView

Only the driver's thread reads dispatch, flow, ledger and board. The dashboard's loop gets a frozen `GraphView`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import Cluster
from pipeline.driver.graph_markers import GraphMarkers, marker_states
from pipeline.driver.results import experiment_page, tracking_links
from pipeline.graph.display import NodeState, ObservedDispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec
from pipeline.observe.graph_page import log_names
from pipeline.observe.graph_view import (
    CurveCache,
    GangView,
    GraphView,
    RunFacts,
    VersionView,
    gang_views,
    gangs_by_role,
    node_views,
    nodes_to_show,
    ordered_gang_names,
)
from pipeline.observe.history import History
from pipeline.observe.journal import read_run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.provenance import slurm_job, tunnel_command
from pipeline.workers.messages import worker_name
from storage.ledger import Ledger
from storage.weights import WeightBoard

_REQUEST_AGE_S = 5.0
"""Seconds after a request during which each `update` makes a new view."""
_TIMEOUT_S = 3.0
"""Longest time that a request waits for the driver's next `update`."""
_MAX_READS = 64
"""Maximum number of commits that one `update` reads for the curves. A long run that is resumed has more commits, which
are read by several updates."""


class RunView:
    """Owns the newest view of a run."""

    def __init__(
        self,
        facts: RunFacts,
        spec: GraphSpec,
        gangs: Collection[Gang],
        dispatch: ObservedDispatch,
        flow: Flow,
        ledger: Ledger,
        board: WeightBoard | None,
        events: NodeEvents,
        markers: GraphMarkers,
        logs: Path,
    ) -> None:
        self._facts = facts
        self._logs = logs
        self._spec = spec
        self._gangs = gangs
        self._dispatch = dispatch
        self._flow = flow
        self._board = board
        self._events = events
        self._markers = markers
        self._curves = CurveCache(spec, ledger)
        self._version_bytes: dict[int, int] = {}
        self._last_request_s = float("-inf")
        self._last_view_s = float("-inf")
        self._latest: GraphView | None = None

    def update(self) -> None:
        """Update the markers, and make a new view if one was requested in the last `_REQUEST_AGE_S`. The driver's
        thread calls this method once a second."""
        statuses, admitted = self._dispatch.statuses(), self._flow.num_admitted_steps
        self._markers.replace_markers(marker_states(self._spec, statuses, admitted))
        if time.monotonic() - self._last_request_s > _REQUEST_AGE_S:
            return
        shown = nodes_to_show(self._spec, statuses, admitted)
        nodes = node_views(shown, gangs_by_role(self._gangs), self._events, admitted)
        done = self._flow.num_trained_steps
        self._latest = GraphView(
            facts=replace(self._facts, logs=log_names(self._logs)),
            is_live=True,
            is_driven=True,
            is_finished=self._flow.is_finished,
            time_s=time.time(),
            steps_done=done,
            nodes=nodes,
            gangs=gang_views(self._gangs, nodes, self._dispatch.find_waits(), self._dispatch.is_up),
            versions=self._versions(),
            curves=self._curves.read_curves(done, _MAX_READS),
            incidents=tuple(self._events.incidents),
        )
        self._last_view_s = time.monotonic()

    async def request_view(self) -> GraphView | None:
        """Return a view that is at most a second older than this call. If needed, wait for the driver's next `update`.
        If there is no `update` within `_TIMEOUT_S`, return the last view, whose `time_s` tells its age. Return None if
        there is no view yet, because the workers are being started."""
        self._last_request_s = asked = time.monotonic()
        while self._last_view_s < asked - 1.0 and time.monotonic() < asked + _TIMEOUT_S:
            await asyncio.sleep(0.05)
        return self._latest

    def _versions(self) -> tuple[VersionView, ...]:
        """Return a view of each published version: its size and readers. Empty if weights are on other hosts only."""
        if self._board is None:
            return ()
        readers, available = self._flow.readers_by_version, self._board.available()
        self._version_bytes = {version: self._bytes_of_version(self._board, version) for version in available}
        return tuple(
            VersionView(version, self._version_bytes[version], readers.get(version, ())) for version in available
        )

    def _bytes_of_version(self, board: WeightBoard, version: int) -> int:
        if version in self._version_bytes:
            return self._version_bytes[version]
        manifest = board.manifest(version)
        return 0 if manifest is None else manifest.num_bytes


# ---- Links and display -----------------------------------------------------------------------------------


def watch_links(config: RunConfig, workers: Cluster) -> dict[str, str]:
    """Return label -> address at which the run can be watched, or the command that opens it."""
    links = {}
    if workers.dashboard is not None:
        links["Graph"] = f"{workers.dashboard.removesuffix('/status')}/stageline"
        links["Dask dashboard"] = workers.dashboard
        job = slurm_job(os.environ)
        if job is not None:
            links["to see it from elsewhere"] = tunnel_command(workers.dashboard, job.submitted_from)
    page = experiment_page(config)  # a new experiment is shown as soon as it exists
    return links if page is None else links | {"MLflow": page}


def open_progress(config: RunConfig, screen: Screen, links: Mapping[str, str], first_step: int) -> Progress:
    """Open the terminal display of the run, with the workers that will start. `first_step`: number of steps done."""
    gangs = config.gangs()
    return Progress(
        config.name,
        config.steps,
        links,
        console=screen.console,
        first_step=first_step,
        workers={worker_name(gang.name, index): gang.name for gang in gangs for index in range(gang.workers)},
        rebuilt_together=ordered_gang_names(gangs),
        json_lines=screen.json_lines,
        has_fixed_length=config.sampling.has_fixed_length,
    )


def first_driver_start_s(config: RunConfig, now: float) -> float:
    """Return the time at which the run's first driver started, in seconds since the epoch. Return `now` if this is the
    first driver."""
    return min(read_run_starts(RunPaths(config.run_dir).events), default=now)


def first_and_latest_means(history: History) -> list[tuple[int, float]]:
    """Return (version, mean score) of the first and of the latest evaluated version. Empty if no version has been
    evaluated, as in a run that starts."""
    versions = history.evaluated_versions()
    evaluations = (history.read_evaluation(version) for version in dict.fromkeys((*versions[:1], *versions[-1:])))
    return [(evaluation.version, evaluation.mean) for evaluation in evaluations if evaluation is not None]


def current_gang_views(
    config: RunConfig, dispatch: ObservedDispatch, flow: Flow, node_events: NodeEvents
) -> tuple[GangView, ...]:
    """Return what each gang is doing or waiting for."""
    gangs = config.gangs()
    busy = [status for status in dispatch.statuses() if status.state in (NodeState.RUNNING, NodeState.QUEUED)]
    nodes = node_views(busy, gangs_by_role(gangs), node_events, flow.num_admitted_steps)
    return gang_views(gangs, nodes, dispatch.find_waits(), dispatch.is_up)


def open_run_page(
    config: RunConfig,
    workers: Cluster,
    dispatch: ObservedDispatch,
    flow: Flow,
    history: History,
    board: WeightBoard | None,
    node_events: NodeEvents,
) -> RunView | None:
    """Add the run's page to Dask's dashboard, and return the view that the page shows. None if there is no
    dashboard."""
    if workers.dashboard is None:
        return None
    root = workers.dashboard.removesuffix("/status")
    others = {"Task stream": workers.dashboard, "Dask's graph": f"{root}/graph", "Groups": f"{root}/groups"}
    open_page = importlib.import_module("pipeline.driver.dashboard").open_page  # loads Bokeh
    view: RunView = open_page(
        config,
        workers.scheduler,
        dispatch,
        flow,
        history.ledger,
        board,
        node_events,
        others | dict(tracking_links(config)),
    )
    return view

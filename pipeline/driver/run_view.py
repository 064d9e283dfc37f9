"""Live views of a run: the state behind its page on Dask's dashboard, the markers, the links, and the terminal display.

    driver's thread, once a second:   look() ──► markers
                                        └── if the page was requested in the last seconds ──► GraphView
    the dashboard's loop:             await fresh() ──► requests a view, and waits for the next look()

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
from pipeline.driver.results import watch_runs
from pipeline.graph.display import NodeState, ObservedDispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec
from pipeline.observe.graph_page import log_names
from pipeline.observe.graph_view import (
    CurveCache,
    Facts,
    GangView,
    GraphView,
    VersionView,
    gang_views,
    node_views,
    ordered,
    role_gangs,
    shown_steps,
)
from pipeline.observe.history import History
from pipeline.observe.journal import run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.provenance import slurm_job, tunnel
from pipeline.workers.messages import worker_name
from storage.address import Address
from storage.ledger import Ledger
from storage.weights import WeightBoard

_ASKED_S = 5.0
"""Seconds after a request during which each `look` makes a new view."""
_TIMEOUT_S = 3.0
"""Longest time that a request waits for the driver's next `look`."""
_READS = 64
"""Most commits that one `look` reads for the curves, since a long run that is resumed has many."""


class RunView:
    """Owns the newest view of a run."""

    def __init__(
        self,
        facts: Facts,
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
        self._sizes: dict[int, int] = {}
        self._asked = float("-inf")
        self._made = float("-inf")
        self._latest: GraphView | None = None

    def look(self) -> None:
        """Update the markers, and make a new view if one was requested. The driver's thread calls it once a second."""
        statuses, admitted = self._dispatch.statuses(), self._flow.admitted
        self._markers.show(marker_states(self._spec, statuses, admitted))
        if time.monotonic() - self._asked > _ASKED_S:
            return
        shown = shown_steps(self._spec, statuses, admitted)
        nodes = node_views(shown, role_gangs(self._gangs), self._events, admitted)
        done = self._flow.steps_done
        self._latest = GraphView(
            facts=replace(self._facts, logs=log_names(self._logs)),
            live=True,
            driven=True,
            finished=self._flow.finished,
            at=time.time(),
            steps_done=done,
            nodes=nodes,
            gangs=gang_views(self._gangs, nodes, self._dispatch.waits(), self._dispatch.is_up),
            versions=self._versions(),
            curves=self._curves.curves(done, _READS),
            incidents=tuple(self._events.incidents),
        )
        self._made = time.monotonic()

    async def fresh(self) -> GraphView | None:
        """Return a view that is at most a second older than this call. If needed, wait for the driver's next `look`. If
        that does not come soon, return the last view, whose `at` tells its age. None while the workers are being
        started."""
        self._asked = asked = time.monotonic()
        while self._made < asked - 1.0 and time.monotonic() < asked + _TIMEOUT_S:
            await asyncio.sleep(0.05)
        return self._latest

    def _versions(self) -> tuple[VersionView, ...]:
        """Return the published versions. Empty if weights are on other hosts only."""
        if self._board is None:
            return ()
        readers, there = self._flow.readers, self._board.available()
        self._sizes = {version: self._size(self._board, version) for version in there}
        return tuple(VersionView(version, self._sizes[version], readers.get(version, _NOBODY)) for version in there)

    def _size(self, board: WeightBoard, version: int) -> int:
        if version in self._sizes:
            return self._sizes[version]
        manifest = board.manifest(version)
        return 0 if manifest is None else manifest.num_bytes


_NOBODY: tuple[Address, ...] = ()


# ---- Links and display -----------------------------------------------------------------------------------


def links(config: RunConfig, workers: Cluster) -> dict[str, str]:
    """Return the addresses at which the run can be watched, by the label to show."""
    found = {}
    if workers.dashboard is not None:
        found["Graph"] = f"{workers.dashboard.removesuffix('/status')}/stageline"
        found["Dask dashboard"] = workers.dashboard
        job = slurm_job(os.environ)
        if job is not None:
            found["to see it from elsewhere"] = tunnel(workers.dashboard, job.submitted_from)
    return found | dict(watch_runs(config))


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
        together=ordered(gangs),
        json_lines=screen.json_lines,
    )


def first_start(config: RunConfig, now: float) -> float:
    """Return the start of the run's first driver, in seconds since the epoch. `now` if this is the first."""
    return min(run_starts(RunPaths(config.run_dir).events), default=now)


def baseline(history: History) -> list[tuple[int, float]]:
    """Return (version, mean score) of the first and the latest evaluated version of a resumed run."""
    versions = history.evaluated_versions()
    found = (history.evaluation(version) for version in dict.fromkeys((*versions[:1], *versions[-1:])))
    return [(evaluation.version, evaluation.mean) for evaluation in found if evaluation is not None]


def at_work(config: RunConfig, dispatch: ObservedDispatch, flow: Flow, seen: NodeEvents) -> tuple[GangView, ...]:
    """Return what each gang is doing or waiting for."""
    gangs = config.gangs()
    busy = [status for status in dispatch.statuses() if status.state in (NodeState.RUNNING, NodeState.QUEUED)]
    nodes = node_views(busy, role_gangs(gangs), seen, flow.admitted)
    return gang_views(gangs, nodes, dispatch.waits(), dispatch.is_up)


def page(
    config: RunConfig,
    workers: Cluster,
    dispatch: ObservedDispatch,
    flow: Flow,
    history: History,
    board: WeightBoard | None,
    seen: NodeEvents,
) -> RunView | None:
    """Add the run's page to Dask's dashboard. Return None if there is no dashboard."""
    if workers.dashboard is None:
        return None
    root = workers.dashboard.removesuffix("/status")
    others = {"Task stream": workers.dashboard, "Dask's graph": f"{root}/graph", "Groups": f"{root}/groups"}
    open_page = importlib.import_module("pipeline.driver.dashboard").open_page  # loads Bokeh
    view: RunView = open_page(
        config, workers.scheduler, dispatch, flow, history.ledger, board, seen, others | dict(watch_runs(config))
    )
    return view

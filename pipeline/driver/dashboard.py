"""A run's page on Dask's own dashboard: `/stageline`, beside `/status` and `/graph`.

    GET /stageline             the page (observe.graph_page)
    GET /stageline/view        the part of it that changes, once a second while somebody looks
    GET /stageline/logs/NAME   the end of a worker's log

Loads Bokeh, by Dask's pages: imported only where there is a dashboard. May import distributed, tornado,
pipeline.config, pipeline.driver.{dask_pages, graph_markers, run_view}, pipeline.graph, pipeline.observe and storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Scheduler
from distributed.dashboard.scheduler import template_variables
from tornado import web

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.dask_pages import add_pages
from pipeline.driver.graph_markers import GraphMarkers
from pipeline.driver.run_view import RunView
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.observe.graph_page import HEADERS, PATH, fragment, page
from pipeline.observe.graph_view import Facts
from pipeline.observe.log_files import log_end
from pipeline.observe.node_events import NodeEvents
from storage.ledger import Ledger
from storage.weights import WeightBoard


class _Handler(web.RequestHandler):
    """Answers from the record of a run."""

    def initialize(self, view: RunView) -> None:
        self._view = view

    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)


class _Page(_Handler):
    async def get(self) -> None:
        """The page, whole."""
        view = await self._view.fresh()
        if view is None:
            raise web.HTTPError(503, reason="The workers are being started")
        self.finish(page(view))


class _Fragment(_Handler):
    async def get(self) -> None:
        """What changes of it."""
        view = await self._view.fresh()
        if view is None:
            raise web.HTTPError(503, reason="The workers are being started")
        self.finish(fragment(view))


class _Log(web.RequestHandler):
    """Answers with the end of a log that lies in the run's directory."""

    def initialize(self, directory: Path) -> None:
        self._directory = directory

    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.set_header("Content-Type", "text/plain; charset=utf-8")

    def get(self, name: str) -> None:
        """Plain text; only of a file that is named among the logs."""
        text = log_end(self._directory, name)
        if text is None:
            raise web.HTTPError(404)
        self.finish(text)


def open_page(
    config: RunConfig,
    scheduler: Scheduler,
    dispatch: Dispatch,
    flow: Flow,
    ledger: Ledger,
    board: WeightBoard | None,
    events: NodeEvents,
    links: Mapping[str, str],
) -> RunView:
    """Puts a run on the dashboard of a scheduler in this process: its markers, its page, and a tab for that on Dask's
    pages. `events` is given the journal's events as they are written; `links` are shown on the page."""
    logs = RunPaths(config.run_dir).logs
    facts = Facts(config.name, config.steps, config.staleness, tuple(links.items()))
    markers = GraphMarkers(scheduler)
    view = RunView(facts, config.graph(), config.gangs(), dispatch, flow, ledger, board, events, markers, logs)
    scheduler.loop.add_callback(_add_page, scheduler, view, logs)
    return view


def _add_page(scheduler: Scheduler, view: RunView, logs: Path) -> None:
    routes: list[tuple[str, Any, dict[str, Any]]] = [
        (f"/{PATH}", _Page, {"view": view}),
        (f"/{PATH}/view", _Fragment, {"view": view}),
        (f"/{PATH}/logs/([^/]+)", _Log, {"directory": logs}),
    ]
    scheduler.http_application.add_handlers(".*", routes)
    template_variables(scheduler)["pages"].append(PATH)
    add_pages(scheduler)

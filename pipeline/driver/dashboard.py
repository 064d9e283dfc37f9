"""The run's page on Dask's dashboard, and our versions of two of Dask's own pages. A marker is a Dask task that only
shows the state of a node (`graph_markers.py`).

    GET /stageline             the page (observe.graph_page)
    GET /stageline/view        the page's changing part, once a second while a browser shows the page
    GET /stageline/logs/NAME   the end of a worker's log
    /graph                     only the markers, with a column per step and a row per stage. Dask's page would put each
                               task one column to the right of its dependencies, and all tasks without dependencies into
                               one endless column
    /groups                    Dask's drawing, in another order. Dask's page orders the groups (`dask.order`) as if they
                               had no dependencies, and fails if a group comes before a group that it depends on

Loads Bokeh, so it is imported only if there is a dashboard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from bokeh.models import FixedTicker
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, TaskGraph, TaskGroupGraph, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from distributed.diagnostics.graph_layout import GraphLayout
from tornado import web
from tornado.ioloop import IOLoop

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.graph_markers import GraphMarkers, marker_stage
from pipeline.driver.run_view import RunView
from pipeline.graph.display import STAGE_ORDER, ObservedDispatch
from pipeline.graph.flow import Flow
from pipeline.observe.graph_page import HEADERS, PATH, read_log_end, render_fragment, render_page
from pipeline.observe.graph_view import GraphView, RunFacts
from pipeline.observe.node_events import NodeEvents
from storage.ledger import Ledger
from storage.weights import WeightBoard


class _Handler(web.RequestHandler):
    """Base of the handlers: it sets the headers of all answers."""

    def set_default_headers(self) -> None:
        for name, value in HEADERS.items():
            self.set_header(name, value)


class _Page(_Handler):
    """Sends the whole page, or its changing part."""

    def initialize(self, view: RunView, render: Callable[[GraphView], str]) -> None:
        self._view, self._render = view, render

    async def get(self) -> None:
        view = await self._view.request_view()
        if view is None:
            raise web.HTTPError(503, reason="The workers are being started")
        self.finish(self._render(view))


class _Log(_Handler):
    """Answers a request for a log file of the run: sends the last part of the file to the browser."""

    def initialize(self, directory: Path) -> None:
        self._directory = directory

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Type", "text/plain; charset=utf-8")

    def get(self, name: str) -> None:
        """Send the last 64 KiB of a log file as plain text. Send 404 if the run has no log of this name."""
        text = read_log_end(self._directory, name)
        if text is None:
            raise web.HTTPError(404)
        self.finish(text)


def open_page(
    config: RunConfig,
    scheduler: Scheduler,
    dispatch: ObservedDispatch,
    flow: Flow,
    ledger: Ledger,
    board: WeightBoard | None,
    events: NodeEvents,
    links: Mapping[str, str],
) -> RunView:
    """Add a run to the dashboard of a scheduler in this process: its markers, its page, and a tab for the page.
    `events` receives the journal's events as they are written. The page shows `links`."""
    logs = RunPaths(config.run_dir).logs
    facts = RunFacts(config.name, config.steps, config.staleness, tuple(links.items()))
    markers = GraphMarkers(scheduler)
    view = RunView(facts, config.graph(), config.gangs(), dispatch, flow, ledger, board, events, markers, logs)
    scheduler.loop.add_callback(_add_page, scheduler, view, logs)
    return view


def _add_page(scheduler: Scheduler, view: RunView, logs: Path) -> None:
    routes: list[tuple[str, Any, dict[str, Any]]] = [
        (f"/{PATH}", _Page, {"view": view, "render": render_page}),
        (f"/{PATH}/view", _Page, {"view": view, "render": render_fragment}),
        (f"/{PATH}/logs/([^/]+)", _Log, {"directory": logs}),
    ]
    scheduler.http_application.add_handlers(".*", routes)
    template_variables(scheduler)["pages"].append(PATH)
    add_pages(scheduler)


# ---- Our versions of Dask's pages ------------------------------------------------------------------------

_ORDERS = 12
"""Number of horizontal positions for nodes in the column that the page draws for one step. A node's position is the
second number of its `graph.Node.priority`."""
_SHIFT = 0.07
"""Distance by which nodes at odd positions in the column of a step are moved to the right, so that edges do not cross
other nodes. The unit is the distance between two steps."""
_SPREAD = 0.7
"""Fraction of a row's height over which the shards of a stage are spread."""


class StepLayout(GraphLayout):
    """Owns the positions of markers, and the changes that the page must still draw."""

    def update_graph(self, scheduler: Scheduler, *, tasks: Any = None, **more: Any) -> None:
        """Give a position to each new marker. Ignore tasks that are not markers."""
        for key in tasks or ():
            stage, task = marker_stage(key), scheduler.tasks.get(key)
            if stage is None or task is None or key in self.x:
                continue
            scheduled_step, order = task.priority
            self.x[key] = scheduled_step + order / _ORDERS + _SHIFT * (order % 2)
            self.y[key] = -STAGE_ORDER.index(stage) - _SPREAD * (1 - 1 / (1 + key[1]))
            self.index[key] = self.next_index
            self.next_index += 1
            self.new.append(key)
            for parent in task.dependencies:
                self.index_edge[parent.key, key] = self.next_edge_index
                self.next_edge_index += 1
                self.new_edges.append((parent.key, key))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **more: Any) -> None:
        """Handle a state change of a marker (a Dask task that only shows the state of a node). Ignore other tasks."""
        if key in self.index:
            super().transition(key, start, finish, *args, **more)


class StepGraph(TaskGraph):
    """One browser's view of Dask's dashboard page /graph. It is Dask's own drawing of tasks, with positions from
    `StepLayout`: a column for each step of the run, and a row for each stage."""

    layout: GraphLayout

    def __init__(self, scheduler: Scheduler, **more: Any) -> None:
        super().__init__(scheduler, **more)
        scheduler.remove_plugin(name=self.layout.name)
        self.layout = StepLayout(scheduler)
        scheduler.add_plugin(self.layout)
        self.root.xaxis.visible = self.root.yaxis.visible = True
        self.root.xaxis.axis_label = "step"
        self.root.yaxis.ticker = FixedTicker(ticks=[-row for row in range(len(STAGE_ORDER))])
        self.root.yaxis.major_label_overrides = {-row: stage for row, stage in enumerate(STAGE_ORDER)}


class OrderedGroups(TaskGroupGraph):
    """One browser's view of Dask's dashboard page /groups. It is Dask's own drawing of task groups, in another order:
    each group is to the right of all groups that it depends on."""

    def update_layout(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two mappings: group -> its position, and group -> the arrows that end at it. A group is one column to
        the right of its rightmost dependency."""
        groups = self.scheduler.task_groups
        needs = {
            name: {other.name for other in group.dependencies if other.name != name and other.name in groups}
            for name, group in groups.items()
        }
        x: dict[str, int] = {}
        height: dict[int, int] = {}
        nodes, arrows = {}, {}
        for name in TopologicalSorter(needs).static_order():
            x[name] = 1 + max((x[other] for other in needs[name]), default=-1)
            height[x[name]] = height.get(x[name], -1) + 1
            nodes[name] = {"x": x[name], "y": height[x[name]]}
            arrows[name] = {"nstart": needs[name], "nend": [name] * len(needs[name])}
        return nodes, arrows


def _document(kind: Callable[..., Any], title: str) -> Callable[..., None]:
    def fill(scheduler: Scheduler, extra: Any, doc: Any) -> None:
        component = kind(scheduler, sizing_mode="stretch_both")
        component.update()
        doc.title = title
        add_periodic_callback(doc, component, 200)
        doc.add_root(component.root)
        doc.template = env.get_template("simple.html")
        doc.template_variables.update(extra)
        doc.theme = BOKEH_THEME

    return fill


def add_pages(scheduler: Scheduler) -> None:
    """Serve our versions of Dask's pages instead of Dask's own. Must be called in the scheduler's loop."""
    pages = {
        f"/{prefix}{name}": _document(kind, title)
        for prefix in ("", "individual-")
        for name, kind, title in (
            ("graph", StepGraph, "Dask: Task Graph"),
            ("groups", OrderedGroups, "Dask: Task Groups Graph"),
        )
    }
    application = BokehApplication(pages, scheduler, prefix="", template_variables=template_variables(scheduler))
    application.initialize(IOLoop.current())
    application.start()
    scheduler.http_application.applications.insert(0, application)

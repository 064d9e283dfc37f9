"""Two of Dask's own pages, with places for our nodes: `/graph` and `/groups`.

    /graph    the markers alone, a column for each step and a row for each stage (Dask's own puts each task one to the
              right of what it depends on, and all that depends on nothing into a column that grows without end)
    /groups   as Dask draws it, in an order of its own: Dask's asks `dask.order`, which takes no dependencies any more,
              and fails at the first group that comes before one it depends on

Loads Bokeh. May import bokeh, distributed, tornado, pipeline.driver.task_keys and pipeline.graph.
"""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Any

from bokeh.models import FixedTicker
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, TaskGraph, TaskGroupGraph, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from distributed.diagnostics.graph_layout import GraphLayout
from tornado.ioloop import IOLoop

from pipeline.driver.task_keys import marker_stage
from pipeline.graph.status import ROWS

_ORDERS = 12
"""Nodes of a step have orders 0 to 11 (`graph.Node.priority`): where they stand in its column."""
_SHIFT = 0.07
"""Of every second one, so that an edge does not run through the nodes between its ends."""
_SPREAD = 0.7
"""Of a row's height, over which the shards of a stage are spread."""


class StepLayout(GraphLayout):
    """Owns the places of markers, and the changes that the page has still to draw."""

    def update_graph(self, scheduler: Scheduler, *, tasks: Any = None, **given: Any) -> None:
        """Tasks were added: those that are markers get a place."""
        for key in tasks or ():
            stage, task = marker_stage(key), scheduler.tasks.get(key)
            if stage is None or task is None or key in self.x:
                continue
            turn, order = task.priority
            self.x[key] = turn + order / _ORDERS + _SHIFT * (order % 2)
            self.y[key] = -ROWS.index(stage) - _SPREAD * (1 - 1 / (1 + key[1]))
            self.index[key] = self.next_index
            self.next_index += 1
            self.new.append(key)
            for parent in task.dependencies:
                self.index_edge[parent.key, key] = self.next_edge_index
                self.next_edge_index += 1
                self.new_edges.append((parent.key, key))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **given: Any) -> None:
        """A task changed its state."""
        if key in self.index:
            super().transition(key, start, finish, *args, **given)


class StepGraph(TaskGraph):
    """Owns a look at the graph: Dask's drawing, our places."""

    layout: GraphLayout

    def __init__(self, scheduler: Scheduler, **given: Any) -> None:
        super().__init__(scheduler, **given)
        scheduler.remove_plugin(name=self.layout.name)
        self.layout = StepLayout(scheduler)
        scheduler.add_plugin(self.layout)
        self.root.xaxis.visible = self.root.yaxis.visible = True
        self.root.xaxis.axis_label = "step"
        self.root.yaxis.ticker = FixedTicker(ticks=[-row for row in range(len(ROWS))])
        self.root.yaxis.major_label_overrides = {-row: stage for row, stage in enumerate(ROWS)}


class OrderedGroups(TaskGroupGraph):
    """Owns a look at the groups: Dask's drawing, in an order that the dependencies allow."""

    def update_layout(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Place of each group, and the arrows that end there: one to the right of all it depends on."""
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


def _document(kind: Callable[..., Any], title: str, page: str) -> Callable[..., None]:
    def fill(scheduler: Scheduler, extra: Any, doc: Any) -> None:
        component = kind(scheduler, sizing_mode="stretch_both")
        component.update()
        doc.title = title
        add_periodic_callback(doc, component, 200)
        doc.add_root(component.root)
        doc.template = env.get_template(page)
        doc.template_variables.update(extra)
        doc.theme = BOKEH_THEME

    return fill


def add_pages(scheduler: Scheduler) -> None:
    """Puts these pages before Dask's of the same name. Must be called in the scheduler's loop."""
    pages = {
        "/graph": _document(StepGraph, "Dask: Task Graph", "simple.html"),
        "/groups": _document(OrderedGroups, "Dask: Task Groups Graph", "simple.html"),
        "/individual-graph": _document(StepGraph, "Dask: Task Graph", "simple.html"),
        "/individual-groups": _document(OrderedGroups, "Dask: Task Groups Graph", "simple.html"),
    }
    application = BokehApplication(pages, scheduler, prefix="", template_variables=template_variables(scheduler))
    application.initialize(IOLoop.current())
    application.start()
    scheduler.http_application.applications.insert(0, application)

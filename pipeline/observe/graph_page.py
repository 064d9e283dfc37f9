"""The page `/stageline` as HTML, for runs in progress and for ended runs.

`render_page` renders the whole page. `render_fragment` renders the part that an open page fetches again every second.
`grid_svg` draws the steps and stages with the staleness edges. A script in the browser draws the learning curves. The
report uses the same script. All text from the run is escaped. The functions are pure functions of `GraphView`, except
`log_names` and `read_log_end`, which read the workers' log files.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from pipeline.graph.display import NodeState
from pipeline.observe.curves import panels_to_draw
from pipeline.observe.graph_view import (
    GangView,
    GraphView,
    NodeView,
    VersionView,
    short_address,
    stages_in_order,
    work_text,
)
from pipeline.observe.html import content_security_policy, read_static, to_embedded_json
from pipeline.observe.metric_catalogue import PANELS
from storage.address import Address

PATH = "stageline"
"""Path of the page below the server's root. The links on the page begin with this path."""
REFRESH_S = 1.0
"""Seconds between two fetches of an open page. A page in a hidden browser tab does not fetch."""
_SHOWN_NODES = 8
"""Maximum number of nodes per gang that are listed by name. For all further nodes, only their number is shown."""
_STYLE = ("base.css", "figures.css", "stageline.css")
_SCRIPT = ("text.js", "dom.js", "curves.js", "stageline.js")
HEADERS = {
    "Content-Security-Policy": content_security_policy(
        read_static(*_STYLE), read_static(*_SCRIPT), "connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of each response. With these headers a browser runs only the page's own script, even if a run's name or a
worker's message contains another script."""


def render_page(view: GraphView) -> str:
    """Return the whole page. A script on the page regularly fetches a new result of `render_fragment` from
    `PATH`/view."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(view.facts.name)} - Stageline</title><style>{read_static(*_STYLE)}</style></head><body><main>"
        f'<div id="view" data-from="{PATH}/view" data-every-ms="{1000 * REFRESH_S:.0f}">{render_fragment(view)}</div>'
        "</main>"
        f"<script>{read_static(*_SCRIPT)}</script></body></html>"
    )


def render_fragment(view: GraphView) -> str:
    """Return the part of the page that changes during a run. An open page fetches the newest fragment and shows it in
    place of the old one."""
    facts = view.facts
    learning = {
        "runs": [{"name": facts.name, "curves": view.curves}],
        "panels": panels_to_draw([view.curves], PANELS[:2]),
        "comparison": None,
    }
    graph = f"<div class=graph>{stage_labels_svg(view)}<div class=scroll>{grid_svg(view)}</div></div>"
    sections = [
        f"<h1>{escape(facts.name)} <span class=dim>step {view.steps_done} of {facts.steps}, {_state(view)}</span></h1>",
        f"<nav>{_links(view)}</nav>",
        f"<h2>Graph <span class=dim>staleness bound {facts.staleness}: generation waits for the weights along the "
        f"violet edges</span>{_legend(view)}</h2>",
        graph if view.nodes else "<p class=dim>No step is open.</p>",
        "<div class=two>",
        f"<section><h2>Gangs</h2>{_gangs(view)}</section>",
        f"<section><h2>Weights {'in memory' if view.is_live else 'still to be read'}</h2>{_versions(view.versions)}",
        "</section>",
        "</div><div class=two>",
        "<section><h2>Learning curves</h2>"
        f'<div class="learning" data-curves="{escape(to_embedded_json(learning))}"></div>'
        f"{'' if learning['panels'] else '<p class=dim>No step is finished yet.</p>'}</section>",
        f"<section><h2>Events</h2>{_incidents(view)}</section></div>",
    ]
    return "".join(sections)


def _state(view: GraphView) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.time_s))
    if view.is_finished:
        return f"finished {clock}"
    if view.is_live:
        return f"running, {clock}"
    return f"{'running in another process' if view.is_driven else 'not finished'}; latest event {clock}"


def _links(view: GraphView) -> str:
    shown = []
    for label, address in view.facts.links:
        if address.startswith(("http://", "https://")):
            shown.append(f'<a href="{escape(address)}">{escape(label)}</a>')
        else:
            shown.append(f"{escape(label)}: <code>{escape(address)}</code>")
    logs = [f'<a href="{PATH}/logs/{quote(name, safe="")}">{escape(name)}</a>' for name in view.facts.logs]
    return "".join(shown) + (f"logs: {''.join(logs)}" if logs else "")


def _legend(view: GraphView) -> str:
    words = {
        NodeState.DONE: "committed",
        NodeState.RUNNING: "running" if view.is_driven else "running when the driver ended",
        NodeState.QUEUED: "queued on a busy worker",
        NodeState.READY: "ready, waits for a worker",
        NodeState.WAITING: "waits for parents",
    }
    return "".join(f'<span class="key {state}"></span><span class=dim>{word}</span>' for state, word in words.items())


def _gangs(view: GraphView) -> str:
    def does(gang: GangView) -> str:
        if gang.running_nodes:
            return work_text(gang, view.time_s, _SHOWN_NODES)
        if not gang.is_up:
            return "not up"
        return (
            f"idle: {gang.wait_reason}"
            if view.is_driven and gang.wait_reason
            else gang.wait_reason or "nothing left to do"
        )

    rows = [
        f"<tr><td>{escape(gang.name)}</td><td class=dim>{gang.workers} x {escape(', '.join(gang.roles))}</td>"
        f"<td>{escape(does(gang))}</td></tr>"
        for gang in view.gangs
    ]
    return f"<table>{''.join(rows)}</table>"


def _versions(versions: tuple[VersionView, ...]) -> str:
    if not versions:
        return "<p class=dim>None.</p>"
    rows = []
    for one in versions:
        size = "" if one.num_bytes is None else f"{one.num_bytes / 1e6:.1f} MB"
        names = ", ".join(map(short_address, one.readers[:4])) + (
            f" and {len(one.readers) - 4} more" if one.readers[4:] else ""
        )
        rows.append(f"<tr><td>v{one.version}</td><td>{size}</td><td>{escape(names) or 'nobody any more'}</td></tr>")
    return f"<table><tr><th>version</th><th></th><th>still to be read by</th></tr>{''.join(rows)}</table>"


def _incidents(view: GraphView) -> str:
    if not view.incidents:
        return "<p class=dim>No alarm, loss, failure or warning.</p>"
    rows = [
        f"<tr><td class=dim>{time.strftime('%H:%M:%S', time.localtime(one.at))}</td>"
        f"<td{' class=bad' if one.kind in _BAD else ''}>{escape(one.kind)}</td>"
        f"<td>{escape(one.where)}</td><td>{escape(one.text[:400])}</td></tr>"
        for one in reversed(view.incidents)
    ]
    return f"<table><tr><th>time</th><th>event</th><th>where</th><th>details</th></tr>{''.join(rows)}</table>"


_BAD = frozenset({"alarm", "failed", "lost"})
"""Kinds of incidents that are shown in red."""


# ---- SVG drawings ----------------------------------------------------------------------------------------

LABEL_W, COLUMN_W, GAP, ROW_H, HEAD_H = 128, 92, 22, 26, 26
"""Sizes in pixels: width of the stage names, width of a column, gap between columns, height of a row, and height of the
step numbers."""
_SINGLE_CELLS = 12
"""Maximum number of rectangles in a cell. A cell with up to this many shards has one rectangle per shard. A cell with
more shards is drawn as one bar with a segment for each state."""
_ORDER = (NodeState.DONE, NodeState.RUNNING, NodeState.QUEUED, NodeState.READY, NodeState.WAITING)


def stage_labels_svg(view: GraphView) -> str:
    """Return an SVG drawing of the stage names. It is separate from `grid_svg`, so that the names stay in place while
    the grid is scrolled."""
    stages = stages_in_order(view.nodes)
    parts = _rows(stages, "stages", LABEL_W)
    for i, stage in enumerate(stages):
        parts.append(f'<text class="stage" x="6" y="{HEAD_H + i * ROW_H + 17}">{escape(stage)}</text>')
    return "".join([*parts, "</svg>"])


def _rows(stages: Sequence[str], kind: str, width: int) -> list[str]:
    """Return the beginning of an SVG drawing: a background with one row per stage. Every second row is shaded. `kind`
    is the drawing's CSS class."""
    height = HEAD_H + len(stages) * ROW_H + 6
    parts = [f'<svg class="{kind}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    for i in range(len(stages)):
        shade = " odd" if i % 2 else ""
        parts.append(f'<rect class="row{shade}" x="0" y="{HEAD_H + i * ROW_H}" width="{width}" height="{ROW_H}"/>')
    return parts


def grid_svg(view: GraphView) -> str:
    """Return an SVG drawing of the grid: one column per step, one row per stage. A cell shows the states of its shards.
    A staleness edge leads from each publication to the generation that waits for it."""
    stages = stages_in_order(view.nodes)
    cells: defaultdict[tuple[int, str], list[NodeView]] = defaultdict(list)
    for node in view.nodes:
        cells[node.scheduled_step, node.address.stage].append(node)
    columns = sorted({node.scheduled_step for node in view.nodes})
    x_of = {scheduled_step: i * (COLUMN_W + GAP) for i, scheduled_step in enumerate(columns)}
    y_of = {stage: HEAD_H + i * ROW_H for i, stage in enumerate(stages)}
    parts = [*_rows(stages, "steps", len(columns) * (COLUMN_W + GAP)), _ARROW]
    for scheduled_step in columns:
        head = "start" if scheduled_step < 0 else f"step {scheduled_step}"
        parts.append(f'<text class="head" x="{x_of[scheduled_step] + COLUMN_W / 2}" y="17">{head}</text>')
    states = {node.address: node.state for node in view.nodes}
    for (scheduled_step, stage), nodes in cells.items():
        parts.append(_cell(nodes, states, x_of[scheduled_step], y_of[stage]))
    parts += _staleness_edges(view, x_of, y_of)
    return "".join([*parts, "</svg>"])


_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" class="arrow"/></marker></defs>'
)


def _cell(nodes: Sequence[NodeView], states: Mapping[Address, NodeState], x: int, y: int) -> str:
    """Return the cell of one stage of one step at position (x, y), as SVG."""
    top, high = y + 4, ROW_H - 8
    counts = Counter(node.state for node in nodes)
    title = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    parts = [f"<g><title>{escape(_description(nodes, states) if len(nodes) <= _SINGLE_CELLS else title)}</title>"]
    if len(nodes) <= _SINGLE_CELLS:
        wide = COLUMN_W / len(nodes)
        for i, node in enumerate(nodes):
            lost = " lost" if node.num_losses else ""
            parts.append(_rect(x + i * wide, top, wide - (1 if len(nodes) > 1 else 0), high, node.state + lost))
    else:
        at = float(x)
        for state in _ORDER:
            wide = COLUMN_W * counts[state] / len(nodes)
            if wide:
                parts.append(_rect(at, top, wide, high, state))
            at += wide
    text = _cell_text(nodes, counts)
    parts.append(f'<text class="in" x="{x + COLUMN_W / 2}" y="{top + 13}">{text}</text></g>')
    return "".join(parts)


def _cell_text(nodes: Sequence[NodeView], counts: Mapping[NodeState, int]) -> str:
    if counts.get(NodeState.DONE, 0) < len(nodes):
        return f"{counts.get(NodeState.DONE, 0)}/{len(nodes)}" if len(nodes) > 1 else ""
    taken = [node.seconds for node in nodes if node.seconds is not None]
    return _seconds(max(taken)) if taken else ""


def _description(nodes: Sequence[NodeView], states: Mapping[Address, NodeState]) -> str:
    """Return the tooltip of a cell, with one line per node."""
    return "\n".join(_description_of(node, states) for node in nodes)


def _description_of(node: NodeView, states: Mapping[Address, NodeState]) -> str:
    text = f"{short_address(node.address)}: {node.state}, weights v{node.version}"
    if node.worker is not None:
        text += f", {node.worker}"
    if node.seconds is not None:
        text += f", {_seconds(node.seconds)}"
    left = [short_address(p) for p in node.parents if states.get(p, NodeState.DONE) is not NodeState.DONE]
    if node.state is NodeState.WAITING and left:
        text += f", for {', '.join(left[:6])}" + (" ..." if left[6:] else "")
    return text + (f", lost {node.num_losses} times" if node.num_losses else "")


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2"/>'


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _staleness_edges(view: GraphView, x_of: Mapping[int, int], y_of: Mapping[str, int]) -> list[str]:
    """Return the staleness edges as SVG. All shards of a step share one edge from each publication for which they wait.
    `x_of`: step -> left edge of its column. `y_of`: stage -> upper edge of its row."""
    nodes = {node.address: node for node in view.nodes}
    ends: dict[tuple[Address, int], list[NodeView]] = {}
    for publication, generation in view.staleness_edges:
        child = nodes[generation]
        ends.setdefault((publication, child.scheduled_step), []).append(child)
    parts = []
    for (publication, scheduled_step), children in ends.items():
        x0, y0 = x_of[nodes[publication].scheduled_step] + COLUMN_W, y_of["publish"] + ROW_H / 2
        x1, y1 = x_of[scheduled_step] - 1, y_of["generate"] + ROW_H / 2
        waits = nodes[publication].state is not NodeState.DONE
        kind = "edge waits" if waits else "edge"
        names = f"generate of step {scheduled_step} waits for weights v{publication.step}" + (
            ", not published yet" * waits
        )
        bend = max(12.0, (x1 - x0) / 3)
        curve = f"M{x0},{y0} C{x0 + bend:.1f},{y0} {x1 - bend:.1f},{y1} {x1},{y1}"
        parts.append(
            f'<path class="{kind}" d="{curve}" marker-end="url(#arrow)" '
            f'data-from="{escape(short_address(publication))}" data-to="{escape(short_address(children[0].address))}">'
            f"<title>{names}</title></path>"
        )
    return parts


# ---- log files -------------------------------------------------------------------------------------------


_LOG_END_BYTES = 64 << 10


def log_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a run's log files."""
    return tuple(sorted(path.name for path in directory.glob("*.log"))) if directory.is_dir() else ()


def read_log_end(directory: Path, name: str) -> str | None:
    """Return the last 64 KiB of a log file as text, or None if no log file has that name."""
    if name not in log_names(directory):
        return None
    with (directory / name).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
        return log.read().decode("utf8", "replace")

"""Drawings of the page `/stageline` as SVG text: the grid of steps and stages with the staleness edges, and curves.
Pure functions of the record; every text that is drawn is escaped.

May import pipeline.observe.graph_view, pipeline.graph and storage.address.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from pipeline.graph.status import NodeState
from pipeline.observe.graph_view import GraphView, NodeView, short, stages_of
from storage.address import Address

LABEL_W, COLUMN_W, GAP, ROW_H, HEAD_H = 128, 92, 22, 26, 26
"""Pixels: of the stages' names, a step's column, the space between two columns, a row, the steps' numbers."""
_SINGLE_CELLS = 12
"""Up to so many shards have a rectangle each; more are drawn as one bar."""
_ORDER = (NodeState.DONE, NodeState.RUNNING, NodeState.QUEUED, NodeState.READY, NodeState.WAITING)


def stage_labels(view: GraphView) -> str:
    """The stages' names, to stand beside the `grid` while that is scrolled."""
    stages = stages_of(view.nodes)
    parts = _rows(stages, "stages", LABEL_W)
    for i, stage in enumerate(stages):
        parts.append(f'<text class="stage" x="6" y="{HEAD_H + i * ROW_H + 17}">{escape(stage)}</text>')
    return "".join([*parts, "</svg>"])


def _rows(stages: Sequence[str], kind: str, width: int) -> list[str]:
    """The beginning of a drawing with a row for each stage, every second one shaded."""
    height = HEAD_H + len(stages) * ROW_H + 6
    parts = [f'<svg class="{kind}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    for i in range(len(stages)):
        shade = " odd" if i % 2 else ""
        parts.append(f'<rect class="row{shade}" x="0" y="{HEAD_H + i * ROW_H}" width="{width}" height="{ROW_H}"/>')
    return parts


def grid(view: GraphView) -> str:
    """Steps from left to right, stages from top to bottom, a cell for each with its shards in their states, and an edge
    from each publication to the generation that waits for it."""
    stages = stages_of(view.nodes)
    cells: defaultdict[tuple[int, str], list[NodeView]] = defaultdict(list)
    for node in view.nodes:
        cells[node.turn, node.address.stage].append(node)
    turns = sorted({node.turn for node in view.nodes})
    x_of = {turn: i * (COLUMN_W + GAP) for i, turn in enumerate(turns)}
    y_of = {stage: HEAD_H + i * ROW_H for i, stage in enumerate(stages)}
    parts = [*_rows(stages, "grid", len(turns) * (COLUMN_W + GAP)), _ARROW]
    for turn in turns:
        head = "start" if turn < 0 else f"step {turn}"
        parts.append(f'<text class="head" x="{x_of[turn] + COLUMN_W / 2}" y="17">{head}</text>')
    states = {node.address: node.state for node in view.nodes}
    for (turn, stage), nodes in cells.items():
        parts.append(_cell(nodes, states, x_of[turn], y_of[stage]))
    parts += _staleness_edges(view, x_of, y_of)
    return "".join([*parts, "</svg>"])


_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" class="tip"/></marker></defs>'
)


def _cell(nodes: Sequence[NodeView], states: Mapping[Address, NodeState], x: int, y: int) -> str:
    """One stage of one step."""
    top, high = y + 4, ROW_H - 8
    counts = Counter(node.state for node in nodes)
    said = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    parts = [f"<g><title>{escape(_description(nodes, states) if len(nodes) <= _SINGLE_CELLS else said)}</title>"]
    if len(nodes) <= _SINGLE_CELLS:
        wide = COLUMN_W / len(nodes)
        for i, node in enumerate(nodes):
            lost = " lost" if node.losses else ""
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
    """What a cell says when the mouse is over it."""
    return "\n".join(_description_of(node, states) for node in nodes)


def _description_of(node: NodeView, states: Mapping[Address, NodeState]) -> str:
    text = f"{short(node.address)}: {node.state}, weights v{node.version}"
    if node.worker is not None:
        text += f", {node.worker}"
    if node.seconds is not None:
        text += f", {_seconds(node.seconds)}"
    left = [short(p) for p in node.parents if states.get(p, NodeState.DONE) is not NodeState.DONE]
    if node.state is NodeState.WAITING and left:
        text += f", for {', '.join(left[:6])}" + (" ..." if left[6:] else "")
    return text + (f", lost {node.losses} times" if node.losses else "")


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2"/>'


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _staleness_edges(view: GraphView, x_of: Mapping[int, int], y_of: Mapping[str, int]) -> list[str]:
    """One curve for each publication and step that waits for it, not one for each shard."""
    nodes = {node.address: node for node in view.nodes}
    ends: dict[tuple[Address, int], list[NodeView]] = {}
    for publication, generation in view.staleness_edges:
        child = nodes[generation]
        ends.setdefault((publication, child.turn), []).append(child)
    parts = []
    for (publication, turn), children in ends.items():
        x0, y0 = x_of[nodes[publication].turn] + COLUMN_W, y_of["publish"] + ROW_H / 2
        x1, y1 = x_of[turn] - 1, y_of["generate"] + ROW_H / 2
        waits = nodes[publication].state is not NodeState.DONE
        kind = "edge waits" if waits else "edge"
        names = f"generate of step {turn} waits for weights v{publication.step}" + (", not published yet" * waits)
        bend = max(12.0, (x1 - x0) / 3)
        curve = f"M{x0},{y0} C{x0 + bend:.1f},{y0} {x1 - bend:.1f},{y1} {x1},{y1}"
        parts.append(
            f'<path class="{kind}" d="{curve}" marker-end="url(#arrow)" data-from="{escape(short(publication))}" '
            f'data-to="{escape(short(children[0].address))}"><title>{names}</title></path>'
        )
    return parts


def curve(
    name: str,
    points: Sequence[tuple[float, float]],
    dots: Sequence[tuple[float, float]] = (),
    *,
    unit: str = "",
    dots_name: str = "",
) -> str:
    """A line of (step, y) with its least and greatest value, and dots of another series on the same axes; of both the
    last value is said. Numbers that are not finite are left out; empty without any."""
    line = [(x, y) for x, y in points if math.isfinite(y)]
    extra = [(x, y) for x, y in dots if math.isfinite(y)]
    both = line + extra
    if not both:
        return ""
    width, height, left, top = 430, 120, 58, 22
    xs, ys = [x for x, _ in both], [y for _, y in both]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)

    def at(x: float, y: float) -> str:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{left + across * (width - left - 12):.1f},{top + (1 - up) * (height - top - 22):.1f}"

    parts = [f'<svg class="curve" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    said = [f"{name} {line[-1][1]:.4g}{unit}"] if line else []
    said += [f"{dots_name} {extra[-1][1]:.4g} (dots)"] if extra else []
    parts.append(f'<text class="title" x="6" y="14">{escape(" · ".join(said))}</text>')
    parts.append(f'<text class="tick" x="{left - 6}" y="{top + 6}">{high:.3g}</text>')
    parts.append(f'<text class="tick" x="{left - 6}" y="{height - 20}">{low:.3g}</text>')
    parts.append(f'<text class="low" x="{left}" y="{height - 5}">step {first:g}</text>')
    parts.append(f'<text class="tick" x="{width - 6}" y="{height - 5}">{last:g}</text>')
    parts.append(f'<polyline class="line" points="{" ".join(at(x, y) for x, y in line)}"/>')
    for x, y in [*extra, *(line[-1:] if len(line) == 1 else [])]:
        cx, cy = at(x, y).split(",")
        parts.append(f'<circle class="dot" cx="{cx}" cy="{cy}" r="3.5"><title>{x:g}: {y:.4g}</title></circle>')
    return "".join([*parts, "</svg>"])

"""The page `/stageline` as HTML: one renderer for a run that goes on and for one that has ended. A page, and the part
of it that is fetched again while somebody looks. Whatever came from the run is escaped; the page loads nothing from
elsewhere, and its one script is named in its policy.

May import pipeline.observe.{graph_svg, graph_view} and pipeline.graph.
"""

from __future__ import annotations

import base64
import hashlib
import time
from html import escape
from urllib.parse import quote

from pipeline.graph.status import NodeState
from pipeline.observe.graph_svg import curve, grid, stage_labels
from pipeline.observe.graph_view import GangView, GraphView, VersionView, short, work_text

PATH = "stageline"
"""Of the page, below the server's root; links on it are relative to that."""
REFRESH_S = 1.0
"""Between two looks of an open page; one that nobody sees does not look."""
_SHOWN_NODES = 8
"""Of what a gang does; how many more is said."""
_STYLE = """
:root { --bg: #fff; --fg: #1f2937; --dim: #6b7280; --line: #e5e7eb; --odd: #f9fafb; --edge: #7c3aed;
  --waiting: #e5e7eb; --ready: #fcd34d; --queued: #bfdbfe; --running: #3b82f6;
  --done: #86c79b; --lost: #dc2626; --in: #1f2937; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181f; --fg: #e5e7eb; --dim: #9ca3af; --line: #2c3440;
  --odd: #191e27; --edge: #a78bfa; --waiting: #323a46; --ready: #b98a1c; --queued: #1e4976;
  --done: #2f7d4f; --in: #f3f4f6; } }
body { margin: 0; font: 14px/1.45 system-ui, sans-serif; background: var(--bg); color: var(--fg); }
main { padding: 14px 22px; max-width: 1500px; }
h1 { font-size: 19px; margin: 0; } h2 { font-size: 14px; margin: 20px 0 6px; }
nav, .dim { color: var(--dim); } nav a { color: var(--edge); margin-right: 14px; } nav code { margin-right: 14px; }
.graph { display: flex; } .stages { flex: none; } .scroll { overflow-x: auto; min-width: 0; }
.two { display: flex; flex-wrap: wrap; gap: 8px 40px; }
.two > section { flex: 1 1 520px; max-width: 860px; }
table { border-collapse: collapse; } td, th { text-align: left; padding: 3px 16px 3px 0; vertical-align: top; }
th { color: var(--dim); font-weight: normal; } tr + tr td { border-top: 1px solid var(--line); }
.row { fill: none; } .row.odd { fill: var(--odd); } text { fill: var(--fg); font-size: 12px; }
.head, .in { text-anchor: middle; } .head { fill: var(--dim); } .in { font-size: 11px; fill: var(--in); }
.waiting { fill: var(--waiting); } .ready { fill: var(--ready); } .queued { fill: var(--queued); }
.running { fill: var(--running); }
.done { fill: var(--done); } .lost { stroke: var(--lost); stroke-width: 2; }
.edge { fill: none; stroke: var(--edge); stroke-width: 1.6; opacity: .75; } .tip { fill: var(--edge); }
.edge.waits { stroke-dasharray: 5 4; }
.curve .title { font-weight: 600; } .tick { text-anchor: end; fill: var(--dim); } .low { fill: var(--dim); }
.line { fill: none; stroke: var(--running); stroke-width: 1.8; } .dot { fill: var(--edge); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin: 0 5px -1px 14px; }
.key.waiting { background: var(--waiting); } .key.ready { background: var(--ready); }
.key.queued { background: var(--queued); }
.key.running { background: var(--running); } .key.done { background: var(--done); }
.alarm, .failed, .lost-note { color: var(--lost); } .over { opacity: .5; } h2 .dim { font-weight: normal; }
"""
_SCRIPT = f"""
const shown = document.getElementById("view");
const scrolled = to => {{ const box = shown.querySelector(".scroll"); if (box) box.scrollLeft = to; }};
let busy = false;
async function look() {{
  if (document.hidden || busy) return;
  busy = true;
  try {{
    const answer = await fetch(shown.dataset.from);
    const box = shown.querySelector(".scroll");
    const atEnd = !box || box.scrollLeft + box.clientWidth >= box.scrollWidth - 2;
    const at = atEnd ? 1e6 : box.scrollLeft;
    if (answer.ok) shown.innerHTML = await answer.text();
    scrolled(at);
    shown.classList.toggle("over", !answer.ok);
  }} catch {{ shown.classList.add("over"); }}
  busy = false;
}}
scrolled(1e6);
setInterval(look, {1000 * REFRESH_S:.0f});
"""


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"


HEADERS = {
    "Content-Security-Policy": _policy(),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Sent with each answer: no other script runs, whatever a run's name or a worker's message says."""


def page(view: GraphView) -> str:
    """The whole page; it fetches the `fragment` again from `PATH`/view."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(view.facts.name)} - Stageline</title><style>{_STYLE}</style></head><body><main>"
        f'<div id="view" data-from="{PATH}/view">{fragment(view)}</div></main>'
        f"<script>{_SCRIPT}</script></body></html>"
    )


def fragment(view: GraphView) -> str:
    """What changes: all that is shown of a run."""
    facts = view.facts
    rewards = [(float(point.step), point.reward) for point in view.points]
    divergences = [(float(point.step), point.kl) for point in view.points]
    held_out = [(float(version), mean) for version, mean in view.held_out]
    graph = f"<div class=graph>{stage_labels(view)}<div class=scroll>{grid(view)}</div></div>"
    sections = [
        f"<h1>{escape(facts.name)} <span class=dim>step {view.steps_done} of {facts.steps}, {_state(view)}</span></h1>",
        f"<nav>{_links(view)}</nav>",
        f"<h2>Graph <span class=dim>staleness bound {facts.staleness}: generation waits for the weights along the "
        f"violet edges</span>{_legend(view)}</h2>",
        graph if view.nodes else "<p class=dim>No step is open.</p>",
        "<div class=two>",
        f"<section><h2>Gangs</h2>{_gangs(view)}</section>",
        f"<section><h2>Weights {'in memory' if view.live else 'still to be read'}</h2>{_versions(view.versions)}",
        "</section>",
        "</div><div class=two>",
        f"<section><h2>Learning</h2>{curve('reward', rewards, held_out, dots_name='held-out')}"
        f"{curve('KL', divergences, unit=' nats a response')}"
        f"{'' if rewards or held_out else '<p class=dim>No step is over yet.</p>'}</section>",
        f"<section><h2>Told</h2>{_notes(view)}</section></div>",
    ]
    return "".join(sections)


def _state(view: GraphView) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.at))
    if view.finished:
        return f"finished {clock}"
    if view.live:
        return f"running, {clock}"
    return f"{'running in another process' if view.driven else 'not finished'}; latest event {clock}"


def _links(view: GraphView) -> str:
    shown = []
    for label, where in view.facts.links:
        if where.startswith(("http://", "https://")):
            shown.append(f'<a href="{escape(where)}">{escape(label)}</a>')
        else:
            shown.append(f"{escape(label)}: <code>{escape(where)}</code>")
    logs = [f'<a href="{PATH}/logs/{quote(name, safe="")}">{escape(name)}</a>' for name in view.facts.logs]
    return "".join(shown) + (f"logs: {''.join(logs)}" if logs else "")


def _legend(view: GraphView) -> str:
    words = {
        NodeState.DONE: "committed",
        NodeState.RUNNING: "running" if view.driven else "running when the driver ended",
        NodeState.QUEUED: "queued on a busy worker",
        NodeState.READY: "ready, waits for a worker",
        NodeState.WAITING: "waits for parents",
    }
    return "".join(f'<span class="key {state}"></span><span class=dim>{word}</span>' for state, word in words.items())


def _gangs(view: GraphView) -> str:
    def does(gang: GangView) -> str:
        if gang.doing:
            return work_text(gang, view.at, _SHOWN_NODES)
        if not gang.up:
            return "not up"
        return f"idle: {gang.wait}" if view.driven and gang.wait else gang.wait or "nothing left to do"

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
        names = ", ".join(map(short, one.readers[:4])) + (
            f" and {len(one.readers) - 4} more" if one.readers[4:] else ""
        )
        rows.append(f"<tr><td>v{one.version}</td><td>{size}</td><td>{escape(names) or 'nobody any more'}</td></tr>")
    return f"<table><tr><th>version</th><th></th><th>still to be read by</th></tr>{''.join(rows)}</table>"


def _notes(view: GraphView) -> str:
    if not view.notes:
        return "<p class=dim>Nothing out of the ordinary.</p>"
    rows = [
        f"<tr><td class=dim>{time.strftime('%H:%M:%S', time.localtime(note.at))}</td>"
        f'<td class="{"lost-note" if note.kind == "lost" else escape(note.kind)}">{escape(note.kind)}</td>'
        f"<td>{escape(note.text[:400])}</td></tr>"
        for note in reversed(view.notes)
    ]
    return f"<table>{''.join(rows)}</table>"

"""The page: contents as JSON beside the styles and scripts of `static/`, in one HTML file that loads nothing.

All text of a run is in the JSON alone, in which every `<` is written as an escape, so it cannot end its element
(pipeline/observe/html.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipeline.observe.curves import panels_of
from pipeline.observe.html import embedded, policy, static
from pipeline.observe.metric_catalogue import Panel
from pipeline.observe.report.comparison import RunComparison, compare_runs
from pipeline.observe.report.gather import MOST_EXECUTIONS, Gathered, RunContents, gather
from pipeline.observe.report.samples import SampleBudget
from pipeline.observe.report.source import RunSource
from pipeline.observe.timeline import STAGE_COLOURS

MOST_BYTES = 5_000_000
"""Most bytes of the file."""
MOST_RUNS = 8
"""Most runs of a page: the number of colours that can be told apart."""
_BEGINNING = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="Stageline report">
"""
_STYLES = ("base.css", "figures.css", "report.css")
_PARTS = ("text", "dom", "frame", "curves", "bars", "timeline", "samples", "tables", "main")
_SMALLEST = 0.02
"""Smallest share of a budget; below it the size of a page no longer depends on the budget."""


@dataclass(frozen=True)
class PageContents:
    """Data for the page's scripts."""

    runs: Sequence[RunContents]
    panels: Sequence[Panel]
    stage_colours: Mapping[str, str]
    comparison: RunComparison | None


def report(sources: Sequence[RunSource], budget: SampleBudget | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the file. If it would have more than `most_bytes`, it shows fewer rows and executions, down to a small
    share of the budget. `sources`: 1 to `MOST_RUNS` runs."""
    whole = (budget or SampleBudget()).of(len(sources))
    factor = 1.0
    while True:
        executions = int(MOST_EXECUTIONS * factor / len(sources))
        gathered = [gather(source, whole.scaled(factor), executions) for source in sources]
        found = page(contents(sources, gathered))
        if len(found) <= most_bytes or factor < _SMALLEST:
            return found
        factor *= min(0.8, 0.9 * most_bytes / len(found))


def contents(sources: Sequence[RunSource], gathered: Sequence[Gathered]) -> PageContents:
    """Return the contents of a page about one run, or about several and their differences."""
    compared = None
    if len(sources) > 1:
        compared = compare_runs(
            [source.settings for source in sources],
            [source.sameness for source in sources],
            [one.held_out for one in gathered],
        )
    runs = [one.contents for one in gathered]
    return PageContents(runs, panels_of([run.curves for run in runs]), STAGE_COLOURS, compared)


def page(shown: PageContents) -> bytes:
    """Return the HTML file."""
    style, script = static(*_STYLES), static(*(f"{part}.js" for part in _PARTS))
    title = " · ".join(run.name for run in shown.runs)
    text = f"""{_BEGINNING}<meta http-equiv="Content-Security-Policy" content="{policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - Stageline</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws itself: it needs JavaScript (its own; it loads nothing).</noscript>
<script type="application/json" id="contents">{embedded(shown)}</script>
<script>{script}</script>
</body>
</html>
"""
    return text.encode("utf8", "backslashreplace")  # a lone surrogate becomes an escape of JSON


def is_report(file: Path) -> bool:
    """Return True if a file begins like the files that `page` makes. Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_BEGINNING)) == _BEGINNING.encode()

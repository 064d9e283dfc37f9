"""The page: one HTML file that loads no other file. It consists of the contents as JSON, and the styles and scripts of
`static/`.

Text of a run is in two places of the file. In the title, the text is escaped. In the JSON, every `<` is written as a
JSON escape, so the text cannot end the HTML element that contains the JSON (pipeline/observe/html.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipeline.observe.curves import panels_to_draw
from pipeline.observe.html import content_security_policy, read_static, to_embedded_json
from pipeline.observe.metric_catalogue import Panel
from pipeline.observe.report.comparison import RunComparison, compare_runs
from pipeline.observe.report.gather import MAX_EXECUTIONS, Gathered, RunContents, read_contents
from pipeline.observe.report.samples import SampleBudget
from pipeline.observe.report.source import Source
from pipeline.observe.timeline import STAGE_COLOURS

MAX_BYTES = 5_000_000
"""Maximum size of the file in bytes."""
MAX_RUNS = 8
"""Maximum number of runs on a page: the number of colours that can be told apart."""
_HTML_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="Stageline report">
"""
_STYLES = ("base.css", "figures.css", "report.css")
_SCRIPTS = ("text", "dom", "frame", "curves", "bars", "timeline", "samples", "tables", "main")
_MIN_BUDGET_FRACTION = 0.02
"""Fraction of the full `SampleBudget`. `build_report` makes a file smaller by reducing the budget, and stops once the
budget is below this fraction. All limits of the default budget are then at their minimum."""


@dataclass(frozen=True)
class PageContents:
    """The data from which the scripts draw the page."""

    runs: Sequence[RunContents]
    panels: Sequence[Panel]
    stage_colours: Mapping[str, str]
    comparison: RunComparison | None


def build_report(sources: Sequence[Source], budget: SampleBudget | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the report as an HTML file.

    If the file is larger than `max_bytes`, it is made again with fewer rows and executions. A file that was made with
    less than `_MIN_BUDGET_FRACTION` of the budget is returned in any case.

    Args:
        sources: 1 to `MAX_RUNS` runs.
        budget: limits for a page about one run. Several runs share them.
        max_bytes: size that the file should not exceed."""
    whole = (budget or SampleBudget()).share_between(len(sources))
    factor = 1.0
    while True:
        executions = int(MAX_EXECUTIONS * factor / len(sources))
        gathered = [read_contents(source, whole.scaled(factor), executions) for source in sources]
        page = render_page(page_contents(sources, gathered))
        if len(page) <= max_bytes or factor < _MIN_BUDGET_FRACTION:
            return page
        factor *= min(0.8, 0.9 * max_bytes / len(page))


def page_contents(sources: Sequence[Source], gathered: Sequence[Gathered]) -> PageContents:
    """Return the contents of a page about one run, or about several runs and their differences."""
    compared = None
    if len(sources) > 1:
        compared = compare_runs(
            [source.settings for source in sources],
            [source.sameness for source in sources],
            [one.held_out for one in gathered],
        )
    runs = [one.contents for one in gathered]
    return PageContents(runs, panels_to_draw([run.curves for run in runs]), STAGE_COLOURS, compared)


def render_page(shown: PageContents) -> bytes:
    """Return the page as an HTML file."""
    style, script = read_static(*_STYLES), read_static(*(f"{part}.js" for part in _SCRIPTS))
    title = " · ".join(run.name for run in shown.runs)
    policy = content_security_policy(style, script)
    text = f"""{_HTML_HEAD}<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - Stageline</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws itself: it needs JavaScript (its own; it loads nothing).</noscript>
<script type="application/json" id="contents">{to_embedded_json(shown)}</script>
<script>{script}</script>
</body>
</html>
"""
    return text.encode("utf8", "backslashreplace")  # a lone surrogate in the JSON becomes a JSON escape


def is_report(file: Path) -> bool:
    """Return True if a file begins like a file made by `render_page`. Raises OSError if the file cannot be read."""
    with file.open("rb") as content:
        return content.read(len(_HTML_HEAD)) == _HTML_HEAD.encode()

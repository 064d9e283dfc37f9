"""The page: contents as JSON beside the styles and scripts of `static/`, in one HTML file that loads nothing.

Whatever came from a run is in the JSON alone, in which every `<` is written as an escape: no text of a run can end the
element that it is in. The page's policy names the digest of its own script and forbids everything else, the network
included.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline.observe.report.comparison import RunComparison, compare_runs
from pipeline.observe.report.curves import PANELS, CurvePanel
from pipeline.observe.report.gather import MOST_EXECUTIONS, Gathered, RunContents, gather
from pipeline.observe.report.samples import SampleBudget
from pipeline.observe.report.source import RunSource

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
_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("text", "dom", "frame", "curves", "bars", "timeline", "samples", "tables", "main")
_SMALLEST = 0.02
"""Smallest share of a budget; below it the size of a page no longer depends on the budget."""


@dataclass(frozen=True)
class PageContents:
    """Data for the page's scripts."""

    runs: Sequence[RunContents]
    panels: Sequence[CurvePanel]
    comparison: RunComparison | None


def report(sources: Sequence[RunSource], budget: SampleBudget | None = None, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the file of at most `most_bytes`: long rows are shown in smaller number. `sources`: 1 to `MOST_RUNS`."""
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
    return PageContents([one.contents for one in gathered], PANELS, compared)


def page(shown: PageContents) -> bytes:
    """Return the HTML file."""
    style, script = _static("report.css"), "\n".join(_static(f"{name}.js") for name in _SCRIPTS)
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:"
    title = " · ".join(run.name for run in shown.runs)
    text = f"""{_BEGINNING}<meta http-equiv="Content-Security-Policy" content="{policy}">
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
    return text.encode("utf8", "backslashreplace")  # half a surrogate pair becomes JSON's own escape


def is_report(file: Path) -> bool:
    """Return True if a file looks, by its beginning, like one that `page` made. Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_BEGINNING)) == _BEGINNING.encode()


def embedded(shown: Any) -> str:
    """Return JSON that can stand in an HTML element."""
    found = json.dumps(shown, default=_fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _fields(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} has no place in a report")
    return vars(value)


def _static(name: str) -> str:
    return (_STATIC / name).read_text("utf8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

"""Tables for the terminal, as objects of the library rich. They show the results of a run, its held-out responses, the
rows of a step (`stageline inspect`), the predicted memory and the placement of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.observe.summary import Summary, summary_lines
from pipeline.observe.text import escape_control_characters, format_number, plain_text

if TYPE_CHECKING:  # this import would load pandas and Zarr, which `stageline check` does not need
    from pipeline.observe.rows import ResponsePair


@dataclass(frozen=True)
class MemoryColumn:
    """The predicted memory of one worker or host, in bytes. Several workers or hosts with equal predictions share a
    column."""

    heading: str
    items: Mapping[str, int]
    total: int
    """Peak memory. It is less than the sum of the items if some items are never in memory at the same time."""


@dataclass(frozen=True)
class InspectRow:
    """One stored response with its numbers. A number is None if its stage has no output yet."""

    row: int
    prompt: str
    response: str
    score: float | None
    kl: float | None
    """KL to the reference, nats per response."""
    version: str
    """Version of the weights that sampled the response: "3", or "3-4" if it changed during the response."""
    advantage: float | None
    """Mean advantage over the sampled tokens."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Name of a part of the score -> its value before weighting."""


def summary_table(summary: Summary) -> Table:
    """Return the table of a run's results."""
    table = Table(title="Result", title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    for line in summary_lines(summary):
        table.add_row(plain_text(line.label), plain_text(line.text))
    return table


def responses_table(pairs: Sequence[ResponsePair]) -> Table:
    """Return a table of the held-out responses before and after training, side by side."""
    title = "Responses to held-out prompts: the largest gain, the median change, the largest loss"
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    for heading in ("prompt", "before", "after"):
        table.add_column(heading, ratio=1, overflow="fold")
    for pair in pairs:
        table.add_row(
            plain_text(pair.prompt),
            Text.assemble(
                (f"{format_number(pair.before_score, with_sign=True)} ", "bold"), escape_control_characters(pair.before)
            ),
            Text.assemble(
                (f"{format_number(pair.after_score, with_sign=True)} ", "bold"), escape_control_characters(pair.after)
            ),
        )
    return table


def end_of_run_text(summary: Summary, pairs: Sequence[ResponsePair], paths: Mapping[str, Path | str]) -> RenderableType:
    """Return the text to print at the end of a run: its results, responses before and after training, the paths of its
    files and pages, and `last_line`. Print the text with `soft_wrap=True`, so that paths can be copied."""
    parts: list[RenderableType] = [summary_table(summary)]
    if pairs:
        parts.append(responses_table(pairs))
    width = max(map(len, paths), default=0) + 2
    for line in (
        *(plain_text(f"{label:<{width}}", "dim").append_text(plain_text(path)) for label, path in paths.items()),
        last_line(summary, paths.get("report")),
    ):
        line.overflow = None  # None leaves the choice to the console: with soft_wrap it does not break the line
        parts.append(line)
    return Group(*parts)


def last_line(summary: Summary, report: Path | str | None) -> Text:
    """Return the last line of a run's output: held-out reward before and after training, seconds per step, sampled
    tokens per second, and the path of the report. Values that the run does not have are left out."""
    parts: list[str] = []
    if summary.eval is not None:
        parts.append(f"held-out reward {format_number(summary.eval.before)} → {format_number(summary.eval.after)}")
    if summary.steps:
        seconds = summary.wall_s / summary.steps
        parts += [f"{seconds:.2f} s a step", f"{summary.tokens_per_s:,.0f} sampled tokens/s"]
    shown = plain_text("   ".join(parts), "bold green")
    return shown if report is None else shown.append_text(plain_text(f"   report: {report}", "bold"))


def inspect_table(rows: Sequence[InspectRow], title: str) -> Table:
    """Return a table of the stored rows of a step. If the score has several parts, the table shows them too."""
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("row", justify="right")
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("response", ratio=3, overflow="fold")
    named = [*dict.fromkeys(name for r in rows for name in r.parts)]
    parts = named if len(named) > 1 else []
    for heading in ("score", *parts, "KL", "version", "advantage"):
        table.add_column(plain_text(heading), justify="right", no_wrap=True)
    for r in rows:
        of_parts = (_number(r.parts.get(name)) for name in parts)
        numbers = (_number(r.score), *of_parts, _number(r.kl), r.version, _number(r.advantage))
        table.add_row(str(r.row), plain_text(r.prompt), plain_text(r.response), *numbers)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def memory_table(title: str, columns: Sequence[MemoryColumn], limit: float | None = None) -> Table:
    """Return a table of predicted memory, with one row per item and a last row for the peak. Words and numbers are not
    cut, even on a narrow terminal.

    Args:
        title: title of the table.
        columns: the predictions. They are shown in GiB if at least one total is 10 GiB or more, else in MiB.
        limit: available memory in bytes. If it is given and finite, the title shows it."""
    large = max(column.total for column in columns) >= 10 * 2**30
    size, digits = (2**30, 1) if large else (2**20, 0)

    def format_bytes(number: float) -> str:
        return f"{number / size:,.{digits}f}" if number else ""

    title = f"{title}, {'GiB' if large else 'MiB'}"
    title += f" of {format_bytes(limit)}" if limit is not None and math.isfinite(limit) else ""
    items = [*dict.fromkeys(name for column in columns for name in column.items)]
    rows = [(item, *(format_bytes(column.items.get(item, 0)) for column in columns)) for item in items]
    rows.append(("most at one time", *(format_bytes(column.total) for column in columns)))
    headings = ("item", *(column.heading for column in columns))
    table = Table(title=title, title_justify="left")
    for number, cells in enumerate(zip(headings, *rows, strict=True)):
        longest = max(len(word) for cell in cells for word in cell.split())
        table.add_column(cells[0], justify="right" if number else "left", min_width=longest)
    for number, row in enumerate(rows, start=1):
        table.add_row(*row, end_section=number == len(items))
    return table


def placement_table(rows: Sequence[tuple[str, str, str, str]]) -> Table:
    """Return a table of the placement. The cells of a row are a gang's name, its number of workers, its layout, and the
    GPUs that it uses on each node."""
    table = Table(title="placement", title_justify="left")
    for heading in ("gang", "workers", "layout", "nodes and their GPUs"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    return table

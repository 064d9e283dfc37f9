"""Executions in rows without overlap: how a timeline places what a worker runs side by side. Pure. May import
pipeline.observe.summary."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.observe.summary import Box


def first_fit(own: Sequence[Box]) -> list[list[Box]]:
    """Splits one worker's boxes, sorted by start, into rows without overlap (times of one clock: 1 us of slack)."""
    rows: list[list[Box]] = []
    for box in own:
        free = next((row for row in rows if row[-1].end_s <= box.start_s + 1e-6), None)
        if free is None:
            rows.append([box])
        else:
            free.append(box)
    return rows

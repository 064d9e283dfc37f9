"""Where a timeline puts executions: a lane for each worker, more where it runs nodes side by side; and which part of a
run is worth a closer look. The PNG and the report's page draw the same lanes. Pure. May import
pipeline.observe.summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.observe.summary import Box


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: a worker, or one of several rows of a worker that runs nodes side by side. Its boxes do not
    overlap, and are sorted by start."""

    gang: str
    worker: str
    boxes: Sequence[Box]


def lanes_of(drawn: Sequence[Box]) -> list[Lane]:
    """The boxes (sorted by start) by gang and worker, each in order of name; what one worker runs side by side is in
    lanes of its own, first fit."""
    by_worker: dict[tuple[str, str], list[Box]] = {}
    for box in drawn:
        by_worker.setdefault((box.gang, box.worker), []).append(box)
    return [Lane(*where, row) for where in sorted(by_worker) for row in first_fit(by_worker[where])]


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


def middle_window(drawn: Sequence[Box], num_steps: int = 4) -> tuple[float, float] | None:
    """The times in which the middle `num_steps` steps were trained: from the first update's start of the first of them
    to the last update's end, and 4 % of margin on both sides, as far as there are boxes. None where there are no more
    steps than that."""
    updates = [box for box in drawn if box.address.stage.startswith("update")]
    trained = sorted({box.address.step for box in updates})
    if len(trained) <= num_steps:
        return None
    first = (len(trained) - num_steps) // 2
    shown = [box for box in updates if box.address.step in trained[first : first + num_steps]]
    left, right = min(box.start_s for box in shown), max(box.end_s for box in shown)
    margin = 0.04 * (right - left)
    return (
        max(min(box.start_s for box in drawn), left - margin),
        min(max(box.end_s for box in drawn), right + margin),
    )

"""The lanes of a timeline, and the overlap of gangs. Pure functions.

Each worker has a lane, or several if it runs nodes side by side. The PNG and the report's page draw the same lanes.
`middle_window` returns the period that the plot enlarges. `overlap_by_step` returns the fraction of each step's time in
which at least two gangs were busy, which is the benefit of staleness:

    published v(i) ├─────────── step i ───────────┤ published v(i+1)
    generate       ██████████████░░░░░░██████████
    train          ░░░░░█████████████████████░░░░
    overlap             █████████     ███████           their sum / the step's time
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.summary import Box, Interval, boxes, length, union


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: a worker, or one of several rows of a worker that runs nodes side by side. Its boxes are
    sorted by start and do not overlap."""

    gang: str
    worker: str
    boxes: Sequence[Box]


def lanes_of(drawn: Sequence[Box]) -> list[Lane]:
    """Return the lanes of boxes (sorted by start), ordered by gang and worker. Boxes that overlap on one worker go to
    several lanes, first fit."""
    by_worker: dict[tuple[str, str], list[Box]] = {}
    for box in drawn:
        by_worker.setdefault((box.gang, box.worker), []).append(box)
    return [Lane(*where, row) for where in sorted(by_worker) for row in first_fit(by_worker[where])]


def first_fit(own: Sequence[Box]) -> list[list[Box]]:
    """Split one worker's boxes, sorted by start, into rows without overlap. The tolerance is 1 us: all times are of one
    clock."""
    rows: list[list[Box]] = []
    for box in own:
        free = next((row for row in rows if row[-1].end_s <= box.start_s + 1e-6), None)
        if free is None:
            rows.append([box])
        else:
            free.append(box)
    return rows


def middle_window(drawn: Sequence[Box], num_steps: int = 4) -> tuple[float, float] | None:
    """Return the period in which the middle `num_steps` steps were trained: from the start of their first update to the
    end of their last, with a margin of 4 % on both sides, within the time of all boxes. None if there are at most
    `num_steps` steps."""
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


def overlap_by_step(events: Iterable[Event]) -> dict[int, float]:
    """Return, by step, the fraction of its time in which at least two gangs were busy. A step's time is from the
    publication of its version to that of the next. Steps during which a driver started are left out."""
    log = list(events)
    starts = sorted(e.t for e in log if e.kind is EventKind.RUN_STARTED)
    published = {e.step: e.t for e in log if e.kind is EventKind.PUBLISHED and e.step is not None}
    both = _at_least_two(log)
    ends = [end for _, end in both]
    found = {}
    for step, begun in sorted(published.items()):
        over = published.get(step + 1, begun)
        if over > begun and bisect_right(starts, over) == bisect_right(starts, begun):
            near = both[bisect_left(ends, begun) : bisect_left(ends, over) + 1]
            cut = ((max(start, begun), min(end, over)) for start, end in near)
            found[step] = length((start, end) for start, end in cut if end > start) / (over - begun)
    return found


def _at_least_two(log: Iterable[Event]) -> list[Interval]:
    """Return the periods in which at least two gangs were busy: disjoint, in order."""
    by_gang: dict[str, list[Interval]] = {}
    for box in boxes(log):
        by_gang.setdefault(box.gang, []).append((box.start_s, box.end_s))
    busy = [interval for intervals in by_gang.values() for interval in union(intervals)]
    changes = sorted([(start, 1) for start, _ in busy] + [(end, -1) for _, end in busy])
    found, working, since = [], 0, 0.0
    for t, change in changes:
        before, working = working, working + change
        if before < 2 <= working:
            since = t
        elif working < 2 <= before and t > since:
            found.append((since, t))
    return found

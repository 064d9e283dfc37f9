"""How much of each step's time at least two gangs were busy: what staleness buys. Pure.

    published v(i) ├─────────── step i ───────────┤ published v(i+1)
    generate       ██████████████░░░░░░██████████
    train          ░░░░░█████████████████████░░░░
    overlap             █████████     ███████           their sum / the step's time

May import pipeline.observe.{journal, summary} and the standard library.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.summary import Interval, boxes, length, union


def overlap_by_step(events: Iterable[Event]) -> dict[int, float]:
    """By step: the part of the time between the publications of its version and of the next in which two gangs or more
    were busy. Steps during which a driver started have none."""
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
    """When two gangs or more were busy: disjoint, in order."""
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

"""Executions of nodes over time: busy gangs, their overlap, and the lanes of a timeline. Pure functions of the
journal's events.

A **box** is one execution of a node on one rank: the period [finished - seconds, finished]. A gang is **busy** during
each of its boxes. Gangs **overlap** while at least two gangs are busy. Staleness makes such overlap possible:

    published v(i) ├─────────── step i ───────────┤ published v(i+1)
    generate       ██████████████░░░░░░██████████
    train          ░░░░░█████████████████████░░░░
    overlap             █████████     ███████           overlap_by_step: sum of these periods / the step's time

The plot and the report draw the same `Timeline`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipeline.observe.journal import Event, EventKind
from storage.address import Address

Interval = tuple[float, float]

STAGE_COLOURS = {
    "generate": "#4C78A8",
    "evaluate": "#9ECAE9",
    "score": "#59A14F",
    "evaluate_score": "#B5D8AE",
    "reference": "#8CBF5A",
    "evaluate_reference": "#CFE5B3",
    "logprob": "#F2B447",
    "value": "#D9933D",
    "advantage": "#B279A2",
    "update_policy": "#D64550",
    "update_critic": "#F08A7B",
    "publish": "#6B5B95",
    "canary_logprob": "#D9C24A",
    "canary": "#BAB0AC",
}
"""Colours of the stages in every timeline. Legends list the stages in this order."""
OTHER_COLOUR = "#9D9D9D"


@dataclass(frozen=True)
class Box:
    """One execution of a node on one rank. Times are in seconds since the epoch."""

    address: Address
    gang: str
    worker: str
    rank: int
    start_s: float
    end_s: float
    store_s: float
    """Seconds spent on store and ledger. They are counted as the last seconds of the box."""


def read_boxes(events: Iterable[Event]) -> list[Box]:
    """Return the boxes of all finished executions, sorted by start."""
    boxes = []
    for e in events:
        if e.kind is EventKind.FINISHED and e.stage is not None and e.step is not None and e.seconds is not None:
            address = Address(e.stage, e.step, e.shard or 0)
            worker, store_s = e.worker or "?", min(e.store_s or 0.0, e.seconds)
            boxes.append(Box(address, e.gang or worker, worker, e.rank or 0, e.t - e.seconds, e.t, store_s))
    return sorted(boxes, key=lambda box: (box.start_s, box.end_s))


def driver_periods(events: Iterable[Event]) -> list[Interval]:
    """Return the periods in which a driver worked: one period for each driver that ran a node.

    The events from a RUN_STARTED event to the next one belong to the same driver. The driver's period lasts from the
    first to the last moment at which a node was submitted, started, finished or failed."""
    working = {EventKind.SUBMITTED, EventKind.STARTED, EventKind.FINISHED, EventKind.FAILED}
    groups: list[list[float]] = [[]]
    for e in events:
        if e.kind is EventKind.RUN_STARTED:
            groups.append([])
        elif e.kind in working:
            groups[-1] += [e.t] if e.seconds is None else [e.t - e.seconds, e.t]
    return [(min(times), max(times)) for times in groups if times]


# ---- intervals -------------------------------------------------------------------------------------------


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch. Return disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersect_intervals(intervals: Iterable[Interval], limits: Sequence[Interval]) -> list[Interval]:
    """Return the intersections of each interval with each limit. Empty intersections are left out."""
    pairs = itertools.product(intervals, limits)
    cut = ((max(start, first), min(end, last)) for (start, end), (first, last) in pairs)
    return [(start, end) for start, end in cut if end > start]


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals."""
    return math.fsum(end - start for start, end in intervals)


def busy_periods(all_boxes: Iterable[Box]) -> dict[str, list[Interval]]:
    """Return a dictionary: gang -> disjoint periods in which the gang was busy, in ascending order."""
    by_gang: dict[str, list[Interval]] = {}
    for box in all_boxes:
        by_gang.setdefault(box.gang, []).append((box.start_s, box.end_s))
    return {gang: merge_intervals(intervals) for gang, intervals in by_gang.items()}


def overlap_periods(all_boxes: Iterable[Box]) -> list[Interval]:
    """Return the disjoint periods in which at least two gangs were busy, in order."""
    periods = [period for of_gang in busy_periods(all_boxes).values() for period in of_gang]
    changes = sorted([(start, 1) for start, _ in periods] + [(end, -1) for _, end in periods])
    overlaps, num_busy, since = [], 0, 0.0
    for t, change in changes:
        before, num_busy = num_busy, num_busy + change
        if before < 2 <= num_busy:
            since = t
        elif num_busy < 2 <= before and t > since:
            overlaps.append((since, t))
    return overlaps


def overlap_by_step(events: Iterable[Event]) -> dict[int, float]:
    """Return a dictionary: step -> fraction of the step's time in which gangs overlapped.

    The time of step i is from the publication of version i of the weights to the publication of version i + 1. A step
    is left out if one of the two publications is missing, or if a driver started during this time."""
    log = list(events)
    starts = sorted(e.t for e in log if e.kind is EventKind.RUN_STARTED)
    published = {e.step: e.t for e in log if e.kind is EventKind.PUBLISHED and e.step is not None}
    both = overlap_periods(read_boxes(log))
    ends = [end for _, end in both]
    seconds_of = {}
    for step, begin in sorted(published.items()):
        end = published.get(step + 1, begin)
        if end > begin and bisect_right(starts, end) == bisect_right(starts, begin):
            near = both[bisect_left(ends, begin) : bisect_left(ends, end) + 1]
            seconds_of[step] = total_length(intersect_intervals(near, [(begin, end)])) / (end - begin)
    return seconds_of


# ---- lanes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lane:
    """One row of a timeline. Its boxes are sorted by start and do not overlap. A worker that runs several nodes at the
    same time has several lanes."""

    gang: str
    worker: str
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Timeline:
    """The executions of a run, arranged in lanes. Periods in which no driver worked are called gaps, and are cut out.
    So a time in this record is in seconds since the epoch, minus the length of all gaps before it
    (`Timeline.without_gaps`)."""

    lanes: Sequence[Lane]
    """Lanes, sorted by gang and worker."""
    start_s: float
    """Start of the first box of the run."""
    end_s: float
    middle_period: Interval | None
    """Start and end of the period in which the middle steps of the run were trained (`middle_window`). Plots show this
    period enlarged. None if few steps were trained."""
    num_boxes: int
    """Number of boxes of the run. The lanes contain fewer if the run is long."""
    gaps: Sequence[Interval] = ()
    """Periods in which no driver worked, in order. Each has its true start and end, in seconds since the epoch. All
    other times in this record are reduced by the total length of the periods before them."""

    def without_gaps(self, t: float) -> float:
        """Convert a clock time to a time of this timeline: subtract the length of all gaps before the clock time."""
        return subtract_gaps(self.gaps, t)


def run_timeline(events: Iterable[Event], max_boxes: int | None = None) -> Timeline | None:
    """Return the timeline of a run, or None if nothing was executed. If there are more than `max_boxes` boxes, the
    lanes contain only the first and the last `max_boxes` / 2 of them. If `max_boxes` is None, there is no limit."""
    log = list(events)
    gaps = gaps_between(driver_periods(log))
    every = [
        replace(b, start_s=subtract_gaps(gaps, b.start_s), end_s=subtract_gaps(gaps, b.end_s)) for b in read_boxes(log)
    ]
    if not every:
        return None
    kept = every
    if max_boxes is not None and len(every) > max_boxes:
        kept = [*every[: max_boxes // 2], *every[len(every) - max_boxes // 2 :]]
    end = max(box.end_s for box in every)
    return Timeline(arrange_lanes(kept), every[0].start_s, end, middle_window(kept), len(every), gaps)


def gaps_between(periods: Iterable[Interval]) -> list[Interval]:
    """Return the gaps between periods, in order."""
    return [(end, start) for (_, end), (start, _) in itertools.pairwise(merge_intervals(periods))]


def subtract_gaps(gaps: Iterable[Interval], t: float) -> float:
    """Return a clock time minus the length of all gaps before it. A time within a gap becomes the start of the gap."""
    return t - math.fsum(min(t, end) - start for start, end in gaps if t > start)


def arrange_lanes(drawn: Iterable[Box]) -> list[Lane]:
    """Return lanes with the boxes `drawn`, which must be sorted by start. The lanes are sorted by gang and worker.

    Each box is put into the first lane of its worker that is free. A lane is free if its last box has ended, with a
    tolerance of 1 us for rounding."""
    by_worker: dict[tuple[str, str], list[list[Box]]] = {}
    for box in drawn:
        rows = by_worker.setdefault((box.gang, box.worker), [])
        free = next((row for row in rows if row[-1].end_s <= box.start_s + 1e-6), None)
        if free is None:
            rows.append([box])
        else:
            free.append(box)
    return [Lane(*where, row) for where in sorted(by_worker) for row in by_worker[where]]


def middle_window(drawn: Sequence[Box], num_steps: int = 4) -> Interval | None:
    """Return the period in which the middle `num_steps` steps were trained. None if at most `num_steps` steps were
    trained.

    The period lasts from the start of the first update of these steps to the end of the last update. A margin of 4 % is
    added on both sides, but the period does not extend beyond the first and the last box."""
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

"""Which stage each worker ran when, as columns of integers: a long run has tens of thousands of executions. Pure
functions. May import this folder, pipeline.observe.{journal, lanes, summary} and storage.address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.lanes import lanes_of, middle_window
from pipeline.observe.report.troubles import Trouble
from pipeline.observe.summary import boxes
from storage.address import Address


@dataclass(frozen=True)
class TimelineLane:
    """A row of the picture."""

    gang: str
    worker: str


@dataclass(frozen=True)
class TimelineMark:
    """A moment worth seeing: a driver began, an alarm, a loss."""

    ms: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunTimeline:
    """Columns of equal length, one entry for each execution; times in milliseconds since `start`."""

    start: float
    """Seconds since the epoch."""
    duration_ms: int
    window_ms: tuple[int, int]
    """What is shown first: the middle steps."""
    lanes: Sequence[TimelineLane]
    stages: Sequence[str]
    lane: Sequence[int]
    stage: Sequence[int]
    """Number of the stage in `stages`."""
    step: Sequence[int]
    shard: Sequence[int]
    begin_ms: Sequence[int]
    length_ms: Sequence[int]
    versions: Sequence[str]
    """Of the weights that took part, as far as it was read; else empty."""
    marks: Sequence[TimelineMark]
    of_executions: int
    """More than are drawn where a run is long: then the first and the last are."""


def run_timeline(
    events: Sequence[Event], versions: Mapping[Address, str], troubles: Sequence[Trouble], most: int
) -> RunTimeline | None:
    """At most `most` executions; None where nothing was run."""
    every = boxes(events)
    if not every:
        return None
    kept = every if len(every) <= most else [*every[: most // 2], *every[len(every) - most // 2 :]]
    start, end = every[0].start_s, max(box.end_s for box in every)
    lanes = lanes_of(kept)
    placed = [(number, box) for number, lane in enumerate(lanes) for box in lane.boxes]
    stages = sorted({box.address.stage for box in kept})
    number = {stage: i for i, stage in enumerate(stages)}

    def ms(t: float) -> int:
        return round((t - start) * 1000)

    window = middle_window(kept)
    return RunTimeline(
        start=start,
        duration_ms=ms(end),
        window_ms=(ms(window[0]), ms(window[1])) if window is not None else (0, ms(end)),
        lanes=[TimelineLane(lane.gang, lane.worker) for lane in lanes],
        stages=stages,
        lane=[lane for lane, _ in placed],
        stage=[number[box.address.stage] for _, box in placed],
        step=[box.address.step for _, box in placed],
        shard=[box.address.shard for _, box in placed],
        begin_ms=[ms(box.start_s) for _, box in placed],
        length_ms=[round((box.end_s - box.start_s) * 1000) for _, box in placed],
        versions=[versions.get(box.address, "") for _, box in placed],
        marks=[*_starts(events, start), *(TimelineMark(ms(t.at), t.kind, t.text) for t in troubles)],
        of_executions=len(every),
    )


def _starts(events: Sequence[Event], start: float) -> list[TimelineMark]:
    """Drivers after the first."""
    begun = [event for event in events if event.kind is EventKind.RUN_STARTED][1:]
    return [TimelineMark(round((e.t - start) * 1000), "resumed", e.detail or "") for e in begun]

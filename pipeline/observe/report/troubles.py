"""What went wrong in a run and how it went on: alarms, losses and recoveries, failed attempts, warnings. Pure
functions. May import pipeline.observe.{journal, summary}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.summary import TrainerLoss

_KINDS = {
    EventKind.ALARM: "alarm",
    EventKind.GANG_LOST: "lost",
    EventKind.FAILED: "failed",
    EventKind.ROWS_MOVED: "rows moved",
    EventKind.WARNED: "warning",
}
_GRAVEST_FIRST = ("alarm", "lost", "recovered", "failed", "rows moved", "warning")


@dataclass(frozen=True)
class Trouble:
    """Something that somebody may want to know."""

    at: float
    """Seconds since the epoch."""
    kind: str
    where: str
    """Gang or worker, stage and step."""
    text: str


@dataclass(frozen=True)
class RunTroubles:
    """In the order of time."""

    shown: Sequence[Trouble]
    of_all: int
    """More than are shown where there are very many; then the gravest are."""


def run_troubles(events: Sequence[Event], losses: Sequence[TrainerLoss], most: int = 300) -> RunTroubles:
    """`losses`: of gangs that train, with what they cost."""
    found = [
        Trouble(event.t, _KINDS[event.kind], _where(event), _text(event)) for event in events if event.kind in _KINDS
    ]
    found += _rebuilt(events, losses)
    grave = sorted(found, key=lambda trouble: (_GRAVEST_FIRST.index(trouble.kind), trouble.at))[:most]
    return RunTroubles(sorted(grave, key=lambda trouble: trouble.at), len(found))


def _rebuilt(events: Sequence[Event], losses: Sequence[TrainerLoss]) -> list[Trouble]:
    """Gangs that came back: each loss with the next time that its worker (or any of its gang) was built."""
    cost = {(loss.gang, loss.t): loss.lost_s for loss in losses}
    found = []
    for i, event in enumerate(events):
        if event.kind is not EventKind.GANG_LOST:
            continue
        later = (e for e in events[i:] if e.kind is EventKind.GANG_BUILT and e.gang == event.gang)
        built = next((e for e in later if event.worker in (None, e.worker)), None)
        if built is not None:
            lost_s = cost.get((event.gang or "", event.t))
            trains = "" if lost_s is None else f"; trained again {lost_s:.1f} s after the loss"
            found.append(
                Trouble(built.t, "recovered", _where(built), f"built again in {built.t - event.t:.1f} s{trains}")
            )
    return found


def _where(event: Event) -> str:
    node = None if event.stage is None else f"{event.stage} {'' if event.step is None else event.step}".strip()
    step = f"step {event.step}" if event.stage is None and event.step is not None else None
    return ", ".join(part for part in (event.worker or event.gang, node, step) if part)


def _text(event: Event) -> str:
    return f"{event.rule}: {event.detail or ''}" if event.rule else event.detail or ""

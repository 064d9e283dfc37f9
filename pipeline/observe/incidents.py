"""Incidents of a run: lost workers and their recovery, alarms, failed attempts, warnings. Pure functions of the
journal's events.

The live display, the dashboard's page `/stageline`, the summary and the report all use `WorkerLosses`:

    GANG_LOST ──► lost ──GANG_BUILT──► built ──end of the first update that began after the loss──► trained

A trainer counts as lost until it has trained again. By that time its gang is rebuilt, its models are restored, and the
updates since their checkpoint have run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pipeline.observe.journal import Event, EventKind

_UPDATES = frozenset({"update_policy", "update_critic"})


@dataclass(frozen=True)
class WorkerLoss:
    """The loss of a worker. Times are in seconds since the epoch."""

    gang: str
    worker: str
    lost_at: float
    reason: str
    rebuilt_at: float | None = None
    """Time at which the worker, or its whole gang, was rebuilt. None if it is not rebuilt yet."""
    trained_again_at: float | None = None
    """Time at which the gang finished its first update after the worker was lost. None if it has not finished one yet,
    or if the gang trains no model."""


@dataclass
class WorkerLosses:
    """All losses of workers so far. `apply_event` must be called with every event, in order."""

    rebuilt_together: Collection[str] = ()
    """Names of the gangs whose workers are lost and rebuilt together."""
    losses: list[WorkerLoss] = field(default_factory=list)
    """All losses, in order of time."""
    trainers: set[str] = field(default_factory=set)
    """Names of the gangs that train: all gangs with at least one event so far about an update (stage `update_policy` or
    `update_critic`)."""
    _step: int = 0
    """The step that is being trained."""
    _reported: set[int] = field(default_factory=set)
    """Indices in `losses` of the losses that `step_finished` reported."""

    def apply_event(self, event: Event) -> None:
        """Update the state with one event."""
        if event.gang is None:
            return
        if event.stage in _UPDATES:
            self.trainers.add(event.gang)
        if event.kind is EventKind.GANG_LOST:
            self.losses.append(WorkerLoss(event.gang, event.worker or event.gang, event.t, event.detail or ""))
        elif event.kind is EventKind.GANG_BUILT:
            self._update_losses(
                lambda loss: loss.rebuilt_at is None and self._is_repaired_by(event, loss), rebuilt_at=event.t
            )
        elif event.kind is EventKind.FINISHED and event.stage in _UPDATES:
            begun = event.t - (event.seconds or 0.0)
            self._update_losses(
                lambda loss: (
                    loss.gang == event.gang
                    and loss.rebuilt_at is not None
                    and begun >= loss.lost_at
                    # The ranks end an update at different times. The earliest end counts.
                    and (loss.trained_again_at is None or event.t < loss.trained_again_at)
                ),
                trained_again_at=event.t,
            )

    def loss_repaired_by(self, event: Event) -> WorkerLoss | None:
        """Return the first loss that this GANG_BUILT event repaired, or None if it repaired none."""
        return next(
            (loss for loss in self.losses if loss.rebuilt_at == event.t and self._is_repaired_by(event, loss)), None
        )

    def _is_repaired_by(self, event: Event, loss: WorkerLoss) -> bool:
        one = event.gang in self.rebuilt_together or event.worker in (None, loss.worker)
        return loss.gang == event.gang and one

    def _update_losses(self, concerned: Callable[[WorkerLoss], bool], **change: Any) -> None:
        self.losses = [replace(loss, **change) if concerned(loss) else loss for loss in self.losses]

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], dict[str, float]]:
        """Handle the end of a step, and report the trainers that have recovered since the last call. A trainer recovers
        from the loss of a worker when it finishes an update that began after the loss.

        Return two things:

        - one message for each recovered trainer. It says at which step the worker was lost, how long the rebuilding
          took and how many updates were replayed (from `metrics`, the metrics of the step)
        - a dictionary with the metric `trainer/lost_s`, or an empty one if no trainer has recovered. The metric is the
          time in seconds from the loss to the end of that update, summed over the recovered trainers. If a trainer lost
          workers several times before it recovered, its time counts from the first loss
        """
        lost_at, self._step = self._step, step + 1
        back: dict[str, WorkerLoss] = {}
        for number, loss in enumerate(self.losses):
            if loss.trained_again_at is not None and number not in self._reported:
                self._reported.add(number)
                back.setdefault(loss.gang, loss)
        replayed = int(sum(metrics.get(f"{role}/replayed_updates", 0.0) for role in ("policy", "critic")))
        updates = f"{replayed} update{'' if replayed == 1 else 's'} replayed"
        lines = [
            f"{loss.worker} lost at step {lost_at}; rebuilt in {loss.rebuilt_at - loss.lost_at:.0f} s, {updates}"
            for loss in back.values()
            if loss.rebuilt_at is not None
        ]
        seconds = sum(
            loss.trained_again_at - loss.lost_at for loss in back.values() if loss.trained_again_at is not None
        )
        return lines, {"trainer/lost_s": seconds} if back else {}


def find_worker_losses(events: Iterable[Event], rebuilt_together: Collection[str] = ()) -> WorkerLosses:
    """Return the losses in all events of a journal. `rebuilt_together`: names of the gangs whose workers are lost and
    rebuilt together."""
    losses = WorkerLosses(rebuilt_together)
    for event in events:
        losses.apply_event(event)
    return losses


# ---- incidents -------------------------------------------------------------------------------------------

_KINDS = {
    EventKind.ALARM: "alarm",
    EventKind.GANG_LOST: "lost",
    EventKind.FAILED: "failed",
    EventKind.ROWS_MIGRATED: "rows migrated",
    EventKind.WARNED: "warning",
}
_NONE: Mapping[tuple[str, float], float] = MappingProxyType({})
_WORST_FIRST = ("alarm", "lost", "recovered", "failed", "rows migrated", "warning")


@dataclass(frozen=True)
class Incident:
    """An entry in the list of incidents that the user sees: an alarm, a lost or recovered worker, a failed attempt at a
    node, migrated rows, or a warning."""

    at: float
    """Time, seconds since the epoch."""
    kind: str
    where: str
    """The place of the incident: gang or worker, stage and step."""
    text: str


def incident_of_event(
    event: Event, losses: WorkerLosses, lost_s: Mapping[tuple[str, float], float] = _NONE
) -> Incident | None:
    """Return the incident that an event describes, or None if the event describes no incident.

    Args:
        event: an event of the journal.
        losses: the losses of workers up to this event and including it.
        lost_s: (gang, time of a loss) -> seconds from the loss until the gang trained again. A loss may be missing."""
    if event.kind is EventKind.GANG_BUILT:
        loss = losses.loss_repaired_by(event)
        if loss is None:
            return None
        seconds = lost_s.get((loss.gang, loss.lost_at))
        trained = "" if seconds is None else f"; trained again {seconds:.1f} s after the loss"
        return Incident(event.t, "recovered", loss.worker, f"built again in {event.t - loss.lost_at:.1f} s{trained}")
    if event.kind not in _KINDS:
        return None
    node = None if event.stage is None else f"{event.stage} {'' if event.step is None else event.step}".strip()
    step = f"step {event.step}" if event.stage is None and event.step is not None else None
    where = ", ".join(part for part in (event.worker or event.gang, node, step) if part)
    text = f"{event.rule}: {event.detail or ''}" if event.rule else event.detail or ""
    return Incident(event.t, _KINDS[event.kind], where, text)


def worst_incidents(incidents: Iterable[Incident], max_count: int) -> list[Incident]:
    """Return up to `max_count` incidents, in order of time. If there are more, the most severe kinds are kept."""
    kept = sorted(incidents, key=lambda one: (_WORST_FIRST.index(one.kind), one.at))[:max_count]
    return sorted(kept, key=lambda one: one.at)

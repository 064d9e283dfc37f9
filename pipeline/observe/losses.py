"""Trainers that were lost, and what that cost, as it happens: for the line above the display and the metrics of a step.

    GANG_LOST ──► lost ──GANG_BUILT──► rebuilt ──an update ends──► trains ──a step is over──► said

May import pipeline.observe.journal and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.observe.journal import Event, EventKind

_UPDATES = frozenset({"update_policy", "update_critic"})


@dataclass(frozen=True)
class Loss:
    """A worker of a gang that trains was lost."""

    worker: str
    at: float
    """Seconds since the epoch, as are the others."""
    built: float | None = None
    trained: float | None = None


@dataclass
class Losses:
    """Owns the fold: give it every event in order."""

    step: int = 0
    """Being trained."""
    _open: dict[str, Loss] = field(default_factory=dict)
    """By gang; of several losses before it trains again the first counts."""
    _trainers: set[str] = field(default_factory=set)

    def take(self, event: Event) -> None:
        """Goes on by one event."""
        gang = event.gang
        if gang is None:
            return
        if event.stage in _UPDATES:
            self._trainers.add(gang)
        loss = self._open.get(gang)
        if event.kind is EventKind.GANG_LOST and gang in self._trainers and loss is None:
            self._open[gang] = Loss(event.worker or gang, event.t)
        elif event.kind is EventKind.GANG_BUILT and loss is not None and loss.built is None:
            self._open[gang] = replace(loss, built=event.t)
        elif (
            event.kind is EventKind.FINISHED and event.stage in _UPDATES and loss is not None and loss.built is not None
        ):
            begun = event.t - (event.seconds or 0.0)
            if begun >= loss.at and loss.trained is None:
                self._open[gang] = replace(loss, trained=event.t)

    def over(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], dict[str, float]]:
        """A step is over: what a person is told of the trainers that train again, and the metrics of it."""
        lost_at, self.step = self.step, step + 1
        back = {gang: loss for gang, loss in self._open.items() if loss.trained is not None}
        self._open = {gang: loss for gang, loss in self._open.items() if gang not in back}
        replayed = sum(metrics.get(f"{role}/replayed_updates", 0.0) for role in ("policy", "critic"))
        lines = [_line(loss, lost_at, int(replayed)) for loss in back.values()]
        seconds = sum(loss.trained - loss.at for loss in back.values() if loss.trained is not None)
        return lines, {"trainer/lost_s": seconds} if back else {}


def _line(loss: Loss, step: int, replayed: int) -> str:
    built = "" if loss.built is None else f"rebuilt in {loss.built - loss.at:.0f} s, "
    updates = f"{replayed} update{'' if replayed == 1 else 's'} replayed"
    return f"{loss.worker} lost at step {step}; {built}{updates}"

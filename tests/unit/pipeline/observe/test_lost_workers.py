"""A trainer that was lost: said once it trains again, with what that took."""

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.node_events import WorkerLosses


def _update(kind: EventKind, t: float, seconds: float | None = None) -> Event:
    return Event(t, kind, "update_policy", 42, 0, gang="train", worker="train-0", seconds=seconds)


def test_a_lost_trainer_is_said_when_it_trains_again() -> None:
    losses = WorkerLosses()
    assert losses.over(41, {}) == ([], {})
    losses.take(_update(EventKind.SUBMITTED, 9.0))
    losses.take(Event(10.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="its process ended"))
    losses.take(Event(10.0, EventKind.GANG_LOST, gang="score", worker="score-0", detail="its process ended"))
    assert losses.over(41, {}) == ([], {}), "it does not train yet"
    losses.take(_update(EventKind.FINISHED, 10.5, 3.0))  # a report of before
    losses.take(Event(14.0, EventKind.GANG_BUILT, gang="train", worker="train-0"))
    losses.take(_update(EventKind.FINISHED, 17.0, 2.0))
    line = "train-0 lost at step 42; rebuilt in 4 s, 2 updates replayed"
    assert losses.over(42, {"policy/replayed_updates": 2.0}) == ([line], {"trainer/lost_s": 7.0})
    assert losses.over(43, {}) == ([], {})

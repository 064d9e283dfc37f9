"""Lost workers: what their loss took, reported once they work again."""

from pipeline.observe.incidents import WorkerLosses, incident_of_event, worst_incidents
from pipeline.observe.journal import Event, EventKind


def _update(kind: EventKind, t: float, seconds: float | None = None) -> Event:
    return Event(t, kind, "update_policy", 42, 0, gang="train", worker="train-0", seconds=seconds)


def test_a_lost_trainer_is_said_when_it_trains_again() -> None:
    losses = WorkerLosses()
    assert losses.step_finished(41, {}) == ([], {})
    losses.apply_event(_update(EventKind.SUBMITTED, 9.0))
    losses.apply_event(Event(10.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="its process ended"))
    losses.apply_event(Event(10.0, EventKind.GANG_LOST, gang="score", worker="score-0", detail="its process ended"))
    assert losses.step_finished(41, {}) == ([], {}), "it does not train yet"
    losses.apply_event(_update(EventKind.FINISHED, 10.5, 3.0))  # a report of before
    losses.apply_event(Event(14.0, EventKind.GANG_BUILT, gang="train", worker="train-0"))
    losses.apply_event(_update(EventKind.FINISHED, 17.0, 2.0))
    line = "train-0 lost at step 42; rebuilt in 4 s, 2 updates replayed"
    assert losses.step_finished(42, {"policy/replayed_updates": 2.0}) == ([line], {"trainer/lost_s": 7.0})
    assert losses.step_finished(43, {}) == ([], {})


def test_a_gang_that_is_lost_twice_recovers_once() -> None:
    losses = WorkerLosses(rebuilt_together={"train"})
    events = [
        Event(1.0, EventKind.GANG_LOST, gang="train", worker="train-1", detail="killed"),
        Event(2.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="while it was built"),
        Event(3.0, EventKind.GANG_BUILT, gang="engine", worker="engine-0"),
        Event(6.0, EventKind.GANG_BUILT, gang="train", worker="train-0"),
        Event(7.0, EventKind.ALARM, rule="kl", step=2, detail="too far"),
    ]
    found = []
    for event in events:
        losses.apply_event(event)
        found.append(incident_of_event(event, losses, {("train", 1.0): 7.5}))
    shown = [one for one in found if one is not None]
    assert [(one.kind, one.where, one.text) for one in shown] == [
        ("lost", "train-1", "killed"),
        ("lost", "train-0", "while it was built"),
        ("recovered", "train-1", "built again in 5.0 s; trained again 7.5 s after the loss"),
        ("alarm", "step 2", "kl: too far"),
    ]
    assert [one.kind for one in worst_incidents(shown, max_count=2)] == ["lost", "alarm"]

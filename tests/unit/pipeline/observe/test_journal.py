"""Events come back as they were written, also from a journal whose last line a crash cut short."""

from __future__ import annotations

from pathlib import Path

from pipeline.observe.journal import Event, EventKind, Journal, read_events, run_starts


def test_events_come_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path, heard = tmp_path / "events.jsonl", []
    event = Event(1.5, EventKind.FINISHED, "score", 2, 1, 0, "score", "score-0", seconds=0.5, store_s=0.25)
    with Journal(path, heard.append) as journal:
        journal.append(event)
        now = journal.now(EventKind.PUBLISHED, step=3)
    assert heard == [event, now]
    with path.open("a") as torn:
        torn.write('{"t":2.0,"ki')
    assert list(read_events(path)) == [event, now]


def test_every_start_of_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert run_starts(path) == []
    for started in (10.0, 20.0):
        with Journal(path) as journal:
            journal.append(Event(started, EventKind.RUN_STARTED))
            journal.append(Event(started + 5, EventKind.RUN_FINISHED))
    assert run_starts(path) == [10.0, 20.0]

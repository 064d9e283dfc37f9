"""Events come back as they were written, also from a journal whose last line a crash cut short."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeline.observe.journal import (
    AppendFailed,
    Event,
    EventKind,
    Journal,
    journal_exists,
    read_events,
    read_run_starts,
)


def test_events_come_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path, heard = tmp_path / "events.jsonl", []
    event = Event(1.5, EventKind.FINISHED, "score", 2, 1, 0, "score", "score-0", seconds=0.5, store_s=0.25)
    with Journal(path, heard.append) as journal:
        journal.append(event)
        now = journal.append_now(EventKind.PUBLISHED, step=3)
    assert heard == [event, now]
    with path.open("a") as torn:
        torn.write('{"t":2.0,"ki')
    assert list(read_events(path)) == [event, now]


def test_every_start_of_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_run_starts(path) == []
    for started in (10.0, 20.0):
        with Journal(path) as journal:
            journal.append(Event(started, EventKind.RUN_STARTED))
            journal.append(Event(started + 5, EventKind.RUN_FINISHED))
    assert read_run_starts(path) == [10.0, 20.0]


def test_a_torn_line_is_cut_before_the_next_is_written(tmp_path: Path) -> None:
    """The bytes may make no sense: a power cut may leave zeros."""
    path = tmp_path / "events.jsonl"
    first, second = Event(1.0, EventKind.RUN_STARTED), Event(2.0, EventKind.RUN_STARTED)
    for torn in ('{"t":1.5,"ki', "\0" * 5000, '{"t":1.5,"kind":"finished"}'):
        path.write_text(first.to_json() + "\n" + torn)
        with Journal(path) as journal:
            journal.append(second)
        assert list(read_events(path)) == [first, second]


def test_a_journal_of_nothing_but_a_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"t":1.')
    with Journal(path) as journal:
        journal.append(Event(2.0, EventKind.RUN_STARTED))
    assert read_run_starts(path) == [2.0]


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":1.5,"ki{"t":2.0,"kind":"finished"}',
        b"\xff\xfe",
        b"3",
        b'{"kind":"unheard_of"}',
        b'{"t":null,"kind":"started"}',
        b'{"t":1.5,"kind":"finished","stage":"score","step":"a","seconds":"b"}',
    ],
)
def test_a_line_torn_by_an_earlier_driver_is_passed_over_and_said(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    first, last = Event(1.0, EventKind.RUN_STARTED), Event(3.0, EventKind.RUN_FINISHED)
    path.write_bytes(first.to_json().encode() + b"\n" + line + b"\n" + last.to_json().encode() + b"\n")
    before, torn, after = read_events(path)
    assert (before, after) == (first, last)
    assert (torn.t, torn.kind) == (1.0, EventKind.WARNED)
    assert torn.detail == f"{path}: line 2 is torn, and is passed over"


def test_a_journal_without_room_says_so_and_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes ten bytes of the line and no more."""
    path, heard = tmp_path / "events.jsonl", []
    write = os.pwrite

    def fill(descriptor: int, data: bytes, offset: int) -> int:
        if offset > len(first.to_json()) + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:10], offset)

    first = Event(1.0, EventKind.RUN_STARTED)
    with Journal(path, heard.append) as journal:
        journal.append(first)
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", fill)
            with pytest.raises(AppendFailed, match=r"events\.jsonl: No space left on device"):
                journal.append(Event(2.0, EventKind.FINISHED))
        assert heard == [first]
        journal.append(Event(3.0, EventKind.RUN_FINISHED))
    assert [event.t for event in read_events(path)] == [1.0, 3.0]


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(AppendFailed, match=r"cannot write to .*nowhere/events\.jsonl: No such file"):
        Journal(tmp_path / "nowhere" / "events.jsonl")


def test_a_long_journal_is_read_through_all_of_its_parts(tmp_path: Path) -> None:
    """A resumed run continues the numbers. A driver that died right after a rename has left no newest part."""
    path = tmp_path / "events.jsonl"
    assert not journal_exists(path)
    for start in (0, 20):
        with Journal(path, part_bytes=300) as journal:
            for t in range(start, start + 20):
                journal.append(Event(float(t), EventKind.RUN_STARTED))
    parts = sorted(tmp_path.glob("events-*.jsonl"))
    assert len(parts) > 3
    assert parts[0].name == "events-000001.jsonl"
    assert all(300 <= part.stat().st_size < 400 for part in parts)
    assert [event.t for event in read_events(path)] == [float(t) for t in range(40)] == read_run_starts(path)
    path.unlink()
    assert journal_exists(path)
    assert len(read_run_starts(path)) == sum(part.read_bytes().count(b"\n") for part in parts)


def test_a_reader_misses_nothing_while_a_part_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with Journal(path, part_bytes=100) as journal:
        journal.append(Event(1.0, EventKind.RUN_STARTED))
        events = read_events(path)
        assert next(events).t == 1.0
        for t in (2.0, 3.0, 4.0):
            journal.append(Event(t, EventKind.RUN_STARTED))
        assert [event.t for event in events][:1] == [2.0]
    assert read_run_starts(path) == [1.0, 2.0, 3.0, 4.0]


def test_only_the_newest_part_may_end_in_half_a_line(tmp_path: Path) -> None:
    """A full part ends with a whole line, unless a power cut took its end."""
    path = tmp_path / "events.jsonl"
    whole = Event(1.0, EventKind.RUN_STARTED).to_json()
    (tmp_path / "events-000001.jsonl").write_text(f"{whole}\n{whole[:9]}")
    path.write_text(f"{whole}\n{whole[:9]}")
    first, torn, last = read_events(path)
    assert (first.kind, last.kind) == (EventKind.RUN_STARTED, EventKind.RUN_STARTED)
    assert "events-000001.jsonl: line 2 is torn" in str(torn.detail)

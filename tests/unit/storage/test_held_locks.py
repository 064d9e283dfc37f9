"""A file that one process holds: on one host by a lock, beyond it by signs of life. Another host is one whose kernel
has another identity, on a filesystem that keeps flock within a host."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import locks
from storage.locks import HeldByAnother, held, holder
from tests.support.waiting import until

AN_HOUR_S = 3600.0


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A file that a process of another host has, or had when it died."""
    path = tmp_path / "driver.lock"
    path.write_text(json.dumps({"process": 7, "host": "n1", "boot": "another", "since": 0.0}))
    return path


def instead_of_sleeping(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: act())


def test_who_looks_sees_the_holder_and_keeps_none_out(tmp_path: Path) -> None:
    path = tmp_path / "driver.lock"
    assert holder(path) is None
    assert not path.exists(), "looking leaves nothing behind"
    with held(path):
        assert str(os.getpid()) in str(holder(path))
        assert path.stat().st_mode & 0o777 == 0o600, "whoever may open it may lock it"
        with pytest.raises(HeldByAnother, match=f"process {os.getpid()} on "), held(path):
            pass
    assert holder(path) is None
    assert path.read_text() == "", "an end by itself leaves no name to be waited for"


def test_a_holder_outlasts_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder takes the lock at the very moment of a look."""
    path = tmp_path / "driver.lock"
    path.touch()
    with path.open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        instead_of_sleeping(monkeypatch, lambda: fcntl.flock(look, fcntl.LOCK_UN))
        with held(path):
            assert holder(path) is not None


def test_a_holder_shows_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.001)
    path = tmp_path / "driver.lock"
    with held(path):
        before = path.stat().st_mtime_ns
        until(lambda: path.stat().st_mtime_ns > before)


def test_a_living_holder_on_another_host_keeps_others_out(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_sleeping(monkeypatch, lambda: os.utime(elsewhere))
    assert holder(elsewhere) == "process 7 on n1"
    with pytest.raises(HeldByAnother, match="process 7 on n1, which shows signs of life"), held(elsewhere):
        pass


def test_a_silent_holder_elsewhere_is_waited_for_and_replaced(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was requeued comes to another host soon after the first one died."""
    monkeypatch.setattr(locks, "SILENCE_S", 0.01)
    waits: list[None] = []
    instead_of_sleeping(monkeypatch, lambda: waits.append(None))
    with held(elsewhere):
        assert waits, "it was given time to show that it lives"
        assert str(os.getpid()) in str(holder(elsewhere))


def test_nobody_waits_for_who_has_long_been_silent(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_sleeping(monkeypatch, lambda: pytest.fail("waited"))
    long_ago = elsewhere.stat().st_mtime - AN_HOUR_S
    os.utime(elsewhere, (long_ago, long_ago))
    assert holder(elsewhere) is None
    with held(elsewhere):
        assert [path.name for path in elsewhere.parent.iterdir()] == [elsewhere.name], "no probe is left"


def test_a_lock_that_the_filesystem_has_not_let_go_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SILENCE_S", 0.0)
    instead_of_sleeping(monkeypatch, lambda: None)
    with elsewhere.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(HeldByAnother, match="whose lock the filesystem has not let go"), held(elsewhere):
            pass

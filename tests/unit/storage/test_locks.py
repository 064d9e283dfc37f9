"""Locks that no other account can take, and waits for them that end."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.config.paths import RunPaths
from pipeline.driver.session import hold_driver_lock
from pipeline.workers.attached import board_of_host
from storage import locks
from storage.errors import StoreError
from storage.locks import HeldByAnother, held, holder, lock_holder, open_lock, take_lock
from storage.weight_copies import receiving
from storage.weights import WeightBoard
from tests.support.processes import start_python
from tests.support.waiting import until

HOLDER = """
import fcntl, sys
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""
NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can look into, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="stageline-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user for a while")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def held_elsewhere(path: Path) -> Iterator[int]:
    """Another process has the lock; its id."""
    with start_python(HOLDER, path) as process:
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("kind", ["plain", "the driver's", "of a host's boards", "of a version that arrives"])
def test_another_user_cannot_open_a_lock(shared: Path, kind: str) -> None:
    """A user who can open a file can lock it, and make every worker wait."""
    board = WeightBoard(shared / "board")
    lock, holding = {
        "plain": lambda: (shared / "lock", open_lock(shared / "lock")),
        "the driver's": lambda: (shared / "driver.lock", hold_driver_lock(RunPaths(shared))),
        "of a host's boards": lambda: (shared / "b.lock", board_of_host(shared / "b")),
        "of a version that arrives": lambda: (shared / "board/v000007.lock", receiving(board, 7, wait_s=1)),
    }[kind]()
    with holding:
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        with as_nobody(), pytest.raises(PermissionError):
            lock.open()


def test_a_lock_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    """Earlier versions made such locks."""
    (tmp_path / "lock").touch(0o666)
    open_lock(tmp_path / "lock").close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_another_users_lock_and_a_link_are_refused(shared: Path) -> None:
    (shared / "aim").touch()
    (shared / "link").symlink_to(shared / "aim")
    with pytest.raises(StoreError, match=rf"{shared}/link, a lock, is a link or another user's: .*\. Have it removed"):
        open_lock(shared / "link")
    open_lock(shared / "mine").close()
    with as_nobody(), pytest.raises(StoreError, match=rf"{shared}/mine, a lock, is a link or another user's"):
        open_lock(shared / "mine")


def test_a_wait_ends_and_names_who_has_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open_lock(path) as lock, held_elsewhere(path) as pid:
        for shared_wait in (False, True):
            with pytest.raises(StoreError, match=rf"{path} is locked by process {pid} \(.*python.*\), for more than 0"):
                take_lock(lock, path, 0.05, shared=shared_wait)
    with open_lock(path) as lock:
        take_lock(lock, path, 0.0)


def test_who_makes_progress_is_waited_for(tmp_path: Path) -> None:
    path, seen = tmp_path / "lock", iter([0, 10, 20, 20])
    with open_lock(path) as lock, held_elsewhere(path), pytest.raises(StoreError, match="is locked by"):
        take_lock(lock, path, 0.0, progress=lambda: next(seen))
    assert list(seen) == [], "it asked until nothing more came"


def test_another_user_sees_that_a_run_is_driven(shared: Path) -> None:
    paths = RunPaths(shared)
    with hold_driver_lock(paths):
        if lock_holder(paths.lock) is None:
            pytest.skip("this system does not list who has locks (/proc/locks)")
        with as_nobody():
            assert f"process {os.getpid()}" in (holder(paths.lock) or "")
    with as_nobody():
        assert holder(paths.lock) is None


def test_a_version_that_never_arrives_is_given_up(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path / "board")
    lock = board.directory / "v000003.lock"
    open_lock(lock).close()
    with held_elsewhere(lock) as pid:
        named = rf"v000003.lock is locked by process {pid} "
        with pytest.raises(StoreError, match=named), receiving(board, 3, wait_s=0.05):
            pass
    with receiving(board, 3, wait_s=0) as ours:
        assert ours
        with (board.directory / "v000003.lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


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
    with pytest.raises(HeldByAnother, match="process 7 on n1, which is alive"), held(elsewhere):
        pass


def test_a_silent_holder_elsewhere_is_waited_for_and_replaced(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was requeued comes to another host soon after the first one died."""
    monkeypatch.setattr(locks, "HOLDER_TIMEOUT_S", 0.01)
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
    monkeypatch.setattr(locks, "HOLDER_TIMEOUT_S", 0.0)
    instead_of_sleeping(monkeypatch, lambda: None)
    with elsewhere.open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(HeldByAnother, match="whose lock the filesystem has not released"), held(elsewhere):
            pass

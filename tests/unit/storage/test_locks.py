"""Locks that no other account can take, and waits for them that end."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.config.paths import RunPaths
from pipeline.driver.session import only_driver
from pipeline.workers.attached import board_of_host
from storage.errors import StoreError
from storage.locks import holder, lock_holder, open_lock, take_lock
from storage.weight_copies import receiving
from storage.weights import WeightBoard
from tests.support.processes import start_python

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
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("kind", ["plain", "the driver's", "of a host's boards", "of a version that arrives"])
def test_another_user_cannot_open_a_lock(shared: Path, kind: str) -> None:
    """A user who can open a file can lock it, and make every worker wait."""
    board = WeightBoard(shared / "board")
    lock, holding = {
        "plain": lambda: (shared / "lock", open_lock(shared / "lock")),
        "the driver's": lambda: (shared / "driver.lock", only_driver(RunPaths(shared))),
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
    with only_driver(paths):
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

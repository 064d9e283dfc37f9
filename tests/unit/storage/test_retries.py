"""A filesystem that refuses for a while is asked again. An error that will not pass is named at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage import files
from storage.address import Address
from storage.commits import Commit, new_attempt, provenance_here
from storage.config import Durability
from storage.errors import StoreError, StoreRefused
from storage.files import retried
from storage.ledger import Ledger


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes as the code sleeps."""
    pauses: list[float] = []
    monkeypatch.setattr("storage.files.time.sleep", pauses.append)
    monkeypatch.setattr("storage.files.time.monotonic", lambda: sum(pauses))
    return pauses


def failing(times: int, number: int) -> Callable[[], str]:
    """Raises an error of this number so often, then answers."""
    left: Iterator[int] = iter(range(times))

    def act() -> str:
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return "answer"

    return act


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT])
def test_a_passing_error_is_waited_out(number: int, slept: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert retried(failing(7, number), "runs/x/file", retry_s=60) == "answer"
    assert slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 7
    assert said[0] == f"runs/x/file: {os.strerror(number)} ({errno.errorcode[number]}); trying again in 0.05 s"


def test_retries_end(slept: list[float]) -> None:
    with pytest.raises(StoreError, match=r"runs/x/file: .*ESTALE\), still so after 5 s of trying") as raised:
        retried(failing(10**6, errno.ESTALE), "runs/x/file", retry_s=5)
    assert not isinstance(raised.value, StoreRefused)
    assert 3 < sum(slept) <= 5


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_what_only_a_person_can_change_is_an_error_at_once(number: int, slept: list[float]) -> None:
    with pytest.raises(StoreRefused, match=r"runs/x/file: .*What is committed is whole.*can be resumed"):
        retried(failing(1, number), "runs/x/file", retry_s=60)
    assert slept == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOENT, FileNotFoundError), (errno.EEXIST, FileExistsError), (errno.EISDIR, IsADirectoryError)],
)
def test_answers_are_no_faults(number: int, kind: type[OSError], slept: list[float]) -> None:
    with pytest.raises(kind):
        retried(failing(1, number), "x", retry_s=60)
    assert slept == []


def raising(error: Exception) -> Callable[[], str]:
    """Raise this error once, then answer."""
    left = [error]

    def act() -> str:
        if left:
            raise left.pop()
        return "answer"

    return act


def test_the_errors_of_an_object_stores_client_are_waited_out(slept: list[float]) -> None:
    """A client has some that say no number, and some that are no OSError."""
    botocore = pytest.importorskip("botocore.exceptions")
    aiohttp = pytest.importorskip("aiohttp")
    for error in (
        TimeoutError("the request took too long"),
        botocore.EndpointConnectionError(endpoint_url="http://store"),
        botocore.ReadTimeoutError(endpoint_url="http://store"),
        botocore.ConnectionClosedError(endpoint_url="http://store"),
        botocore.IncompleteReadError(actual_bytes=1, expected_bytes=2),
        aiohttp.ServerDisconnectedError(),
    ):
        assert files.is_transient(error)
        assert retried(raising(error), "s3://runs/x", retry_s=60) == "answer"
    assert slept == [0.05] * 6


def test_an_object_store_that_refuses_is_an_error_at_once(slept: list[float]) -> None:
    botocore = pytest.importorskip("botocore.exceptions")
    for error in (PermissionError("Access Denied"), botocore.NoCredentialsError()):
        with pytest.raises(StoreRefused):
            retried(raising(error), "s3://runs/x", retry_s=60)
    assert slept == []


@pytest.mark.parametrize("url", ["https://host/runs", "sftp://host/runs", "simplecache::s3://runs/x"])
def test_a_store_that_cannot_create_exclusively_is_refused(url: str) -> None:
    with pytest.raises(StoreRefused):
        files.open_root(url)


def commit() -> Commit:
    return Commit(
        Address("score", 0), new_attempt(), None, 0, {}, provenance_here(seed=0, config_hash=""), finished=1.0
    )


def every_call_once(monkeypatch: pytest.MonkeyPatch, names: list[str], number: int, *, after: bool) -> list[str]:
    """Make each of these functions of `os` fail at its first call, before or `after` it has done its work. Return the
    names of the functions that did."""
    failed: list[str] = []

    def flaky(name: str) -> None:
        real = getattr(os, name)

        def act(*args: object, **kwargs: object) -> object:
            first = name not in failed
            if first:
                failed.append(name)
            if first and not after:
                raise OSError(number, os.strerror(number))
            found = real(*args, **kwargs)
            if first:
                raise OSError(number, os.strerror(number))
            return found

        monkeypatch.setattr(files.os, name, act)

    for name in names:
        flaky(name)
    return failed


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, and the answer lost"])
def test_a_commit_is_made_once_if_any_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """A server that linked the record and whose answer was lost: the second try finds the file, and it is its own."""
    ledger, mine = Ledger(str(tmp_path)), commit()
    with monkeypatch.context() as patch:
        failed = every_call_once(patch, ["fsync", "link"], errno.ESTALE, after=after)
        assert ledger.commit(mine) == mine
        assert sorted(failed) == ["fsync", "link"]
    assert ledger.find(mine.address) == mine
    assert ledger.commit(commit()) == mine, "the next one still loses"
    ledger.tidy()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["shard_0000.json"]


def test_a_full_disk_leaves_nothing_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, mine = Ledger(str(tmp_path)), commit()
    with monkeypatch.context() as patch:
        every_call_once(patch, ["fsync"], errno.ENOSPC, after=False)
        with pytest.raises(StoreRefused, match=r"score/step_000000/shard_0000.json: No space left on device"):
            ledger.commit(mine)
    assert ledger.find(mine.address) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert ledger.commit(mine) == mine


def test_without_fsync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        pytest.fail("synced")

    monkeypatch.setattr(files.os, "fsync", fsync)
    ledger = Ledger(str(tmp_path), Durability(fsync=False))
    mine = commit()
    assert ledger.commit(mine) == mine
    files.write(files.open_root(str(tmp_path), Durability(fsync=False)), "x", b"1")


def test_temporaries_of_dead_processes_go(tmp_path: Path) -> None:
    root = files.open_root(str(tmp_path))
    files.write(root, "stage/kept.json", b"1")
    for name in (".kept.json.0123456789ab", ".other.json.ffffffffffff"):
        (tmp_path / "stage" / name).write_bytes(b"torn")
    (tmp_path / "stage" / ".hidden").write_bytes(b"somebody's")
    assert files.remove_temporaries(root) == 2
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == [".hidden", "kept.json"]


def test_what_comes_before_a_commit_is_over_when_it_exists(tmp_path: Path) -> None:
    ledger, mine, seen = Ledger(str(tmp_path)), commit(), []
    assert ledger.commit(mine, before=lambda: seen.append(ledger.find(mine.address))) == mine
    assert seen == [None]
    assert ledger.find(mine.address) == mine


def test_where_what_comes_before_fails_nothing_is_committed(tmp_path: Path) -> None:
    def broken() -> None:
        raise StoreRefused("full")

    ledger, mine = Ledger(str(tmp_path)), commit()
    with pytest.raises(StoreRefused, match="full"):
        ledger.commit(mine, before=broken)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert ledger.commit(mine) == mine


def test_files_that_are_written_together_are_whole_whatever_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """A sync that failed once may have lost what was written: the second try writes all again."""
    contents = {f"{number}": bytes([number]) * 1000 for number in range(5)}
    with monkeypatch.context() as patch:
        failed = every_call_once(patch, ["fsync"], errno.EIO, after=False)
        files.write_together(files.open_root(str(tmp_path)), "attempt", contents)
        assert failed == ["fsync"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "attempt").iterdir()} == contents

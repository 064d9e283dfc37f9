"""The file by which workers find a driver: what it holds, who may read it, which counts."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from pipeline.workers.scheduler_file import (
    SchedulerFile,
    file_of_driver,
    newest_driver,
    read_scheduler_file,
    remove_scheduler_file,
    write_scheduler_file,
)
from storage.errors import StoreError

CONTENT = SchedulerFile(3, "tls://n1:1", "n1", 7, "/runs/a", "/runs", "nonce", "certificate", "key", "name: a")


def test_what_is_written_is_read_and_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    write_scheduler_file(path, CONTENT)
    assert read_scheduler_file(path) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["scheduler.json"]


def test_where_it_cannot_be_written_no_key_is_left(tmp_path: Path) -> None:
    there = tmp_path / "scheduler.json"
    there.mkdir()
    with pytest.raises(FileExistsError):
        write_scheduler_file(there, CONTENT)
    assert [one.name for one in tmp_path.iterdir()] == ["scheduler.json"]


def test_one_of_another_driver_is_neither_written_over_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    write_scheduler_file(path, CONTENT)
    with pytest.raises(FileExistsError):
        write_scheduler_file(path, dataclasses.replace(CONTENT, nonce="other"))
    remove_scheduler_file(path, "other")
    assert read_scheduler_file(path) == CONTENT
    remove_scheduler_file(path, CONTENT.nonce)
    remove_scheduler_file(path, CONTENT.nonce)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_driver_counts(tmp_path: Path) -> None:
    assert newest_driver(tmp_path / "nothing") == 0
    for driver in (1, 2, 10):
        path = file_of_driver(tmp_path, driver)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (path.parent / ".scheduler-000011.json.1").touch()
    assert newest_driver(tmp_path) == 10


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"format": 1, "attempt": 1}', b'{"format": 99}', b"\x7fELF\xff\xfe"]
)
def test_what_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "scheduler.json"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"scheduler\.json is no scheduler file"):
        read_scheduler_file(path)


def test_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scheduler.json"
    write_scheduler_file(path, CONTENT)
    owner: Any = path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=f"belongs to user {owner}, and this process to {owner + 1}"):
        read_scheduler_file(path)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x", "Not a directory")):
        with pytest.raises(StoreError, match=f"{path} cannot be read: {why}"):
            read_scheduler_file(path)


def test_another_users_unreadable_file_is_told_from_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode is 0600 in a folder that may be entered, or the folder's mode is 0700."""

    def denied(*_: object, **__: object) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "scheduler.json"
    write_scheduler_file(path, CONTENT)
    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(StoreError, match=r"scheduler\.json cannot be read: Permission denied"):
        read_scheduler_file(path)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=f"{path} belongs to user {os.getuid()}, and this process to"):
        read_scheduler_file(path)
    stat_of = Path.stat
    monkeypatch.setattr("pathlib.Path.stat", lambda self, **given: denied() if self == path else stat_of(self, **given))
    with pytest.raises(StoreError, match=f"{tmp_path} belongs to user {os.getuid()}, and this process to"):
        read_scheduler_file(path)

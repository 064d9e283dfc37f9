"""The file by which workers find a driver: what it holds, who may read it, which counts."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from pipeline.workers.scheduler_file import (
    SchedulerFile,
    file_of_attempt,
    newest_attempt,
    read_scheduler_file,
    write_scheduler_file,
)
from storage.errors import StoreError

CONTENT = SchedulerFile(3, "tls://n1:1", "n1", 7, "/runs/a", "/runs", "nonce", "certificate", "key", "name: a")


def test_what_is_written_is_read_and_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text("older")
    path.chmod(0o644)
    write_scheduler_file(path, CONTENT)
    assert read_scheduler_file(path) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["scheduler.json"]


def test_the_newest_attempt_counts(tmp_path: Path) -> None:
    assert newest_attempt(tmp_path / "nothing") == 0
    for attempt in (1, 2, 10):
        path = file_of_attempt(tmp_path, attempt)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (path.parent / ".scheduler-000011.json.1").touch()
    assert newest_attempt(tmp_path) == 10


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"format": 1, "attempt": 1}), '{"format": 99}'])
def test_what_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"scheduler\.json is no scheduler file"):
        read_scheduler_file(path)


def test_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scheduler.json"
    write_scheduler_file(path, CONTENT)
    owner: Any = path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(StoreError, match=f"belongs to user {owner}, and this process to {owner + 1}"):
        read_scheduler_file(path)

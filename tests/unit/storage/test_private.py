"""Whose directories are opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.private import private_directory
from storage.weights import WeightBoard


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_this_user_can_enter(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        private_directory(tmp_path / "above" / "mine")
    finally:
        os.umask(before)
    assert mode(tmp_path / "above" / "mine") == 0o700
    private_directory(tmp_path / "above" / "mine")


def test_one_that_others_could_enter_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    private_directory(tmp_path / "open")
    assert mode(tmp_path / "open") == 0o700


def test_another_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(StoreError, match=rf"{tmp_path}/theirs belongs to user {me}, and this process to {me + 1}"):
        private_directory(tmp_path / "theirs")
    assert mode(tmp_path / "theirs") == 0o755


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_directory_is_refused(tmp_path: Path, what: str) -> None:
    """A link to a directory of this user's: whoever made it could aim it elsewhere later."""
    (tmp_path / "mine").mkdir()
    path = tmp_path / what
    path.symlink_to(tmp_path / "mine") if what == "link" else path.write_text("")
    with pytest.raises(StoreError, match="not a directory but a link or a file"):
        private_directory(path)


def test_a_weight_board_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name in shared memory can be guessed, and is found again by a resumed run."""
    with WeightBoard(tmp_path / "board"):
        assert mode(tmp_path / "board") == 0o700
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(StoreError, match=f"{tmp_path}/board belongs to user {me}"):
            WeightBoard(tmp_path / "board")

"""Whose directories are opened."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.host import private_directory, who_else_can_change
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
    """Its name in shared memory can be guessed, since a resumed run must find it."""
    with WeightBoard(tmp_path / "board"):
        assert mode(tmp_path / "board") == 0o700
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(StoreError, match=f"{tmp_path}/board belongs to user {me}"):
            WeightBoard(tmp_path / "board")


@pytest.mark.parametrize(
    ("place", "mode_of_it", "why"),
    [
        ("", 0o757, "can be written by every user"),
        ("run", 0o1777, "can be written by every user"),
        ("run/checkpoints/policy/v1/.metadata", 0o646, "can be written by every user"),
        ("run", 0o775, "can be written by group tape"),
    ],
)
def test_who_else_can_change_a_path_is_named(tmp_path: Path, place: str, mode_of_it: int, why: str) -> None:
    """Above it, itself, and below; another group's right to write as well as everybody's."""
    file = tmp_path / "above" / "run" / "checkpoints" / "policy" / "v1" / ".metadata"
    file.parent.mkdir(parents=True)
    file.touch()
    run, changed = tmp_path / "above" / "run", tmp_path / "above" / place
    assert who_else_can_change(run, all_below=True) is None
    if "tape" in why:
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to a group that it is not in")
        os.chown(changed, -1, grp.getgrnam("tape").gr_gid)
    changed.chmod(mode_of_it)
    assert who_else_can_change(run, all_below=True) == f"{changed} {why}"
    if changed == file:
        assert who_else_can_change(run, all_below=False) is None


def test_a_sticky_directory_above_and_the_users_own_group_are_no_danger(tmp_path: Path) -> None:
    """/tmp is such a directory, and `umask 002` leaves such files if every user has a group."""
    (tmp_path / "tmp" / "run").mkdir(parents=True)
    (tmp_path / "tmp").chmod(0o1777)
    if grp.getgrgid(os.getegid()).gr_name == pwd.getpwuid(os.geteuid()).pw_name:
        (tmp_path / "tmp" / "run").chmod(0o775)
    assert who_else_can_change(tmp_path / "tmp" / "run", all_below=True) is None


def test_a_link_is_followed_to_whoever_can_change_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs" / "checkpoints").mkdir(parents=True)
    (tmp_path / "theirs").chmod(0o777)
    (tmp_path / "run").symlink_to(tmp_path / "theirs" / "checkpoints")
    why = who_else_can_change(tmp_path / "run", all_below=True)
    assert why == f"{tmp_path}/theirs can be written by every user"
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me:  # what root has, everybody trusts
        assert "belongs to user" in str(who_else_can_change(tmp_path / "run", all_below=True))

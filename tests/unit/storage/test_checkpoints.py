"""Checkpoints: whole or not there, the first of two is kept, the newest that is old enough is found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from storage.checkpoints import Checkpoints
from storage.errors import StoreError


def save(checkpoints: Checkpoints, version: int, content: str = "weights", role: str = "policy") -> Path:
    path = checkpoints.begin(role, version)
    (path / "rank0").mkdir()
    (path / "rank0" / "model.bin").write_text(content)
    (path / "common.json").write_text("{}")
    return checkpoints.finish(role, version, path, {"step": version, "kl_coef": 0.05})


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


def test_what_was_saved_is_found(checkpoints: Checkpoints, tmp_path: Path) -> None:
    place = save(checkpoints, 12)
    assert place == tmp_path / "policy" / "v000012"
    assert checkpoints.latest("policy", 12) == (12, place, {"step": 12, "kl_coef": 0.05})
    assert (place / "rank0" / "model.bin").read_text() == "weights"
    checkpoints.verify("policy", 12)


def test_the_newest_that_is_old_enough(checkpoints: Checkpoints) -> None:
    for version in (2, 10, 6):
        save(checkpoints, version)
    found = [checkpoints.latest("policy", at_most) for at_most in (1, 2, 5, 9, 10, 99)]
    assert [None if f is None else f[0] for f in found] == [None, 2, 2, 6, 10, 10]
    assert checkpoints.latest("critic", 99) is None


def test_an_unfinished_one_is_ignored(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    (checkpoints.begin("policy", 2) / "model.bin").write_text("half")
    assert checkpoints.versions("policy") == [1]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest"])
def test_a_damaged_one_is_ignored_and_can_be_saved_again(checkpoints: Checkpoints, damage: str) -> None:
    save(checkpoints, 1)
    place = save(checkpoints, 2)
    file = place / "rank0" / "model.bin"
    if damage == "truncated":
        file.write_text("w")
    elif damage == "missing":
        file.unlink()
    else:
        (place / "checkpoint.json").unlink()
    assert checkpoints.versions("policy") == [1]
    save(checkpoints, 2, "again")
    assert checkpoints.versions("policy") == [1, 2]
    assert file.read_text() == "again"


def test_the_first_of_two_is_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    place = save(checkpoints, 1, "first")
    assert save(checkpoints, 1, "second") == place
    assert (place / "rank0" / "model.bin").read_text() == "first"
    assert [p.name for p in (tmp_path / "policy").iterdir()] == ["v000001"]


def test_verify_reads_every_byte(checkpoints: Checkpoints) -> None:
    place = save(checkpoints, 1)
    (place / "rank0" / "model.bin").write_text("weightz")
    assert checkpoints.versions("policy") == [1], "the size is right: only verify can see it"
    with pytest.raises(StoreError, match=r"rank0/model\.bin: is not what was saved"):
        checkpoints.verify("policy", 1)
    with pytest.raises(StoreError, match="no complete checkpoint"):
        checkpoints.verify("policy", 2)


def test_prune_keeps_the_newest(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        save(checkpoints, version)
    (tmp_path / "policy" / "v000001" / "checkpoint.json").unlink()
    assert checkpoints.prune("policy", 2) == [2]
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["v000003", "v000004"]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        checkpoints.prune("policy", 0)


@pytest.mark.processes
def test_prune_removes_what_dead_processes_of_this_host_began(checkpoints: Checkpoints, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    names = {pid: f".v000009-{host}-{pid}-0123abcd" for pid in (ended.pid, os.getpid())}
    other = f".v000009-elsewhere-{ended.pid}-0123abcd"
    for name in (*names.values(), other):
        (tmp_path / "policy" / name).mkdir(parents=True)
    assert checkpoints.prune("policy", 1) == []
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == sorted([names[os.getpid()], other])

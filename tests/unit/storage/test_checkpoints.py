"""Checkpoints: whole or not there, the first of two is kept, the newest that is old enough is found."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.checkpoints import Checkpoints, FileSum, sum_file
from storage.errors import StoreError
from tests.support.paths import ROOT


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
    assert checkpoints.newest_first("policy", 12) == [12]
    assert checkpoints.place("policy", 12) == place
    assert (place / "rank0" / "model.bin").read_text() == "weights"
    assert checkpoints.verify("policy", 12) == {"step": 12, "kl_coef": 0.05}


def test_the_newest_that_is_old_enough(checkpoints: Checkpoints) -> None:
    for version in (2, 10, 6):
        save(checkpoints, version)
    found = [checkpoints.newest_first("policy", at_most) for at_most in (1, 2, 5, 9, 10, 99)]
    assert found == [[], [2], [2], [6, 2], [10, 6, 2], [10, 6, 2]]
    assert checkpoints.newest_first("critic", 99) == []


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


def test_those_who_verify_shares_read_every_byte_together(checkpoints: Checkpoints) -> None:
    place = save(checkpoints, 1)
    (place / "rank0" / "model.bin").write_text("weightz")
    faults = 0
    for i in range(3):
        try:
            checkpoints.verify("policy", 1, share=(i, 3))
        except StoreError:
            faults += 1
    assert faults == 1


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda place: (place / "rank0" / "model.bin").write_text("w"), "model.bin: has 1 bytes of 7"),
    "missing": (lambda place: (place / "common.json").unlink(), "common.json: is missing"),
    "manifest truncated": (lambda place: os.truncate(place / "checkpoint.json", 40), "is not what was written"),
    "manifest not text": (
        lambda place: (place / "checkpoint.json").write_bytes(b"\xff\x00"),
        "is not what was written",
    ),
    "meta changed": (lambda place: replace_in(place / "checkpoint.json", "0.05", "0.06"), "is not what was saved"),
    "not ours": (lambda place: (place / "checkpoint.json").write_text("[1]"), "format None, this version reads 2"),
    "older": (lambda place: replace_in(place / "checkpoint.json", '"format": 2', '"format": 1'), "format 1, this"),
    "moved here": (lambda place: move_over(place, "critic", 2), "was saved as critic v2"),
    "renamed": (lambda place: move_over(place, "policy", 1), "was saved as policy v1"),
}


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def move_over(place: Path, role: str, version: int) -> None:
    """Another checkpoint, whole, in the place of one."""
    checkpoints = Checkpoints(place.parent.parent)
    other = save(checkpoints, version, "foreign", role)
    shutil.rmtree(place)
    other.rename(place)


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_says_what_is_wrong(checkpoints: Checkpoints, name: str) -> None:
    """The checkpoint stays in the list: a saved one that cannot be used is never skipped in silence."""
    place = save(checkpoints, 2)
    damage, message = DAMAGES[name]
    damage(place)
    with pytest.raises(StoreError, match=re.escape(message)):
        checkpoints.verify("policy", 2)
    assert checkpoints.newest_first("policy", 9)[0] == 2


def test_what_is_whole_but_anothers_is_told_by_what_was_said_of_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 2)
    assert checkpoints.verify("policy", 2, expected={"step": 2})["step"] == 2
    with pytest.raises(StoreError, match="was saved with step 2, and this run's is 3"):
        checkpoints.verify("policy", 2, expected={"step": 3})
    with pytest.raises(StoreError, match="was saved with seed None, and this run's is 3"):
        checkpoints.verify("policy", 2, expected={"seed": 3})


def test_sums_that_the_ranks_made_are_taken(checkpoints: Checkpoints) -> None:
    path = checkpoints.begin("policy", 1)
    sums = {}
    for rank in range(2):
        (path / f"{rank}.bin").write_text("w" * (rank + 1))
        sums[f"{rank}.bin"] = sum_file(path / f"{rank}.bin")
    assert sums["1.bin"] == FileSum(2, zlib.crc32(b"ww"))
    checkpoints.finish("policy", 1, path, {}, sums)
    checkpoints.verify("policy", 1)
    path = checkpoints.begin("policy", 2)
    with pytest.raises(StoreError, match=r"0\.bin: is missing"):
        checkpoints.finish("policy", 2, path, {}, sums)
    assert checkpoints.versions("policy") == [1]


def test_prune_does_not_count_what_is_known_to_be_damaged(checkpoints: Checkpoints) -> None:
    for version in (1, 2, 3, 4):
        save(checkpoints, version)
    assert checkpoints.prune("policy", 2, damaged={3}) == [1]
    assert checkpoints.versions("policy") == [2, 3, 4]


@pytest.mark.processes
def test_a_process_that_is_killed_while_it_saves_leaves_no_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """All files are there, and no manifest: the process dies in `finish`, at the last write before the rename."""
    save(checkpoints, 1)
    program = (
        "import os, signal, sys; from storage import checkpoints as module\n"
        "def die(path): os.kill(os.getpid(), signal.SIGKILL)\n"
        "module.sync_directory = die\n"
        "c = module.Checkpoints(sys.argv[1]); path = c.begin('policy', 2)\n"
        "(path / 'model.bin').write_text('w'); c.finish('policy', 2, path, {})\n"
    )
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert process.returncode == -signal.SIGKILL
    assert checkpoints.newest_first("policy", 9) == [1]
    (begun,) = (tmp_path / "policy").glob(".v*")
    assert (begun / "checkpoint.json").is_file()
    checkpoints.prune("policy", 1)
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["v000001"]


def test_prune_keeps_the_newest(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for version in (1, 2, 3, 4):
        save(checkpoints, version)
    (tmp_path / "policy" / "v000001" / "checkpoint.json").unlink()
    assert checkpoints.prune("policy", 2) == [2]
    assert sorted(p.name for p in (tmp_path / "policy").iterdir()) == ["v000003", "v000004"]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        checkpoints.prune("policy", 0)


def test_prune_leaves_every_so_many(checkpoints: Checkpoints) -> None:
    for version in range(1, 9):
        save(checkpoints, version)
    assert checkpoints.prune("policy", 2, every=3) == [1, 2, 4, 5]
    assert checkpoints.versions("policy") == [3, 6, 7, 8]


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

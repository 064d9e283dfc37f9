"""Boards of published weights on a host: the last user removes its own, and the next user of another those of dead
runs."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.workers.attached import board_of_host
from storage.locks import held
from storage.weights import WeightBoard
from tests.support.paths import ROOT
from tests.support.processes import start_python

BOARD, OTHER, VERSION = "stageline-run-0123456789ab", "stageline-other-ba9876543210", "v000001-1-a.bin"
USER = """
import sys
from pathlib import Path
from pipeline.workers.attached import board_of_host
from storage.weights import WeightBoard
board, version, *driver_lock = sys.argv[1:]
with board_of_host(Path(board), *map(Path, driver_lock)):
    WeightBoard(board).directory.joinpath(version).touch()
    print("there", flush=True)
    input()
"""


def test_the_last_user_removes_the_board_and_its_lock(tmp_path: Path) -> None:
    board = tmp_path / BOARD
    with board_of_host(board):
        with board_of_host(board):
            WeightBoard(board)
            assert board.with_name(f"{BOARD}.lock").stat().st_mode & 0o777 == 0o600, "nobody else can lock it"
        assert board.is_dir(), "one is left"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_local_runs_board_is_removed_by_others_once_its_driver_is_dead(tmp_path: Path) -> None:
    board, other = tmp_path / BOARD, tmp_path / OTHER
    with start_python(USER, board, VERSION) as driver:
        assert driver.stdout.readline() == "there\n"
        with board_of_host(other):
            assert (board / VERSION).exists(), "its driver lives"
        driver.kill()
    with board_of_host(other):
        assert not board.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_attached_runs_board_stays_as_long_as_its_driver_lives_anywhere(tmp_path: Path) -> None:
    """All its workers here were killed: the driver may start others, which find the weights."""
    boards, driver_lock = tmp_path / "shm", tmp_path / "runs" / "run" / "driver.lock"
    board, other = boards / BOARD, boards / OTHER
    driver_lock.parent.mkdir(parents=True)
    with held(driver_lock):
        with start_python(USER, board, VERSION, driver_lock) as worker:
            assert worker.stdout.readline() == "there\n"
            worker.kill()
        with board_of_host(other):
            assert (board / VERSION).exists()
    with board_of_host(board, driver_lock):
        assert (board / VERSION).exists(), "nobody removes a board as it begins to use it"
        with start_python(USER, board, VERSION, driver_lock) as worker:
            assert worker.stdout.readline() == "there\n"
            worker.kill()
    assert list(boards.iterdir()) == []


def test_a_user_whose_lock_is_gone_leaves_the_board_to_those_that_came_after(tmp_path: Path) -> None:
    """Another of its attempt was the last one first, and workers of the next attempt are here already."""
    board = tmp_path / BOARD
    with ExitStack() as late, ExitStack() as after:
        late.enter_context(board_of_host(board))
        board.with_name(f"{BOARD}.lock").unlink()
        after.enter_context(board_of_host(board))
        WeightBoard(board)
        late.close()
        assert board.is_dir()
        after.close()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_epilog_removes_what_killed_workers_left_and_nothing_of_a_live_job(tmp_path: Path) -> None:
    killed, alive, local = (tmp_path / f"stageline-{name}-0123456789ab" for name in ("killed", "alive", "local"))
    WeightBoard(local).directory.joinpath(VERSION).touch()
    with start_python(USER, killed, VERSION) as worker:
        assert worker.stdout.readline() == "there\n"
        worker.kill()
    with board_of_host(alive):
        WeightBoard(alive).directory.joinpath(VERSION).touch()
        subprocess.run([ROOT / "slurm/epilog.sh", tmp_path], check=True)
        left = {local, alive, alive.with_name(f"{alive.name}.lock")}
        assert set(tmp_path.iterdir()) == left
        assert (alive / VERSION).exists()
        assert (local / VERSION).exists()

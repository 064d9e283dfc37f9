"""Boards of published weights that the attached workers of a host share: the last one removes them, or the next."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.workers.host_boards import board_of_host, remove_abandoned_boards
from storage.weights import WeightBoard
from tests.support.processes import start_python

BOARD = "stageline-run-0123456789ab"
WORKER = """
import sys
from pathlib import Path
from pipeline.workers.host_boards import board_of_host
from storage.weights import WeightBoard
board = Path(sys.argv[1])
with board_of_host(board):
    WeightBoard(board).directory.joinpath("v000001-1-a.bin").touch()
    print("there", flush=True)
    input()
"""


def test_the_last_worker_removes_the_board_and_its_lock(tmp_path: Path) -> None:
    board = tmp_path / BOARD
    with board_of_host(board):
        with board_of_host(board):
            WeightBoard(board)
        assert board.is_dir(), "one is left"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_what_killed_workers_leave_the_next_worker_of_any_run_removes(tmp_path: Path) -> None:
    board, other = tmp_path / BOARD, tmp_path / "stageline-other-ba9876543210"
    with start_python(WORKER, board) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "there\n"
        with board_of_host(other):
            assert board.is_dir(), "its worker lives"
        worker.kill()
    assert board.is_dir()
    with board_of_host(other):
        assert [path.name for path in tmp_path.iterdir()] == [f"{other.name}.workers"]


def test_boards_of_local_runs_and_what_is_no_lock_stay(tmp_path: Path) -> None:
    local, linked, target = (tmp_path / f"stageline-{name}-0123456789ab" for name in ("local", "linked", "target"))
    for board in (local, linked, target):
        WeightBoard(board)
    (tmp_path / "elsewhere").touch()
    linked.with_name(f"{linked.name}.workers").symlink_to(tmp_path / "elsewhere")
    remove_abandoned_boards(tmp_path)
    assert all(board.is_dir() for board in (local, linked, target))


def test_a_worker_whose_lock_is_gone_leaves_the_board_to_those_that_came_after(tmp_path: Path) -> None:
    """Another of its attempt was the last one first, and workers of the next attempt are here already."""
    board = tmp_path / BOARD
    with ExitStack() as late, ExitStack() as after:
        late.enter_context(board_of_host(board))
        board.with_name(f"{BOARD}.workers").unlink()
        after.enter_context(board_of_host(board))
        WeightBoard(board)
        late.close()
        assert board.is_dir()
        after.close()
        assert list(tmp_path.iterdir()) == []

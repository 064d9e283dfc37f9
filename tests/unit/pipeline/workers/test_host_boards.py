"""Boards of published weights that the attached workers of a host share: the last one removes them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.workers.host_boards import board_of_host
from storage.weights import WeightBoard
from tests.support.processes import start_python

BOARD, VERSION = "stageline-run-0123456789ab", "v000001-1-a.bin"
WORKER = """
import sys
from pathlib import Path
from pipeline.workers.host_boards import board_of_host
from storage.weights import WeightBoard
board = Path(sys.argv[1])
with board_of_host(board):
    WeightBoard(board).directory.joinpath(sys.argv[2]).touch()
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
def test_what_a_killed_worker_leaves_its_next_one_finds_and_the_last_one_removes(tmp_path: Path) -> None:
    board, other = tmp_path / BOARD, tmp_path / "stageline-other-ba9876543210"
    with start_python(WORKER, board, VERSION) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "there\n"
        worker.kill()
    with board_of_host(other):
        assert (board / VERSION).exists(), "the run may go on, and its next worker here have use for it"
    with board_of_host(board):
        assert (board / VERSION).exists()
    assert list(tmp_path.iterdir()) == []


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

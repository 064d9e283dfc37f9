from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from storage.address import Address
from storage.commits import provenance_here
from storage.config import Layout, Layouts
from storage.files import MOST_WAITING, Writeback
from storage.ledger import Ledger
from storage.records import Scores
from storage.rollouts import RolloutStore
from tests.support.waiting import TIMEOUT_S


def test_pieces_are_done_in_their_order_and_all_by_the_end() -> None:
    done: list[int] = []
    writeback = Writeback()
    for number in range(3 * MOST_WAITING):
        writeback.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    writeback.close()
    assert done == list(range(3 * MOST_WAITING))


def test_what_a_piece_raises_is_raised_by_the_next_call_or_the_end() -> None:
    def broken() -> None:
        raise OSError("the disk")

    writeback, over = Writeback(), threading.Event()
    writeback.submit(broken)
    writeback._thread.submit(over.set)
    assert over.wait(TIMEOUT_S)
    with pytest.raises(OSError, match="the disk"):
        writeback.submit(lambda: None)
    writeback.submit(broken)
    with pytest.raises(OSError, match="the disk"):
        writeback.close()


def test_a_disk_that_does_not_keep_up_is_waited_for() -> None:
    go, writeback, handed_in = threading.Event(), Writeback(), threading.Event()
    for _ in range(MOST_WAITING):
        writeback.submit(lambda: go.wait(TIMEOUT_S) and None)

    def one_more() -> None:
        writeback.submit(lambda: None)
        handed_in.set()

    waiting = threading.Thread(target=one_more)
    waiting.start()
    assert not handed_in.wait(0)
    go.set()
    waiting.join()
    assert handed_in.is_set()
    writeback.close()


def test_an_output_exists_before_it_is_in_its_place(tmp_path: Path) -> None:
    """Its commit makes it exist. The move follows later, and another process reads the output from its first place."""
    layouts, address, go, writeback = Layouts(Layout(2, 4, 3)), Address("score", 0, 1), threading.Event(), Writeback()
    writeback.submit(lambda: go.wait(TIMEOUT_S) and None)
    store = RolloutStore(str(tmp_path), Ledger(str(tmp_path / "ledger")), layouts, writeback=writeback)
    scores = Scores(np.arange(4, dtype=np.float32))
    commit = store.write(address, scores, provenance_here(seed=0, config_hash=""))
    other = RolloutStore(str(tmp_path), Ledger(str(tmp_path / "ledger")), layouts)
    assert other.attempts() == [(address, commit.attempt)]
    np.testing.assert_array_equal(other.read(address).scores, scores.scores)
    go.set()
    writeback.close()
    assert other.attempts() == []
    assert list(other.plain_faults(commit)) == []
    np.testing.assert_array_equal(other.read(address).scores, scores.scores)

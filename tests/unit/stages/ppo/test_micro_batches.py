"""Minibatches are a seeded, reproducible cut; micro-batches hold the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from stages.ppo.micro_batches import micro_batches, minibatches


def test_each_epoch_holds_each_row_once_and_reshuffles() -> None:
    epochs = minibatches(num_rows=24, minibatches=3, epochs=4, seed=7, step=5)
    assert [len(e) for e in epochs] == [3] * 4
    orders = [np.concatenate(e).tolist() for e in epochs]
    assert all(sorted(o) == list(range(24)) for o in orders)
    assert all(len(m) == 8 for e in epochs for m in e)
    assert len({tuple(o) for o in orders}) == 4


def test_the_cut_is_a_function_of_seed_and_step() -> None:
    def order(seed: int, step: int) -> list[int]:
        return np.concatenate(minibatches(24, 3, 1, seed, step)[0]).tolist()

    assert order(7, 5) == order(7, 5)
    assert order(7, 5) != order(7, 6)
    assert order(7, 5) != order(8, 5)
    assert order(7, 5) != order(5, 7)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="25 rows do not divide into 3"):
        minibatches(25, 3, 1, 0, 0)


def test_micro_batches_by_length_and_as_given() -> None:
    rows = np.array([40, 10, 30, 20, 50])
    assert [m.tolist() for m in micro_batches(rows, 2)] == [[40, 10], [30, 20], [50]]
    lengths = np.array([3, 9, 3, 7, 1])
    assert [m.tolist() for m in micro_batches(rows, 2, lengths)] == [[10, 20], [40, 30], [50]]

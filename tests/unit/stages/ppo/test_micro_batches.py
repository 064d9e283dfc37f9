"""Minibatches are a seeded, reproducible cut; micro-batches hold the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from stages.ppo.micro_batches import micro_batches, minibatch_rows, split_balanced


def test_each_epoch_holds_each_row_once_and_reshuffles() -> None:
    epochs = minibatch_rows(num_rows=24, minibatches=3, epochs=4, seed=7, step=5)
    assert [len(e) for e in epochs] == [3] * 4
    orders = [np.concatenate(e).tolist() for e in epochs]
    assert all(sorted(o) == list(range(24)) for o in orders)
    assert all(len(m) == 8 for e in epochs for m in e)
    assert len({tuple(o) for o in orders}) == 4


def test_the_cut_is_a_function_of_seed_and_step() -> None:
    def order(seed: int, step: int) -> list[int]:
        return np.concatenate(minibatch_rows(24, 3, 1, seed, step)[0]).tolist()

    assert order(7, 5) == order(7, 5)
    assert order(7, 5) != order(7, 6)
    assert order(7, 5) != order(8, 5)
    assert order(7, 5) != order(5, 7)


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="25 rows do not divide into 3"):
        minibatch_rows(25, 3, 1, 0, 0)


def test_micro_batches_hold_like_numbers_of_tokens_longest_first() -> None:
    rows, lengths = np.array([40, 10, 30, 20, 50]), np.array([5, 9, 5, 7, 2])
    # 28 tokens in 2 pieces: 9 | 7, 5 to the second, 5 to the first, 2 to the second
    found = micro_batches(rows, lengths, max_tokens=15)
    assert [m.tolist() for m in found] == [[10, 30], [20, 40, 50]]
    assert [m.tolist() for m in micro_batches(rows, lengths, max_tokens=1000)] == [[10, 20, 40, 30, 50]]
    assert [m.tolist() for m in micro_batches(rows, lengths, max_tokens=1000, max_rows=2)] == [[40, 30], [10], [20, 50]]


def test_a_row_longer_than_the_budget_has_a_micro_batch_to_itself() -> None:
    found = micro_batches(np.arange(3), np.array([100, 4, 4]), max_tokens=10)
    assert [m.tolist() for m in found] == [[0], [1, 2]]
    assert micro_batches(np.arange(0), np.arange(0), max_tokens=10) == []


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_each_row_once_within_the_budget(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 300, random.integers(1, 60))
    max_tokens = int(random.integers(1, 900))
    found = micro_batches(np.arange(len(lengths)), lengths, max_tokens=max_tokens)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    for part in found:
        assert len(part) == 1 or sum(lengths[row] for row in part) <= max_tokens
        assert (np.diff([lengths[row] for row in part]) <= 0).all()


def test_balanced_parts_have_nearly_the_same_sums() -> None:
    lengths = np.random.default_rng(0).integers(10, 400, 64)
    sums = [int(lengths[part].sum()) for part in split_balanced(lengths, 4)]
    assert max(sums) - min(sums) <= lengths.min()
    assert [part.tolist() for part in split_balanced(np.array([3, 3]), 4)] == [[0], [1], [], []]

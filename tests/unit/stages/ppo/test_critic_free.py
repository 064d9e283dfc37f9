"""Advantages without a critic: the papers' formulas in loops, arrays worked out by hand, and what must be exactly 0."""

from __future__ import annotations

import pytest
import torch

from stages.ppo.advantages import (
    GROUP_STD_EPS,
    Groups,
    equal_groups,
    group_advantages,
    group_std,
    leave_one_out_advantages,
    rewards_to_go,
)
from tests.reference import oracles


def make_groups(number: list[int], left_out: tuple[int, ...] = ()) -> Groups:
    return Groups(torch.tensor(number), torch.tensor([row not in left_out for row in range(len(number))]))


def float64(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


MIXED = make_groups([0, 1, 0, 2, 1, 1, 0, 2, 0], left_out=(6,))
"""Groups of 3 (and a row that does not count), 3 and 2, their rows in no order."""


def test_by_hand() -> None:
    """Rewards 1, 2, 6: mean 3, deviation sqrt((4 + 1 + 9) / 2) = sqrt(7); the others' means are 4, 3.5 and 1.5."""
    groups, rewards = make_groups([0, 0, 0]), float64(1, 2, 6)
    assert group_advantages(rewards, groups, "none").tolist() == [-2, -1, 3]
    scaled = float64(-2, -1, 3) / (7**0.5 + GROUP_STD_EPS)
    torch.testing.assert_close(group_advantages(rewards, groups, "std"), scaled, rtol=1e-14, atol=0)
    assert leave_one_out_advantages(rewards, groups).tolist() == [-3, -1.5, 4.5]


@pytest.mark.parametrize("estimator", ["std", "none", "rloo"])
def test_against_loops(estimator: str) -> None:
    rewards = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = oracles.group_advantages(
        rewards.tolist(), MIXED.number.tolist(), MIXED.counted.tolist(), estimator, GROUP_STD_EPS
    )
    if estimator == "rloo":
        got = leave_one_out_advantages(rewards, MIXED)
    else:
        got = group_advantages(rewards, MIXED, "std" if estimator == "std" else "none")
    torch.testing.assert_close(got, float64(*expected), rtol=1e-12, atol=1e-14)
    assert got[6] == 0, "it does not count"


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_teach_exactly_nothing(reward: float, size: int) -> None:
    """The mean of three times 0.1 is not 0.1: divided by a deviation that is rounding too, it would be trained on."""
    groups, rewards = make_groups([0] * size), torch.full((size,), reward, dtype=torch.float64)
    assert not group_advantages(rewards, groups, "std").any()
    assert not leave_one_out_advantages(rewards, groups).any()
    assert group_std(rewards, groups).tolist() == [0]


def test_equal_groups_are_found_among_the_rows_that_count() -> None:
    x = float64(1, 5, 1, 2, 5, 5, 9, 2 + 1e-15, 1)
    assert equal_groups(x, MIXED).tolist() == [True, True, False]
    assert equal_groups(x, make_groups(MIXED.number.tolist())).tolist() == [False, True, False]
    alone = make_groups([0, 0, 1, 1], left_out=(1, 2, 3))
    assert equal_groups(float64(1, 2, 3, 4), alone).tolist() == [True, True]
    assert not leave_one_out_advantages(float64(1, 2, 3, 4), alone).any()


def test_rewards_to_go_by_hand() -> None:
    mask = torch.tensor([[False, True, True, True, False], [True, True, False, False, False]])
    rewards = torch.tensor([[9.0, 1.0, 0.0, 4.0, 9.0], [-1.0, 2.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
    expected = [[0, 2.0, 2.0, 4.0, 0], [0.0, 2.0, 0, 0, 0]]
    assert rewards_to_go(rewards, mask, 0.5).tolist() == expected
    assert rewards_to_go(rewards, mask, 1.0)[0].tolist() == [0, 5, 4, 4, 0]

"""GAE against arrays computed by hand, and against the explicit sum over future deltas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.ppo.advantages import gae
from tests.reference import oracles

# gamma = 0.5, lam = 0.5 (gamma*lam = 0.25). Row 0 ends at t=2 by EOS, row 1 is cut at t=3, rows start at 1 and 2.
MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
REWARDS = torch.tensor([[99.0, 1.0, 4.0, 99.0], [99.0, 99.0, 2.0, 3.0]], dtype=torch.float64)
VALUES = torch.tensor([[77.0, 2.0, 6.0, 77.0], [77.0, 77.0, 4.0, 8.0]], dtype=torch.float64)
BOOTSTRAP = torch.tensor([55.0, 10.0], dtype=torch.float64)
TRUNCATED = torch.tensor([False, True])


def run(on_truncation: str) -> tuple[list[list[float]], list[list[float]]]:
    advantages, returns = gae(REWARDS, VALUES, BOOTSTRAP, MASK, TRUNCATED, 0.5, 0.5, on_truncation)
    return advantages.tolist(), returns.tolist()


def test_by_hand_terminate() -> None:
    """Row 0: delta_2 = 4 + 0 - 6 = -2, delta_1 = 1 + .5*6 - 2 = 2, A_1 = 2 + .25*-2 = 1.5.
    Row 1: delta_3 = 3 + 0 - 8 = -5, delta_2 = 2 + .5*8 - 4 = 2, A_2 = 2 + .25*-5 = .75."""
    advantages, returns = run("terminate")
    assert advantages == [[0, 1.5, -2.0, 0], [0, 0, 0.75, -5.0]]
    assert returns == [[0, 3.5, 4.0, 0], [0, 0, 4.75, 3.0]]


def test_by_hand_bootstrap() -> None:
    """Only the cut row changes: delta_3 = 3 + .5*10 - 8 = 0, A_2 = 2. Row 0 ended by itself, so its 55 is never
    read."""
    advantages, returns = run("bootstrap")
    assert advantages == [[0, 1.5, -2.0, 0], [0, 0, 2.0, 0.0]]
    assert returns == [[0, 3.5, 4.0, 0], [0, 0, 6.0, 8.0]]


@pytest.mark.parametrize("on_truncation", ["bootstrap", "terminate"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0)])
def test_against_the_explicit_sum(gamma: float, lam: float, on_truncation: str) -> None:
    rng = np.random.default_rng(0)
    rows, seq = 6, 9
    mask = np.zeros((rows, seq), dtype=bool)
    for i, (start, length) in enumerate([(1, 8), (2, 3), (4, 5), (8, 1), (3, 1), (5, 0)]):
        mask[i, start : start + length] = True
    rewards, values = rng.normal(size=(2, rows, seq))
    bootstrap, truncated = rng.normal(size=rows), rng.random(rows) < 0.5
    assert truncated.any()
    assert not truncated.all()
    expected = oracles.gae(
        rewards.tolist(), values.tolist(), bootstrap.tolist(), mask.tolist(), truncated.tolist(), gamma, lam,
        on_truncation,
    )  # fmt: skip
    got = gae(*map(torch.from_numpy, (rewards, values, bootstrap, mask, truncated)), gamma, lam, on_truncation)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g.numpy(), e, atol=1e-12)


def test_advantages_have_the_bits_of_the_recursion() -> None:
    """Digests of runs depend on them: another order of the same sums would round differently."""
    rng = np.random.default_rng(1)
    mask = np.zeros((3, 40), dtype=bool)
    for row, (start, end) in enumerate([(1, 40), (7, 31), (20, 20)]):
        mask[row, start:end] = True
    rewards, values = rng.normal(size=(2, 3, 40))
    gamma, lam = 0.99, 0.95
    expected = np.zeros_like(rewards)
    for row in range(3):
        advantage = next_value = 0.0
        for t in reversed(np.flatnonzero(mask[row])):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            expected[row, t] = advantage = delta + gamma * lam * advantage
            next_value = values[row, t]
    given = map(torch.from_numpy, (rewards, values, np.zeros(3), mask, np.zeros(3, dtype=bool)))
    advantages, _ = gae(*given, gamma, lam, "terminate")
    assert advantages.numpy().tobytes() == expected.tobytes()
    assert advantages.is_contiguous()


def test_nothing_outside_the_mask_is_read_and_nothing_has_a_gradient() -> None:
    nan = float("nan")
    poisoned = gae(
        torch.where(MASK, REWARDS, nan), torch.where(MASK, VALUES, nan).requires_grad_(),
        torch.tensor([nan, 10.0], dtype=torch.float64), MASK, TRUNCATED, 0.5, 0.5, "bootstrap",
    )  # fmt: skip
    assert (poisoned[0].tolist(), poisoned[1].tolist()) == run("bootstrap")
    assert not poisoned[0].requires_grad
    assert not poisoned[1].requires_grad

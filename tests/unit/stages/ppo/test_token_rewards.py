"""Token rewards: the score once, at the last token; the KL once, in the reward or in the loss."""

from __future__ import annotations

import pytest
import torch

from stages.ppo.config import KLConfig
from stages.ppo.token_rewards import RunningMean, penalise_missing_eos, token_rewards, update_running_mean
from tests.reference import oracles

MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
POLICY = torch.tensor([[9.0, -1.0, -2.0, -0.5, 9.0], [9.0, 9.0, 9.0, -3.0, -0.1]], dtype=torch.float64)
REF = torch.tensor([[7.0, -1.5, -1.0, -0.5, 7.0], [7.0, 7.0, 7.0, -2.0, -1.1]], dtype=torch.float64)
SCORES = torch.tensor([2.0, -1.0], dtype=torch.float64)


def test_by_hand() -> None:
    """beta = 0.1, k1: d = .5, -1, 0 in row 0 and -1, 1 in row 1."""
    r = token_rewards(SCORES, POLICY, REF, MASK, 0.1, KLConfig(estimator="k1"))
    expected = [[0, -0.05, 0.1, 2.0, 0], [0, 0, 0, 0.1, -1.1]]
    torch.testing.assert_close(r, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("where", ["reward", "loss"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_against_the_loop(estimator: str, where: str) -> None:
    r = token_rewards(SCORES, POLICY, REF, MASK, 0.3, KLConfig(estimator=estimator, where=where))
    expected = oracles.token_rewards(
        SCORES.tolist(), POLICY.tolist(), REF.tolist(), MASK.tolist(), 0.3, estimator, where
    )
    torch.testing.assert_close(r, torch.tensor(expected, dtype=torch.float64))


def test_kl_in_the_loss_is_not_in_the_reward_too() -> None:
    r = token_rewards(SCORES, POLICY, REF, MASK, 0.3, KLConfig(where="loss"))
    assert r.tolist() == [[0, 0, 0, 2.0, 0], [0, 0, 0, 0, -1.0]]


def test_a_cut_response_gets_the_fixed_score() -> None:
    truncated = torch.tensor([False, True])
    assert penalise_missing_eos(SCORES, truncated, -5.0).tolist() == [2.0, -5.0]
    assert penalise_missing_eos(SCORES, truncated, None).tolist() == [2.0, -1.0]


def test_running_mean_is_the_mean_of_everything_seen() -> None:
    state = RunningMean()
    for batch in ([1.0, 2.0, 6.0], [10.0], []):
        state = update_running_mean(state, torch.tensor(batch, dtype=torch.float64))
    assert state == RunningMean(mean=pytest.approx(19 / 4), count=4)

"""Token rewards: the score once, at the last token; the KL once, in the reward or in the loss."""

from __future__ import annotations

import math

import pytest
import torch

from stages.ppo.advantages import (
    RunningMoments,
    normalise_scores,
    penalise_missing_eos,
    token_rewards,
    update_running_moments,
)
from stages.ppo.config import KLConfig, NormalizeConfig
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


def test_a_cut_response_gets_the_fixed_score() -> None:
    truncated = torch.tensor([False, True])
    assert penalise_missing_eos(SCORES, truncated, -5.0).tolist() == [2.0, -5.0]
    assert penalise_missing_eos(SCORES, truncated, None).tolist() == [2.0, -1.0]


def test_running_mean_is_the_mean_of_everything_seen() -> None:
    """The mean of 1, 2, 6, 10 is 4.75; squared distances: 14.0625 + 7.5625 + 1.5625 + 27.5625 = 50.75."""
    state = RunningMoments()
    assert state.std == 0.0
    for batch in ([1.0, 2.0, 6.0], [10.0], []):
        state = update_running_moments(state, torch.tensor(batch, dtype=torch.float64))
    assert state == RunningMoments(mean=pytest.approx(19 / 4), squares=pytest.approx(50.75), count=4)
    assert state.std == pytest.approx(math.sqrt(50.75 / 4))


def test_moments_of_numbers_far_from_zero_keep_their_spread() -> None:
    """The difference of sums of squares would be 0 or negative here."""
    state = RunningMoments()
    for batch in ([1e9, 1e9 + 1], [1e9 + 2]):
        state = update_running_moments(state, torch.tensor(batch, dtype=torch.float64))
    assert state.std == pytest.approx(math.sqrt(2 / 3), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NormalizeConfig(), [2.0, -1.0]),
        (NormalizeConfig(mean=True), [1.0, -2.0]),
        (NormalizeConfig(scale=True), [0.5, -0.25]),
        (NormalizeConfig(mean=True, scale=True, clip=0.4), [0.25, -0.4]),
        (NormalizeConfig(clip=1.5), [1.5, -1.0]),
    ],
)
def test_scores_are_normalised_by_hand(config: NormalizeConfig, expected: list[float]) -> None:
    """By mean 1 and standard deviation 4."""
    moments = RunningMoments(mean=1.0, squares=32.0, count=2)
    assert normalise_scores(SCORES, moments, config).tolist() == expected


@pytest.mark.parametrize("score", [-0.1, 0.7, 1 / 3])
def test_responses_that_are_all_cut_have_no_spread(score: float) -> None:
    """In float64 the mean of three times -0.1 is not -0.1, and a reward's -0.1 is a float32: divided by such a
    spread, scores were 1e15."""
    given = torch.tensor([score, 5.0, 5.0], dtype=torch.float32).double()
    shaped = penalise_missing_eos(given, torch.tensor([False, True, True]), score)
    moments = update_running_moments(RunningMoments(), shaped)
    assert moments.std == 0
    assert normalise_scores(shaped, moments, NormalizeConfig(mean=True, scale=True)).tolist() == [0, 0, 0]
    assert normalise_scores(shaped, moments, NormalizeConfig(scale=True)).tolist() == shaped.tolist()

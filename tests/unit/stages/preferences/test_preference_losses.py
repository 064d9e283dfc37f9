"""Losses of reward models: against arrays worked out by hand, and a float64 oracle that loops over pairs."""

from __future__ import annotations

import math

import numpy as np
import torch

from stages.models.reward_model import NO_ROW
from stages.ppo.losses import merge_stats
from stages.preferences.data import Group, Pairs
from stages.preferences.losses import (
    LOSS,
    best_accuracy,
    bradley_terry_loss,
    dyadic_standard_error,
    pair_loss_of,
    rating_loss_of,
    reliability,
    right_order,
    spearman,
)


def group(rows: list[int], *pairs: tuple[int, int]) -> Group:
    better, worse = (np.array(side) for side in zip(*pairs, strict=True))
    return Group(np.array(rows), Pairs(better, worse))


GROUPS = [group([4, 1, 2], (4, 1), (4, 2), (2, 1)), group([0, 3], (3, 0))]
"""Groups of five rows: K = 3 with all C(3, 2) = 3 pairs, and K = 2."""


def oracle(scores: np.ndarray, groups: list[Group]) -> float:
    """Ouyang et al. 2022, equation 1, in float64."""
    total = 0.0
    for each in groups:
        of_group = 0.0
        for better, worse in zip(each.pairs.better, each.pairs.worse, strict=True):
            of_group += math.log(1 + math.exp(-(float(scores[better]) - float(scores[worse]))))
        total += of_group / len(each.pairs.better)
    return total / len(groups)


def test_two_pairs_by_hand() -> None:
    """-ln sigma(ln 3) = ln(4/3) and -ln sigma(-ln 3) = ln 4; a pair's gradient is -sigma(-margin) for the better."""
    scores = torch.tensor([math.log(3), 0.0], dtype=torch.float64, requires_grad=True)
    better, worse = torch.tensor([0, 1]), torch.tensor([1, 0])
    loss, stats = bradley_terry_loss(scores, better, worse, torch.tensor([0.75, 0.25], dtype=torch.float64))
    assert math.isclose(loss.item(), 0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert {name: round(float(value), 12) for name, value in stats.sums.items() if name != LOSS} == {
        "accuracy": 0.75,
        "margin": round(0.5 * math.log(3), 12),
    }
    loss.backward()
    np.testing.assert_allclose(scores.grad, [-0.75 * 0.25 + 0.25 * 0.75, 0.0], atol=1e-15)


def test_ties_are_right_by_half() -> None:
    _, stats = bradley_terry_loss(torch.zeros(2), torch.tensor([0]), torch.tensor([1]), torch.ones(1))
    assert float(stats.sums["accuracy"]) == 0.5


def test_groups_count_alike_however_they_are_cut() -> None:
    """A minibatch's loss is the sum over its micro-batches, in whatever order these have the rows; large margins are
    finite."""
    scores = np.random.default_rng(0).normal(size=5) * 3
    scores[4] = 90.0  # exp(90) is beyond float32
    expected = oracle(scores, GROUPS)
    loss_of = pair_loss_of(GROUPS, 5)

    def of(rows: list[int]) -> tuple[float, object]:
        loss, stats = loss_of(torch.tensor(scores[rows], dtype=torch.float32), np.array(rows))
        return loss.item(), stats

    whole, _ = of([3, 1, 0, 4, 2])
    first, one = of([2, 4, 1])
    second, two = of([0, 3])
    np.testing.assert_allclose([whole, first + second], expected, rtol=1e-5)
    merged = merge_stats([one, two]).sums  # type: ignore[list-item]
    np.testing.assert_allclose(float(merged[LOSS]), expected, rtol=1e-5)


def test_a_gradient_is_that_of_the_oracle() -> None:
    scores = np.random.default_rng(1).normal(size=5)
    tensor = torch.tensor(scores, requires_grad=True)
    loss, _ = pair_loss_of(GROUPS, 5)(tensor, np.arange(5))
    loss.backward()
    step = 1e-6
    numerical = [(oracle(scores + step * e, GROUPS) - oracle(scores - step * e, GROUPS)) / 2 / step for e in np.eye(5)]
    np.testing.assert_allclose(tensor.grad, numerical, atol=1e-8)


def test_rows_that_stand_in_for_none_count_for_nothing() -> None:
    nobody = np.full(3, NO_ROW)
    for loss_of in (pair_loss_of(GROUPS, 5), rating_loss_of(GROUPS, np.arange(5.0))):
        scores = torch.ones(3, requires_grad=True)
        loss, stats = loss_of(scores, nobody)
        loss.backward()
        assert (loss.item(), float(stats.sums[LOSS])) == (0.0, 0.0)
        assert not scores.grad.any()


def test_regression_is_the_mean_square_error() -> None:
    ratings = np.array([1.0, -2.0, 0.5, 3.0, 2.0])
    loss, stats = rating_loss_of(GROUPS, ratings)(torch.zeros(5), np.array([4, 1, 2, 0, 3]))
    assert math.isclose(loss.item(), (1 + 4 + 0.25 + 9 + 4) / 5, rel_tol=1e-6)
    assert math.isclose(float(stats.sums["absolute_error"]), 8.5 / 5, rel_tol=1e-6)


def by_double_loop(values: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    errors = values - values.mean()
    total = 0.0
    for p in range(len(values)):
        for q in range(len(values)):
            if {first[p], second[p]} & {first[q], second[q]}:
                total += errors[p] * errors[q]
    return math.sqrt(total) / len(values)


def test_rank_correlation_gives_ties_their_mean_rank() -> None:
    assert spearman(np.array([1.0, 5.0, 9.0]), np.array([-3.0, 0.0, 100.0])) == 1.0
    ranks = [[1.0, 2.5, 2.5, 4.0], [4.0, 3.0, 1.5, 1.5]]
    found = spearman(np.array([0.0, 7.0, 7.0, 9.0]), np.array([8.0, 6.0, 5.0, 5.0]))
    assert abs(found - np.corrcoef(ranks)[0, 1]) < 1e-12


def test_the_standard_error_knows_which_pairs_share_a_member() -> None:
    """Each pair of members once: two different pairs then share at most one."""
    draw = np.random.default_rng(0)
    first, second = np.triu_indices(9, 1)
    quality = draw.normal(size=9)
    values = (quality[first] + quality[second] + draw.normal(size=len(first)) > 0).astype(float)
    np.testing.assert_allclose(dyadic_standard_error(values, first, second), by_double_loop(values, first, second))


def test_pairs_of_one_prompt_are_a_cluster() -> None:
    unit = np.array([0, 0, 0, 1, 1, 2])
    values = np.array([1.0, 1, 1, 0, 0, 1])
    np.testing.assert_allclose(dyadic_standard_error(values, unit, unit), by_double_loop(values, unit, unit))


def test_it_is_the_spread_over_new_texts() -> None:
    """In 300 draws of 60 texts with all pairs, the mean standard error is the accuracies' spread. The error of
    independent pairs would be far smaller."""
    draw, accuracies, errors = np.random.default_rng(3), [], []
    first, second = np.triu_indices(60, 1)
    for _ in range(300):
        truth = draw.normal(size=60)
        score = truth + draw.normal(size=60)
        right = right_order((score[first] - score[second]) * np.sign(truth[first] - truth[second]))
        accuracies.append(right.mean())
        errors.append(dyadic_standard_error(right, first, second))
    spread = np.std(accuracies)
    assert abs(np.mean(errors) / spread - 1) < 0.15
    assert math.sqrt(0.75 * 0.25 / len(first)) < spread / 2


def test_calibration_by_hand() -> None:
    """Two pairs at confidence 0.6, of which one is right; two at 0.9, both right: ECE = (0.1 + 0.1) / 2."""
    low, high = math.log(0.6 / 0.4), math.log(0.9 / 0.1)
    found = reliability(np.array([low, -low, high, high]))
    assert found.counts.tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 2, 0] or found.counts.sum() == 4
    np.testing.assert_allclose(found.ece, 0.1, atol=1e-12)


def test_noise_limits_even_a_perfect_judge() -> None:
    """Normal truths, normal errors: who knows the truth agrees with the observed order as often as predicted."""
    draw = np.random.default_rng(0)
    errors = draw.uniform(0.3, 0.9, 1500)
    truth = draw.normal(size=1500)
    ratings = truth + errors * draw.normal(size=1500)
    better, worse = np.nonzero(ratings[:, None] - ratings >= 0.5)
    found = best_accuracy(ratings, errors, better[::50], worse[::50])
    assert abs(found - (truth[better] > truth[worse]).mean()) < 0.01


def test_without_noise_there_is_no_limit() -> None:
    ratings = np.array([2.0, 1.0, 0.0])
    assert best_accuracy(ratings, np.zeros(3), np.array([0, 1]), np.array([1, 2])) == 1.0

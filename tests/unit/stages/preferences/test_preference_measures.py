"""Agreement of scores with people: standard errors against a double loop, calibration and noise by hand."""

from __future__ import annotations

import math

import numpy as np

from stages.preferences.losses import best_accuracy, dyadic_standard_error, reliability, right_order, spearman


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


def test_independent_pairs_have_the_usual_one() -> None:
    values = (np.random.default_rng(0).random(400) < 0.8).astype(float)
    found = dyadic_standard_error(values, np.arange(400), np.arange(400, 800))
    np.testing.assert_allclose(found, values.std() / 20)


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

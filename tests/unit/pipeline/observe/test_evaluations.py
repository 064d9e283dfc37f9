"""Evaluations compared by hand, the choice of the best version, and one gain told by every reader of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.observe.evaluations import Evaluation, best_evaluation, compare, compare_paired, paired_t, standard_error
from pipeline.observe.history import evaluation_metrics
from pipeline.observe.report.facts import headlines
from pipeline.observe.summary import summarise

BEFORE = {7: 0.0, 8: 0.25, 9: 0.5, 10: 1.0, 11: 5.0}
AFTER = {7: 0.25, 8: 0.75, 9: 1.25, 10: 0.5, 12: -5.0}


def test_prompts_of_both_are_compared() -> None:
    """Prompts 7 to 10: differences 0.25, 0.5, 0.75, -0.5, mean 0.25, squared deviations 0 + 1 + 4 + 9 sixteenths: sd =
    sqrt(0.875 / 3), error = sd / 2."""
    found = compare_paired(BEFORE, AFTER)
    assert (found.num_prompts, found.mean_before, found.mean_after, found.gain) == (4, 0.4375, 0.6875, 0.25)
    assert (found.num_better, found.num_worse) == (3, 1)
    assert found.error == pytest.approx(math.sqrt(0.875 / 3) / 2)
    assert found.t_statistic == pytest.approx(0.25 / (math.sqrt(0.875 / 3) / 2))


def test_no_prompt_in_both() -> None:
    assert compare_paired({1: 0.0}, {2: 0.0}) is None


def test_t_needs_spread() -> None:
    assert paired_t([1.0]) is None
    assert paired_t([1.0, 1.0]) is None
    one = compare_paired({1: 0.0}, {1: 0.5})
    assert (one.gain, one.error, one.t_statistic) == (0.5, None, None)


def test_standard_error_of_a_mean() -> None:
    assert standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3) / 2)
    assert standard_error(np.array([1.0, 2.0, 3.0, 4.0], np.float32)) == pytest.approx(math.sqrt(5 / 3) / 2)
    assert standard_error([1.0]) is None


def test_summary_metrics_and_report_tell_the_same_gain() -> None:
    first, last = Evaluation(0, BEFORE), Evaluation(4, AFTER)
    summary = summarise([], [], [first, last], {}, {})
    metrics = evaluation_metrics(last, first)
    (shown,) = (line for line in headlines(summary, [first, last], None, None) if line.key == "gain")
    assert summary.eval.after - summary.eval.before == metrics["eval/gain"] == 0.25
    assert summary.eval.paired_t == metrics["eval/paired_t"]
    assert (shown.value, shown.detail) == ("+0.250 ± 0.270", f"paired t {metrics['eval/paired_t']:.1f} over 4 prompts")


def test_policies_are_compared_prompt_by_prompt() -> None:
    """Differences 1, 1, -0.5, 0: mean 0.375, squared deviations 2 * 0.390625 + 0.765625 + 0.140625 = 1.6875, so that
    sd = 0.75 and t = 0.375 / (0.75 / 2) = 1."""
    found = compare({3: 0.0, 5: 1.0, 7: 0.5, 9: 2.0}, {3: 1.0, 5: 2.0, 7: 0.0, 9: 2.0})
    assert (found.num_prompts, found.better, found.worse) == (4, 2, 1)
    assert (found.parent, found.variant, found.difference) == (0.875, 1.25, 0.375)
    assert found.paired_t == pytest.approx(1.0)


def test_equal_scores_have_no_t() -> None:
    assert compare({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}).paired_t is None


RUN = [
    Evaluation(0, {1: 0.0, 2: 0.2}, kl=0.0),
    Evaluation(10, {1: 0.4, 2: 0.4}, kl=3.0),
    Evaluation(20, {1: 0.9, 2: 0.7}, kl=20.0),
    Evaluation(30, {1: 0.6, 2: 1.0}, kl=30.0),
    Evaluation(40, {1: 9.0, 2: 9.0}, kl=None),
]


@pytest.mark.parametrize(("max_kl", "version"), [(25.0, 20), (30.0, 20), (20.0, 20), (19.9, 10), (1.0, 0), (None, 40)])
def test_the_best_is_the_highest_score_within_the_budget(max_kl: float | None, version: int) -> None:
    """The older one of equals (20 and 30); a version without a known KL is within no budget."""
    best = best_evaluation(RUN, max_kl)
    assert best.version == version


def test_there_may_be_none() -> None:
    assert best_evaluation([], None) is None
    assert best_evaluation(RUN[1:], 2.0) is None

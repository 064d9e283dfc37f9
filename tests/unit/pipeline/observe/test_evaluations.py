"""The choice of the best version: by its score, within a budget of KL."""

from __future__ import annotations

import pytest

from pipeline.observe.evaluations import Evaluation, best_evaluation

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
    assert best is not None
    assert best.version == version


def test_there_may_be_none() -> None:
    assert best_evaluation([], None) is None
    assert best_evaluation(RUN[1:], 2.0) is None

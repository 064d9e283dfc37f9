"""Which version of the policy is the best: by its held-out score, within a KL budget. Pure functions.

May import pipeline.observe.summary.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.observe.summary import Evaluation


def best_evaluation(evaluations: Iterable[Evaluation], max_kl: float | None) -> Evaluation | None:
    """The evaluation with the highest mean score of those whose KL is at most `max_kl` (None: whatever it is); of
    equals the oldest, which is nearest to the reference. None where none is within the budget; one whose KL is not
    known is not."""
    within = [e for e in evaluations if max_kl is None or (e.kl is not None and e.kl <= max_kl)]
    return max(within, key=lambda e: (e.mean, -e.version), default=None)

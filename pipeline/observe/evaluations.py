"""What an evaluation of a version of the policy comes to, and which version is the best: by held-out reward, within a
KL budget. Pure functions. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evaluation:
    """Scores of one version of the weights on the held-out prompts."""

    version: int
    scores: Mapping[int, float]
    """By number of the prompt."""
    distinct_bigrams: float | None = None
    """Distinct / all bigrams over the responses: a repetitive policy has few."""
    kl: float | None = None
    """KL of what was sampled to the reference, nats per response: mean of the sum over tokens of log mu - log pi_ref.
    None where the reference has not looked at the responses yet."""
    length: float | None = None
    """Sampled tokens per response, EOS included."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """By name of a part of the score: its mean, before its weight."""

    @property
    def mean(self) -> float:
        return math.fsum(self.scores.values()) / len(self.scores)


@dataclass(frozen=True)
class EvaluatedVersion:
    """An evaluation in numbers."""

    version: int
    reward: float
    kl: float | None
    length: float | None
    parts: dict[str, float]


def in_numbers(e: Evaluation) -> EvaluatedVersion:
    """As `summary.json` has it."""
    return EvaluatedVersion(e.version, e.mean, e.kl, e.length, dict(e.parts))


def best_evaluation(evaluations: Iterable[Evaluation], max_kl: float | None) -> Evaluation | None:
    """The evaluation with the highest mean score of those whose KL is at most `max_kl` (None: whatever it is); of
    equals the oldest, which is nearest to the reference. None where none is within the budget; one whose KL is not
    known is not."""
    within = [e for e in evaluations if max_kl is None or (e.kl is not None and e.kl <= max_kl)]
    return max(within, key=lambda e: (e.mean, -e.version), default=None)

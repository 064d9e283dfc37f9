"""A reward from VADER, the rule-based sentiment scorer (Hutto and Gilbert 2014). May import vaderSentiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.rewards.protocol import Sample


@dataclass(frozen=True)
class VaderReward:
    """The compound score, from -1 (negative) to 1 (positive), of the response alone: its prompt's mood is not its
    merit."""

    deterministic = True
    _analyzer: SentimentIntensityAnalyzer = field(default_factory=SentimentIntensityAnalyzer, repr=False)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._analyzer.polarity_scores(sample.response)["compound"]) for sample in samples]

"""A reward that takes its time, as a judge does that is asked about one row after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # TRL's process has no Stageline
    from stages.rewards.protocol import Sample


def score(texts: Sequence[str], seconds_per_row: float) -> list[float]:
    """Return the share of vowels in each text, after the time that a judge would take."""
    time.sleep(seconds_per_row * len(texts))
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in texts]


def share_of_vowels(samples: Sequence[Sample], seconds_per_row: float) -> list[float]:
    return score([sample.response for sample in samples], seconds_per_row)

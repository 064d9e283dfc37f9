"""Rewards that are a line of arithmetic on the text. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stages.rewards.protocol import Sample


@dataclass(frozen=True)
class CharacterReward:
    """Share of the response's characters that are among `characters`; 0 for an empty response. Cheap to learn: the
    signal for tests and for the random tiny model."""

    characters: str
    deterministic = True

    def __post_init__(self) -> None:
        if not self.characters:
            raise ValueError("reward.args.characters is empty: name at least one character")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        wanted = frozenset(self.characters)
        return [sum(c in wanted for c in s.response) / max(1, len(s.response)) for s in samples]


@dataclass(frozen=True)
class LengthReward:
    """1 for a response of `target` characters, falling linearly to 0 at none and at twice as many."""

    target: int
    deterministic = True

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ValueError(f"reward.args.target is {self.target}: it must be at least 1 character")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(s.response) - self.target) / self.target) for s in samples]


@dataclass(frozen=True)
class AnswerReward:
    """1 where the last number in the response equals the prompt's field `field`, else 0."""

    field: str = "answer"
    deterministic = True

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._right(sample)) for sample in samples]

    def _right(self, sample: Sample) -> bool:
        if self.field not in sample.extra:
            raise ValueError(f"a prompt has no field {self.field!r} to check against: {sample.prompt[:60]!r}")
        numbers = re.findall(r"-?\d+(?:\.\d+)?", sample.response.replace(",", ""))
        return bool(numbers) and float(numbers[-1]) == float(sample.extra[self.field])

"""The protocol of rewards: rules, reward models, judges. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class RewardConfig:
    kind: str = "???"
    """Name of a registered reward (stages/rewards/registry.py)."""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one row."""

    prompt: str
    response: str
    """Without special tokens."""
    finished: bool
    """The response ended by itself (EOS)."""
    extra: dict[str, Any]
    """The prompt's own fields in its source (an answer to check against, say)."""


class Reward(Protocol):
    deterministic: bool
    """Same sample, same score, always: lets `replay` demand a difference of 0."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """One finite number per sample."""
        ...

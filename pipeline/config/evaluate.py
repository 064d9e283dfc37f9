"""The section `evaluate`: how often the held-out prompts are sampled, and how. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem, at_least


@dataclass
class EvaluateConfig:
    every: int = 0
    """Versions between evaluations; the first and the last are always evaluated. 0: never."""
    shards: int = 1
    temperature: float | None = None
    """null: as in training. Noise is keyed by prompt, so that two evaluations are paired."""


def evaluate_problems(config: EvaluateConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(1, {"evaluate.shards": config.shards})
    yield from at_least(0, {"evaluate.every": config.every})
    if config.temperature is not None:
        yield from at_least(0, {"evaluate.temperature": config.temperature})

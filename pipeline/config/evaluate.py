"""The section `evaluate`: how often the held-out prompts are sampled, how, what scores them, and which version is best.

May import stages.rewards.config and storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stages.rewards.config import RewardPartsConfig, parts_problems
from storage.problems import Problem, above, at_least


@dataclass
class SelectConfig:
    """Which of the evaluated versions is the best: the one with the highest mean score of those within the budget."""

    max_kl: float | None = None
    """KL budget: `eval/kl`, nats per response, that a version may have at most; null: none."""


@dataclass
class EvaluateConfig:
    every: int | None = None
    """Versions between evaluations; the first and the last are always evaluated, and under null they alone. 0: never
    any."""
    shards: int = 1
    temperature: float | None = None
    """null: as in training. Noise is keyed by prompt, so that two evaluations are paired."""
    reward: RewardPartsConfig = field(default_factory=RewardPartsConfig)
    """What scores the held-out responses; empty: `reward`."""
    select: SelectConfig = field(default_factory=SelectConfig)


def evaluate_problems(config: EvaluateConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(1, {"evaluate.shards": config.shards})
    yield from at_least(0, {"evaluate.every": config.every})
    if config.temperature is not None:
        yield from at_least(0, {"evaluate.temperature": config.temperature})
    yield from parts_problems(config.reward, "evaluate.reward")
    yield from above(0, {"evaluate.select.max_kl": config.select.max_kl}, ", or null for no budget")
    if config.every == 0:
        idle = "nothing is evaluated (evaluate.every=0): leave it out, or evaluate"
        if config.select.max_kl is not None:
            yield Problem("evaluate.select.max_kl", config.select.max_kl, idle)
        if config.reward.given:
            yield Problem("evaluate.reward", config.reward.kind or [*config.reward.parts], idle)

"""The distribution that tokens are drawn from: one for the engines that draw and for the trainer that scores what was
drawn.

May import the standard library and storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from storage.problems import Problem, at_least


@dataclass
class SamplingConfig:
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    """EOS cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """Divides the logits here and in every log-prob of the run. 0: greedy (evaluation only)."""
    suppress_token_ids: list[int] = field(default_factory=list)
    """Tokens never sampled; the trainer's distributions exclude them too."""


def sampling_problems(config: SamplingConfig) -> Iterator[Problem]:
    """What of the section `sampling` cannot work by itself."""
    yield from at_least(1, {"sampling.max_new_tokens": config.max_new_tokens})
    not_negative: dict[str, float] = {
        "sampling.min_new_tokens": config.min_new_tokens,
        "sampling.temperature": config.temperature,
    }
    yield from at_least(0, not_negative)
    if config.temperature == 0:
        need = "training needs a distribution: above 0 (evaluate.temperature=0 evaluates greedily)"
        yield Problem("sampling.temperature", config.temperature, need)
    if config.min_new_tokens > config.max_new_tokens:
        need = f"must be at most sampling.max_new_tokens = {config.max_new_tokens}"
        yield Problem("sampling.min_new_tokens", config.min_new_tokens, need)

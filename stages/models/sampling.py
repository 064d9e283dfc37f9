"""Settings of the distribution that tokens are sampled from. The engines sample from it, and the trainer computes
log-probs under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem, at_least, setting


@dataclass
class SamplingConfig:
    """How responses are sampled."""

    max_new_tokens: int = setting(64, at_least(1))
    """Longest response. A response that reaches it without EOS counts as cut."""
    min_new_tokens: int = setting(0, at_least(0))
    """EOS cannot be sampled before this many tokens."""
    temperature: float = setting(1.0, at_least(0))
    """Divisor of the logits, in sampling and in every log-prob of the run. 0: greedy (evaluation only)."""
    suppress_token_ids: list[int] = setting([])
    """Tokens that are never sampled. The trainer's distributions exclude them too."""


def sampling_problems(config: SamplingConfig) -> Iterator[Problem]:
    """Yield the problems of section `sampling` that do not depend on other sections."""
    if config.temperature == 0:
        need = "training needs a distribution: above 0 (evaluate.temperature=0 evaluates greedily)"
        yield Problem("sampling.temperature", config.temperature, need)
    if config.min_new_tokens > config.max_new_tokens:
        need = f"must be at most sampling.max_new_tokens = {config.max_new_tokens}"
        yield Problem("sampling.min_new_tokens", config.min_new_tokens, need)

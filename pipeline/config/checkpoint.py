"""The section `checkpoint`: how often the trained models are saved. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem, at_least


@dataclass
class CheckpointConfig:
    every: int = 10
    """Updates between checkpoints; a lost trainer replays at most so many from the stored rollouts."""
    keep: int = 2


def checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(1, {"checkpoint.every": config.every, "checkpoint.keep": config.keep})

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
    """Of each model, the newest; more where the staleness bound needs an older one."""
    keep_every: int | None = None
    """Checkpoints of versions that are multiples of this also stay; null: none."""


def checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    counts = {"every": config.every, "keep": config.keep, "keep_every": config.keep_every}
    yield from at_least(1, {f"checkpoint.{name}": value for name, value in counts.items()})
    if config.keep_every is not None and config.every >= 1 and config.keep_every % config.every:
        need = f"must be a multiple of checkpoint.every = {config.every}: no other versions are saved"
        yield Problem("checkpoint.keep_every", config.keep_every, need)

"""The section `rollout`: how many responses a step has, and in which parts. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from storage.problems import Problem, at_least, divides


@dataclass
class RolloutConfig:
    rows: int = 32
    """Responses per PPO step."""
    shards: int = 2
    """Parts of a step that are generated, scored and evaluated on their own."""
    responses_per_prompt: int = 1
    versions: Literal["exact", "latest"] = "exact"
    """Which weights sample step i. `exact`: version max(0, i - staleness), so that a run is a function of its config.
    `latest`: the newest that is published when a shard starts, and under `engine.update: inflight` whatever is
    published while it runs; never an older one."""


def rollout_problems(config: RolloutConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    counts = {
        "rollout.rows": config.rows,
        "rollout.shards": config.shards,
        "rollout.responses_per_prompt": config.responses_per_prompt,
    }
    yield from at_least(1, counts)
    yield from divides("rollout.shards", config.shards, "rollout.rows", config.rows)
    if config.shards >= 1:
        key, responses = "rollout.responses_per_prompt", config.responses_per_prompt
        yield from divides(key, responses, "rows of a shard", config.rows // config.shards)

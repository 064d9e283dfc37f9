"""The base class of rewards: rules, users' own, reward models, judges.

A reward is called with the rows of a shard, or with batches of them, in a worker of the role `score`, while other
shards are still generated. A slow reward (a model, an answer over HTTP) delays only the `advantage` node of its
own step, if that node runs on another gang (`placement.roles.advantage`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A row as a reward sees it."""

    prompt: str
    response: str
    """Without special tokens."""
    finished: bool = True
    """True if the response ended by itself (EOS)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other fields of the prompt in its source (for example the right answer)."""
    row: int = 0
    """Number of the row within its step, for messages."""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    """Every token that was sampled, special ones and the EOS included."""
    messages: tuple[Mapping[str, str], ...] = ()
    """For a chat prompt: its messages, with the response as the assistant's; otherwise empty."""


@dataclass(frozen=True)
class Scored:
    """Scores of some samples if there is more than one number for each."""

    parts: Mapping[str, Sequence[float]]
    """Name of a part -> one finite number per sample. The score is the sum of the parts; each is stored and logged. A
    single part may have an empty name. It then gets the reward's name in the config."""
    disagreement: Sequence[float] | None = None
    """For an ensemble: standard deviation over its members, per sample."""
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that are stored and logged like parts, but are not a part of the score."""


class Reward(ABC):
    """A function that scores samples, and what a run must know about it. The constructor takes `reward.parts.NAME.args`
    and raises ValueError, naming the argument, if one cannot work."""

    deterministic: bool
    """True if a sample always gets the same score, whatever is scored beside it. `replay` then demands a difference of
    0."""
    batch_tokens: int | None = None
    """Most tokens of a call, prompts and responses padded to the longest of its rows; a single row may have more. None:
    all rows of the shard."""
    fields: frozenset[str] = frozenset()
    """Names of the prompts' fields that the reward reads. Every prompt must have them."""
    protections: Mapping[str, str | None] = MappingProxyType({})
    """For a reward that runs code in a sandbox: each target that can be protected from the code (files, network,
    processes) -> the mechanism that protects it; None: nothing does."""

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> Sequence[float] | Scored:
        """Return one finite number per sample, or several by name."""

    def follow(self, samples: Sequence[Sample]) -> None:  # noqa: B027
        """Take part in rank 0's call with the same samples, on another rank of its gang: compute this rank's share of
        the models that the gang divides. A reward without such a model does nothing."""

    def counts(self) -> Mapping[str, float]:
        """Return what has been used up so far, over all processes of the run, by name (`requests`, `cost`)."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free processes, models and connections. A second call does nothing."""


@dataclass(frozen=True)
class Part:
    """A reward under the name and with the weight that the config gives it."""

    name: str
    weight: float
    reward: Reward


class RewardFailed(ValueError):
    """A reward could not score a batch. The message says which rows, and why."""


class BudgetSpent(RewardFailed):
    """A judge's budget is used up. The run ends, and can be resumed with a larger one."""

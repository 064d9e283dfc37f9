"""The protocol of rewards: rules, users' own, reward models, judges.

A reward is called with the rows of a shard, or with batches of them, in a worker of the role `score`, while other
shards are still generated. It may take its time there (a model, an answer over HTTP): nothing but the `advantage` of
its own step waits for it, where that has a gang of its own (`placement.roles.advantage`). What it holds (a process, a
model, a connection) it gives back in `close`, if it has one.

May import the standard library only: users' own rewards run in a process that loads nothing else of Stageline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Sample:
    """What a reward sees of one row."""

    prompt: str
    response: str
    """Without special tokens."""
    finished: bool = True
    """The response ended by itself (EOS)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The prompt's own fields in its source (an answer to check against, say)."""
    row: int = 0
    """Number of the row within its step, for messages."""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    """Every token that was sampled, special ones and the EOS included."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Of a chat prompt: its messages, and the response as the assistant's; else empty."""


@dataclass(frozen=True)
class Scored:
    """What a reward says of some samples, where that is more than one number each."""

    parts: Mapping[str, Sequence[float]]
    """Name of a part -> one finite number per sample. Their sum counts; each is stored and logged. The name of the only
    part may be empty: it is then that of the reward in the config."""
    disagreement: Sequence[float] | None = None
    """Of an ensemble: standard deviation over its members, per sample."""
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What is stored and logged as parts are, and counts for nothing."""


class Reward(Protocol):
    """Scores samples. Its constructor takes `reward.parts.NAME.args`, and raises ValueError for those that cannot work,
    naming the argument."""

    deterministic: bool
    """Same sample, same score, always, whatever is scored beside it: lets `replay` demand a difference of 0."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float] | Scored:
        """One finite number per sample, or several by name."""
        ...


@runtime_checkable
class Batched(Protocol):
    """A reward that takes so many tokens at a time."""

    batch_tokens: int | None
    """Most tokens of a call, prompts and responses padded to the longest of its rows; a single row may have more. None:
    all rows of the shard."""


@runtime_checkable
class ReadsFields(Protocol):
    """A reward that needs fields of the prompts."""

    @property
    def fields(self) -> frozenset[str]:
        """Their names: every prompt must have them."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A reward that holds something."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """A reward under the name and with the weight that the config gives it."""

    name: str
    weight: float
    reward: Reward


class RewardFailed(ValueError):
    """A reward could not score a batch: says which, of which rows, and why."""

"""The protocol of rewards: rules, users' own, reward models, judges.

A reward is called with the rows of a shard, or with batches of them, in a worker of the role `score`, while other
shards are still generated. It may take its time there (a model, an answer over HTTP): nothing but the `advantage` of
its own step waits for it, where that has a gang of its own (`placement.roles.advantage`). What it holds (a process, a
model, a connection) it gives back in `close`, if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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
    """Name of a part -> one finite number per sample. Their sum counts; each is stored and logged. The name of the only
    part may be empty: it is then that of the reward in the config."""
    disagreement: Sequence[float] | None = None
    """For an ensemble: standard deviation over its members, per sample."""
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that are stored and logged like parts, but do not count."""


class Reward(Protocol):
    """A function that scores samples. Its constructor takes `reward.parts.NAME.args`, and raises ValueError, naming the
    argument, if one cannot work."""

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


@runtime_checkable
class Confined(Protocol):
    """A reward that runs code in a sandbox."""

    @property
    def protections(self) -> Mapping[str, str | None]:
        """What the code is kept from (files, network, processes) -> what enforces it; None: nothing does."""
        ...


@dataclass(frozen=True)
class Part:
    """A reward under the name and with the weight that the config gives it."""

    name: str
    weight: float
    reward: Reward


@runtime_checkable
class Counts(Protocol):
    """A reward that uses something up, which a run's metrics show."""

    def counts(self) -> Mapping[str, float]:
        """Return what has been used up so far, over all processes of the run, by name (`requests`, `cost`)."""
        ...


class RewardFailed(ValueError):
    """A reward could not score a batch: says which, of which rows, and why."""


class BudgetSpent(RewardFailed):
    """A judge's budget is used up. The run ends, and can go on with a larger one."""

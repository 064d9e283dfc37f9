"""The base class of all rewards (rules, users' own functions, reward models, judges), and the samples that they score.

A worker of the role `score` calls a reward with the rows of a shard, or with batches of them, while other shards are
still generated. A reward may be slow, for example if it runs a model or asks a server.

By default, the `advantage` node of a step runs on the gang of the role `score`. It may then have to wait while this
gang scores rows of later steps. If `placement.roles.advantage` names another gang, the node waits only for the scores
of its own step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A row to score: a prompt, a response to it, and further data for rewards."""

    prompt: str
    response: str
    """Text of the response, without special tokens."""
    finished: bool = True
    """True if the response ended by itself (EOS)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other fields of the prompt in its source (for example the right answer)."""
    row: int = 0
    """Number of the row within its step, for error messages."""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    """Every token that was sampled, special ones and the EOS included."""
    messages: tuple[Mapping[str, str], ...] = ()
    """For a chat prompt: its messages, then the response as a message of the assistant. Otherwise empty."""


@dataclass(frozen=True)
class Scored:
    """Scores of some samples, with several numbers for each sample."""

    parts: Mapping[str, Sequence[float]]
    """Name of a part -> one finite number per sample. The score is the sum of the parts. Each part is stored and
    logged. If there is only one part, its name may be empty. It is then stored under the reward's name in the
    config."""
    disagreement: Sequence[float] | None = None
    """For an ensemble: standard deviation over its members, per sample."""
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Name -> one number per sample. These numbers are stored and logged like parts, but do not count in the score."""


class Reward(ABC):
    """A function that scores samples, with the properties that a run needs to know. The constructor takes
    `reward.parts.NAME.args`. If an argument cannot work, the constructor raises ValueError, which names the
    argument."""

    deterministic: bool
    """True if a sample always gets the same score, whichever other samples are in the batch. `stageline replay` then
    accepts no difference between the stored and the recomputed score, if the worker has only one rank."""
    batch_tokens: int | None = None
    """Maximum number of tokens of a call: the number of its rows times the number of tokens in its longest row (prompt
    and response). A single row may have more. None: a call has all rows of the shard."""
    early: bool = False
    """True if rows should be scored as soon as they are finished, while others of their shard are still generated. This
    is for slow rewards. The score of a row must not depend on the other rows of a call. Which rows share a call then
    varies from run to run."""
    concurrent_calls: int = 1
    """Number of calls that may run at the same time, if the reward is `early`. With 1, further calls wait for the
    first."""
    fields: frozenset[str] = frozenset()
    """Names of the prompts' fields that the reward reads. Every prompt must have them."""
    protections: Mapping[str, str | None] = MappingProxyType({})
    """For a reward that runs code in a sandbox: target (files, network, processes) -> name of the mechanism that keeps
    the code away from the target, or None if the target is not protected."""

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> Sequence[float] | Scored:
        """Return one finite number per sample, or a `Scored` with several named numbers per sample."""

    def follow(self, samples: Sequence[Sample]) -> None:  # noqa: B027
        """Take part in rank 0's call with the same samples. The other ranks of a gang call this to compute their share
        of a model that the gang divides. A reward without such a model does nothing."""

    def counts(self) -> Mapping[str, float]:
        """Return a dictionary: name (`requests`, `cost`) -> amount that the reward has used so far, summed over all
        processes of the run."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Free processes, models and connections. A second call does nothing."""


@dataclass(frozen=True)
class Part:
    """A reward, with its name and weight in the config."""

    name: str
    weight: float
    reward: Reward


class RewardFailed(ValueError):
    """A reward could not score a batch. The message says which rows, and why."""


class BudgetSpent(RewardFailed):
    """A judge's budget is used up. The run ends, and can be resumed with a larger budget."""

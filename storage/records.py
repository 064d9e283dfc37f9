"""The records that travel between stages, one frozen dataclass of numpy arrays per stage output.

One alignment for all of them: `rows` is the batch axis of a shard (or of a whole step), `seq` = max_prompt_tokens +
max_new_tokens is the token axis. A row holds its prompt at 0..prompt_length-1, its response right after, and padding
to the end. **Index t of every per-token array belongs to `tokens[:, t]`**, and is zero where it has no meaning
(outside `response_mask`), never NaN.

A worked example, max_prompt_tokens = 3, max_new_tokens = 4, prompt "a b", response "c d EOS":

    tokens            a  b  c  d  E  .  .
    response_mask     0  0  1  1  1  0  0
    sampler_logprobs  0  0  l2 l3 l4 0  0     l2 = log mu(c | a b)
    values            0  0  v2 v3 v4 0  0     v2 = V(a b): the state BEFORE token 2
    bootstrap_values  V(a b c d E), used only when the response was cut by the length limit

May import numpy and jaxtyping only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
from beartype import beartype
from jaxtyping import Bool, Float32, Int8, Int32, Int64, jaxtyped


class FinishReason(IntEnum):
    """Why a response ended: an end-of-sequence token was sampled (and is included), or the length limit cut it."""

    STOP = 0
    LENGTH = 1


SCORE_PREFIX, DISAGREEMENT_PREFIX = ("scores.", "disagreement.")
"""What the names of the arrays of `Scores`' parts begin with."""


class Record:
    """What every record shares: a row count, its fields by name, slicing and joining along `rows`."""

    KIND: ClassVar[str]

    @property
    def num_rows(self) -> int:
        """Number of rows held."""
        return int(next(iter(self.arrays().values())).shape[0])

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields by name, in the order they are declared; these names are the Zarr array names."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Any:
        """The record that `arrays` gave."""
        return cls(**arrays)

    def rows(self, index: slice | np.ndarray) -> Any:
        """The same record restricted to some rows."""
        return self.from_arrays({name: array[index] for name, array in self.arrays().items()})


def concatenate(records: list[Any]) -> Any:
    """Joins records of one type along `rows`, in the order given (the shards of a step). Raises KeyError where one
    lacks an array that the first has."""
    names = records[0].arrays().keys()
    return records[0].from_arrays({name: np.concatenate([r.arrays()[name] for r in records]) for name in names})


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class PromptBatch(Record):
    """The prompts of a shard: what `generate` reads. Never stored; a pure function of (seed, step, shard)."""

    KIND: ClassVar[str] = "prompts"
    row: Int64[np.ndarray, " rows"]
    """Number of the row within its step: with (seed, step) the key of its sampling noise."""
    prompt_index: Int64[np.ndarray, " rows"]
    """Number of the prompt in its source."""
    tokens: Int32[np.ndarray, "rows prompt_seq"]
    """Prompt tokens, right-padded."""
    prompt_lengths: Int32[np.ndarray, " rows"]


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Rollout(Record):
    """Output of `generate`: prompts and sampled responses."""

    KIND: ClassVar[str] = "rollout"
    row: Int64[np.ndarray, " rows"]
    prompt_index: Int64[np.ndarray, " rows"]
    tokens: Int32[np.ndarray, "rows seq"]
    """Prompt, response, padding."""
    prompt_lengths: Int32[np.ndarray, " rows"]
    response_lengths: Int32[np.ndarray, " rows"]
    """Sampled tokens, the EOS included."""
    response_mask: Bool[np.ndarray, "rows seq"]
    """True where the token was sampled."""
    sampler_logprobs: Float32[np.ndarray, "rows seq"]
    """log mu(token): under the distribution that was sampled, by the weights of `token_versions`."""
    token_versions: Int32[np.ndarray, "rows seq"]
    """Version of the weights that sampled each token; -1 where nothing was sampled."""
    finish_reason: Int8[np.ndarray, " rows"]
    """A `FinishReason`."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Scores(Record):
    """Output of `score`: one number per response, before any KL term; the named parts that it is the weighted sum of;
    and, of parts that an ensemble gave, how far its members are apart.

    Parts have whatever names the config gives them, so each is an array of its own, named after it: `scores.NAME`,
    `disagreement.NAME`."""

    KIND: ClassVar[str] = "scores"
    scores: Float32[np.ndarray, " rows"]
    parts: Mapping[str, Float32[np.ndarray, " rows"]] = field(default_factory=dict)
    disagreement: Mapping[str, Float32[np.ndarray, " rows"]] = field(default_factory=dict)
    """Standard deviation over the members, by part."""

    def arrays(self) -> dict[str, np.ndarray]:
        """As they are stored."""
        parts = {f"{SCORE_PREFIX}{name}": array for name, array in self.parts.items()}
        return {
            "scores": self.scores,
            **parts,
            **{f"{DISAGREEMENT_PREFIX}{n}": array for n, array in self.disagreement.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Any:
        """Also of a run that stored the sum alone."""

        def named(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}

        return cls(arrays["scores"], named(SCORE_PREFIX), named(DISAGREEMENT_PREFIX))


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class ReferenceLogprobs(Record):
    """Output of `reference`: log pi_ref(token) by the frozen start policy."""

    KIND: ClassVar[str] = "reference"
    ref_logprobs: Float32[np.ndarray, "rows seq"]


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class PolicyLogprobs(Record):
    """Output of `logprob`: the proximal policy, the trainer's weights at the start of the step."""

    KIND: ClassVar[str] = "policy"
    policy_logprobs: Float32[np.ndarray, "rows seq"]
    entropy: Float32[np.ndarray, "rows seq"]
    """Entropy of the next-token distribution that token t was drawn from, in nats."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Values(Record):
    """Output of `value`: the critic at the start of the step, on states before each sampled token."""

    KIND: ClassVar[str] = "values"
    values: Float32[np.ndarray, "rows seq"]
    bootstrap_values: Float32[np.ndarray, " rows"]
    """Value of the state after the last sampled token."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Advantages(Record):
    """Output of `advantage`, over the rows of the whole step: what the two updates train on."""

    KIND: ClassVar[str] = "advantages"
    rewards: Float32[np.ndarray, "rows seq"]
    """Per-token reward: -beta * KL estimate, plus the score at the last sampled token."""
    advantages: Float32[np.ndarray, "rows seq"]
    """By the estimator of `ppo.advantage`; whitened over the sampled tokens of the step if the config says so."""
    returns: Float32[np.ndarray, "rows seq"]
    """Unwhitened advantages + values: the critic's targets. Without a critic the discounted rewards to go."""
    loss_mask: Bool[np.ndarray, "rows seq"]
    """Sampled tokens that take part in the losses (response_mask less rows that are filtered out)."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class CanaryPolicyLogprobs(Record):
    """Output of `canary_logprob`: the trainer's log-probs of the first sampled tokens of a shard's first rows."""

    KIND: ClassVar[str] = "canary_policy"
    canary_policy_logprobs: Float32[np.ndarray, "rows seq"]


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class CanaryLogprobs(Record):
    """Output of `canary`: an engine's log-probs of the same tokens, by the same version of the weights."""

    KIND: ClassVar[str] = "canary"
    canary_logprobs: Float32[np.ndarray, "rows seq"]


STORED: tuple[type[Record], ...] = (
    Rollout,
    Scores,
    ReferenceLogprobs,
    PolicyLogprobs,
    Values,
    Advantages,
    CanaryPolicyLogprobs,
    CanaryLogprobs,
)
"""Records that the rollout store writes and reads."""
RECORD_TYPES: dict[str, type[Record]] = {record.KIND: record for record in STORED}

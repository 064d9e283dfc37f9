"""The records that travel between stages: one frozen dataclass of numpy arrays per stage output.

All records have the same alignment. `rows` is the batch axis of a shard (or of a whole step). `seq` = max_prompt_tokens
+ max_new_tokens is the token axis. A row holds its prompt at 0..prompt_length-1, its response directly after it, and
padding to the end. **Index t of every per-token array belongs to `tokens[:, t]`**. Arrays about sampled tokens
have no meaning outside `response_mask`. There they are zero (`token_versions`: -1), never NaN.

A worked example, max_prompt_tokens = 3, max_new_tokens = 4, prompt "a b", response "c d EOS":

    tokens            a  b  c  d  E  .  .
    response_mask     0  0  1  1  1  0  0
    sampler_logprobs  0  0  l2 l3 l4 0  0     l2 = log mu(c | a b)
    values            0  0  v2 v3 v4 0  0     v2 = V(a b): the state BEFORE token 2
    bootstrap_values  V(a b c d E), used only when the response was cut by the length limit

Before a commit every record is checked for numbers that are not finite, and for log-probs that were never filled in.
Without the check a run would silently train on them.

Every stored array has attributes that any Zarr reader shows. They follow the CF conventions where these have a term,
and depend only on the array's name, so that all processes write the same.

    long_name             meaning of the array
    units                 nat (natural logarithms), token, 1 (a plain number)
    ancillary_variables   the mask that is True where the array has meaning; elsewhere the array is zero
                          (`token_versions`: -1)
    flag_values, flag_meanings   for an array of codes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from beartype import beartype
from jaxtyping import Bool, Float32, Int8, Int32, Int64, jaxtyped


class FinishReason(IntEnum):
    """Reason why a response ended: an end-of-sequence token was sampled (and is included), or the length limit was
    reached."""

    STOP = 0
    LENGTH = 1


SCORE_PREFIX, DISAGREEMENT_PREFIX = ("scores.", "disagreement.")
"""Prefixes of the names of the arrays that store the fields `parts` and `disagreement` of `Scores`."""


class Record:
    """Base of all records, with access to the number of rows, to the fields by name, and to a selection of the rows."""

    KIND: ClassVar[str]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(next(iter(self.arrays().values())).shape[0])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return name of a field -> array, in the order of declaration. The Zarr arrays have the same names."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the record with these arrays."""
        return cls(**arrays)

    def rows(self, index: slice | np.ndarray) -> Any:
        """Return a record of the same type with the rows that `index` selects."""
        return self.from_arrays({name: array[index] for name, array in self.arrays().items()})


def concatenate(records: list[Any]) -> Any:
    """Join records of one type along `rows`, in the given order (the shards of a step). Raises KeyError if a record
    lacks an array that the first record has."""
    names = records[0].arrays().keys()
    return records[0].from_arrays({name: np.concatenate([r.arrays()[name] for r in records]) for name in names})


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class PromptBatch(Record):
    """The prompts of a shard, the input of `generate`. It is never stored, since it is a pure function of (seed, step,
    shard)."""

    KIND: ClassVar[str] = "prompts"
    row: Int64[np.ndarray, " rows"]
    """Number of the row within its step. With (seed, step) it is the key of the row's sampling noise."""
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
    """Number of sampled tokens, the EOS included."""
    response_mask: Bool[np.ndarray, "rows seq"]
    """True where the token was sampled."""
    sampler_logprobs: Float32[np.ndarray, "rows seq"]
    """log mu(token), where mu is the distribution that the engine sampled from, with the weights of `token_versions`.
    """
    token_versions: Int32[np.ndarray, "rows seq"]
    """Version of the weights that sampled each token; -1 elsewhere."""
    finish_reason: Int8[np.ndarray, " rows"]
    """A `FinishReason`."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Scores(Record):
    """Output of `score`. `scores` has one number per response, before any KL term: the weighted sum of the
    `parts`. `parts` has the scores of each part, by its name and before its weight. `disagreement` says how far the
    members of an ensemble differ.

    The config names the parts. Each part is stored as arrays of its own: `scores.NAME`, and for an ensemble
    `disagreement.NAME`.
    """

    KIND: ClassVar[str] = "scores"
    scores: Float32[np.ndarray, " rows"]
    parts: Mapping[str, Float32[np.ndarray, " rows"]] = field(default_factory=dict)
    disagreement: Mapping[str, Float32[np.ndarray, " rows"]] = field(default_factory=dict)
    """Name of a component of the reward -> standard deviation over the members of its ensemble, per row. Has only
    components that are ensembles."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return name of a stored array -> array: `scores`, one array for each entry of `parts`, and one for each entry
        of `disagreement` (how far the members of an ensemble differ)."""
        parts = {f"{SCORE_PREFIX}{name}": array for name, array in self.parts.items()}
        return {
            "scores": self.scores,
            **parts,
            **{f"{DISAGREEMENT_PREFIX}{n}": array for n, array in self.disagreement.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return the scores that are stored in these arrays. `parts` is empty for scores of an older run, because such
        runs stored only the weighted sum."""

        def named(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}

        return cls(arrays["scores"], named(SCORE_PREFIX), named(DISAGREEMENT_PREFIX))


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class ReferenceLogprobs(Record):
    """Output of `reference`: log pi_ref(token) of the frozen start policy."""

    KIND: ClassVar[str] = "reference"
    ref_logprobs: Float32[np.ndarray, "rows seq"]


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class PolicyLogprobs(Record):
    """Output of `logprob`: log-probs of the proximal policy, the trainer's weights at the start of the step."""

    KIND: ClassVar[str] = "policy"
    policy_logprobs: Float32[np.ndarray, "rows seq"]
    entropy: Float32[np.ndarray, "rows seq"]
    """Entropy in nats of the trainer's distribution of token t, given the tokens before it."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Values(Record):
    """Output of `value`: the critic's value of the state before each sampled token, with the weights at the start of
    the step."""

    KIND: ClassVar[str] = "values"
    values: Float32[np.ndarray, "rows seq"]
    bootstrap_values: Float32[np.ndarray, " rows"]
    """Value of the state after the last sampled token."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Advantages(Record):
    """Output of `advantage`, over the rows of the whole step: the training data of the two updates."""

    KIND: ClassVar[str] = "advantages"
    rewards: Float32[np.ndarray, "rows seq"]
    """Per-token reward: -beta * KL estimate, plus the score at the last sampled token."""
    advantages: Float32[np.ndarray, "rows seq"]
    """Advantages by the estimator `ppo.advantage`, whitened over the sampled tokens of the step if the config says so.
    """
    returns: Float32[np.ndarray, "rows seq"]
    """Advantages before whitening, plus values: the critic's targets. Without a critic: discounted rewards to go."""
    loss_mask: Bool[np.ndarray, "rows seq"]
    """True for sampled tokens that take part in the losses (response_mask without filtered rows)."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class CanaryPolicyLogprobs(Record):
    """Output of `canary_logprob`: the trainer's log-probs of the first sampled tokens of a shard's first rows."""

    KIND: ClassVar[str] = "canary_policy"
    canary_policy_logprobs: Float32[np.ndarray, "rows seq"]


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class CanaryLogprobs(Record):
    """Output of `canary`: an engine's log-probs of the first sampled tokens of a shard's first rows. They are compared
    with the trainer's log-probs of the same tokens (`CanaryPolicyLogprobs`). Engine and trainer use the same version of
    the weights for this."""

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


# ---- validation ------------------------------------------------------------------------------------------


def check_finite(record: Record) -> None:
    """Raise ValueError, naming field and row, if a float array holds NaN or infinity."""
    for name, array in record.arrays().items():
        if not np.issubdtype(array.dtype, np.floating):
            continue
        bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            value = array[row].ravel()[~np.isfinite(array[row].ravel())][0]
            raise ValueError(f"{record.KIND}.{name}: row {row} holds {value} ({int(bad.sum())} such rows)")


def check_logprobs(record: Record, mask: np.ndarray | None) -> None:
    """Raise ValueError, naming field and row, if an array named `*_logprobs` is zero on all sampled tokens of a row.
    Raise ValueError also if the array has another shape than the mask. `mask` (bool, rows × seq) is the response_mask.
    A Rollout is checked with its own mask. Without a mask nothing is checked."""
    if isinstance(record, Rollout):
        mask = record.response_mask
    if mask is None:
        return
    for name, array in record.arrays().items():
        if not name.endswith("_logprobs"):
            continue
        if mask.shape != array.shape:
            raise ValueError(f"{record.KIND}.{name}: shape {array.shape}, but the mask's is {mask.shape}")
        empty = mask.any(axis=1) & ~((array != 0) & mask).any(axis=1)
        if empty.any():
            row = int(np.argmax(empty))
            raise ValueError(
                f"{record.KIND}.{name}: row {row} is zero on all of its {int(mask[row].sum())} sampled tokens "
                f"({int(empty.sum())} such rows)"
            )


# ---- descriptions ----------------------------------------------------------------------------------------

Attributes = dict[str, Any]
_MASK = "response_mask"


def _array(long_name: str, units: str = "1", mask: str | None = None, **more: Any) -> Attributes:
    return {"long_name": long_name, "units": units} | ({"ancillary_variables": mask} if mask else {}) | more


DESCRIPTIONS = MappingProxyType(
    {
        "row": _array("number of the row within its step, or within its evaluation"),
        "prompt_index": _array("number of the prompt in its source"),
        "tokens": _array("token ids: prompt, response, padding"),
        "prompt_lengths": _array("length of the prompt", "token"),
        "response_lengths": _array("sampled tokens of the response, the end-of-sequence token included", "token"),
        "response_mask": _array("whether the token was sampled"),
        "sampler_logprobs": _array("log-probability of the token when it was sampled, by the engine", "nat", _MASK),
        "token_versions": _array("version of the weights that sampled the token; -1: none did", mask=_MASK),
        "finish_reason": _array(
            "why the response ended: an end-of-sequence token, or the length limit",
            flag_values=[reason.value for reason in FinishReason],
            flag_meanings=" ".join(reason.name.lower() for reason in FinishReason),
        ),
        "scores": _array("score of the response: the weighted sum of its parts, before any KL term"),
        "ref_logprobs": _array("log-probability of the token by the frozen reference", "nat", _MASK),
        "policy_logprobs": _array(
            "log-probability of the token by the trainer's weights at the start of the step", "nat", _MASK
        ),
        "entropy": _array("entropy of the distribution that the token was drawn from, by the trainer", "nat", _MASK),
        "values": _array("critic's value of the state before the token", mask=_MASK),
        "bootstrap_values": _array("critic's value of the state after the last sampled token"),
        "rewards": _array("reward of the token: KL penalty, and the score at the last one", mask=_MASK),
        "advantages": _array("advantage of the token", mask="loss_mask"),
        "returns": _array("the critic's target before the token", mask=_MASK),
        "loss_mask": _array("whether the token takes part in the losses"),
        "vocabulary_bytes": _array("UTF-8 bytes of every token, one token after the other; of special tokens none"),
        "vocabulary_offsets": _array("token t is vocabulary_bytes[vocabulary_offsets[t] : vocabulary_offsets[t + 1]]"),
        "canary_policy_logprobs": _array("canary: log-probability of the token by the trainer", "nat"),
        "canary_logprobs": _array("canary: log-probability of the same token by an engine", "nat"),
    }
)
"""Name of an array -> its attributes."""


def describe(name: str) -> Attributes:
    """Return the attributes of the array with this name. The parts of a score are known by their prefix. Empty for an
    unknown name."""
    if name.startswith(SCORE_PREFIX):
        return _array(f"part {name.removeprefix(SCORE_PREFIX)} of the score, before its weight")
    if name.startswith(DISAGREEMENT_PREFIX):
        part = name.removeprefix(DISAGREEMENT_PREFIX)
        return _array(f"standard deviation of part {part} of the score over the members of its ensemble")
    return dict(DESCRIPTIONS.get(name, {}))

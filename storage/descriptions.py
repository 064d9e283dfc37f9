"""What the stored arrays mean, as attributes that any reader of Zarr shows: a long name, units, where an array holds
numbers, what flags stand for. Attributes follow the CF conventions where these have a word for it.

    long_name             what it is
    units                 nat (natural logarithms), token, 1 (a plain number)
    ancillary_variables   the mask that is True where the array has meaning; elsewhere it is zero
    flag_values, flag_meanings   of an array of codes

They are a function of the array's name alone, so that every process that writes one writes the same. May import the
standard library and storage.records.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from storage.records import DISAGREEMENT_PREFIX, SCORE_PREFIX, FinishReason

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
"""By the name of the array."""


def describe(name: str) -> Attributes:
    """The attributes of an array; of the parts of a score by their prefix. None for one that is not described."""
    if name.startswith(SCORE_PREFIX):
        return _array(f"part {name.removeprefix(SCORE_PREFIX)} of the score, before its weight")
    if name.startswith(DISAGREEMENT_PREFIX):
        part = name.removeprefix(DISAGREEMENT_PREFIX)
        return _array(f"standard deviation of part {part} of the score over the members of its ensemble")
    return dict(DESCRIPTIONS.get(name, {}))

"""Stage `generate`: sample responses to the prompts of a shard, with any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from stages.engines.protocol import Completion, Request
from stages.models.config import SamplingConfig
from storage.records import PromptBatch, Rollout


class Sampler(Protocol):
    """The part of an engine that samples responses."""

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]: ...


def generate(
    engine: Sampler,
    prompts: PromptBatch,
    *,
    seed: int,
    step: int,
    version: int,
    sampling: SamplingConfig,
    seq: int,
    pad_id: int = 0,
    on_row: Callable[[Rollout], None] | None = None,
) -> Rollout:
    """Sample one response per prompt with version `version` of the weights, which must be resident in the engine.
    Return the rollout, with the rows in the order of the prompts.

    Args:
        seq: width of the arrays, at least the longest prompt + max_new_tokens.
        pad_id: token that fills the rest of a row.
        on_row: called with each row, as a rollout of one row, as soon as the row is finished.

    Raises:
        ValueError: two rows have the same number, or a row does not fit `seq`.
        RequestError: the engine refuses a request.
        RuntimeError: the engine returns an unknown row, a row twice, or not every row."""
    index_of = _checked_rows(prompts, sampling, seq)
    num = prompts.num_rows
    rollout = Rollout(
        row=prompts.row,
        prompt_index=prompts.prompt_index,
        tokens=np.full((num, seq), pad_id, np.int32),
        prompt_lengths=prompts.prompt_lengths,
        response_lengths=np.zeros(num, np.int32),
        response_mask=np.zeros((num, seq), np.bool_),
        sampler_logprobs=np.zeros((num, seq), np.float32),
        token_versions=np.full((num, seq), -1, np.int32),
        finish_reason=np.zeros(num, np.int8),
    )
    requests = []
    for i, length in enumerate(prompts.prompt_lengths):
        rollout.tokens[i, :length] = prompts.tokens[i, :length]
        prompt = tuple(prompts.tokens[i, :length].tolist())
        requests.append(Request(int(prompts.row[i]), seed, step, prompt, version, sampling))
    for completion in engine.generate(requests):
        i = index_of.pop(completion.row, -1)
        if i < 0:
            raise RuntimeError(f"the engine returned row {completion.row} twice, or was never asked for it")
        start = int(prompts.prompt_lengths[i])
        response = slice(start, start + len(completion.tokens))
        rollout.tokens[i, response] = completion.tokens
        rollout.response_lengths[i] = len(completion.tokens)
        rollout.response_mask[i, response] = True
        rollout.sampler_logprobs[i, response] = completion.logprobs
        rollout.token_versions[i, response] = completion.versions
        rollout.finish_reason[i] = completion.finish_reason
        if on_row is not None:
            on_row(rollout.rows(slice(i, i + 1)))
    if index_of:
        raise RuntimeError(f"the engine returned no response for rows {sorted(index_of)}")
    return rollout


def _checked_rows(prompts: PromptBatch, sampling: SamplingConfig, seq: int) -> dict[int, int]:
    """Return a dictionary: the number that identifies a row (`PromptBatch.row`) -> the index of the row in the arrays
    of `prompts`. Raises ValueError if the longest prompt and `max_new_tokens` together exceed `seq`, or if two rows
    have the same number. Such rows would get the same noise."""
    longest = int(prompts.prompt_lengths.max(initial=0)) + sampling.max_new_tokens
    if longest > seq:
        raise ValueError(f"the longest prompt + max_new_tokens is {longest} tokens, seq is {seq}")
    index_of = {int(row): i for i, row in enumerate(prompts.row)}
    if len(index_of) != prompts.num_rows:
        raise ValueError("two prompts of a shard have the same row number: their noise would be the same")
    return index_of

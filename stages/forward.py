"""The stages that run a forward pass over a shard's sampled tokens.

logprob      log pi_prox of each token and entropies, by the policy's weights at the step's start
reference    log pi_ref of each token, by the frozen reference model
value        the value of the state before each token, by the critic's weights at the step's start

A canary is a check that an engine and the trainer compute the same log-probs. Both score the same few tokens with the
same version of the weights (`canary_logprob`, `engine_logprobs`). Suppose that an engine did not load all of its
weights. The log-probs that were stored at sampling do not show this under staleness: they differ from the trainer's
anyway, since older weights sampled the tokens. The canary shows it, because its two sides use one version, whatever
version sampled the tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from stages.engines.protocol import GenerationEngine, Request
from stages.models.config import SamplingConfig
from stages.models.protocol import ModelHost
from stages.ppo.metrics import canary_metrics
from storage.records import CanaryLogprobs, CanaryPolicyLogprobs, PolicyLogprobs, ReferenceLogprobs, Rollout, Values


def logprob(models: ModelHost, rollout: Rollout) -> PolicyLogprobs | None:
    """Return log pi_prox(token) and entropies of a shard's rollout, computed by the resident policy. Return None on
    ranks other than 0."""
    return models.policy_logprobs(rollout)


# ---- reference -------------------------------------------------------------------------------------------


def reference(models: ModelHost, rollout: Rollout) -> ReferenceLogprobs | None:
    """Return log pi_ref(token) of a shard's rollout; None on ranks other than 0. The reference never changes, so it has
    no version."""
    return models.ref_logprobs(rollout)


# ---- value -----------------------------------------------------------------------------------------------


def value(models: ModelHost, rollout: Rollout) -> Values | None:
    """Return values and bootstrap values of a shard's rollout, computed by the resident critic. Return None on ranks
    other than 0."""
    return models.values(rollout)


# ---- canaries --------------------------------------------------------------------------------------------


CANARY_STEP = 2**31 - 2
"""Step number in the keys (seed, step, row) of canary rows. A canary row is a row that an engine scores again, for a
comparison with the trainer. No step of a run has this number, and `EVALUATION_STEP` is another number."""


CANARY_TOKENS = 8
"""Number of sampled tokens per row that a canary compares."""


def canary_rows(rollout: Rollout, rows: int, tokens: int = CANARY_TOKENS) -> Rollout:
    """Return the first `rows` rows of a shard, cut to their first `tokens` sampled tokens."""
    part: Rollout = rollout.rows(slice(rows))
    mask = part.response_mask & (part.response_mask.cumsum(axis=1) <= tokens)
    return dataclasses.replace(
        part,
        response_lengths=mask.sum(axis=1).astype(np.int32),
        response_mask=mask,
        sampler_logprobs=np.where(mask, part.sampler_logprobs, 0),
        token_versions=np.where(mask, part.token_versions, -1).astype(np.int32),
    )


def canary_logprob(
    models: ModelHost, rollout: Rollout, *, rows: int, tokens: int = CANARY_TOKENS
) -> CanaryPolicyLogprobs | None:
    """Return the resident policy's log-probs of a shard's canary tokens; None on ranks other than 0."""
    record = models.policy_logprobs(canary_rows(rollout, rows, tokens))
    return None if record is None else CanaryPolicyLogprobs(_all_rows(record.policy_logprobs, rollout.num_rows))


def canary_requests(rollout: Rollout, sampling: SamplingConfig, *, seed: int, version: int) -> list[Request]:
    """Return one request per row of `rollout`. The requests make an engine compute the log-probs of the rows' sampled
    tokens with weights `version`."""
    requests = []
    for i, (prompt, new) in enumerate(
        zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    ):
        tokens = rollout.tokens[i].tolist()
        settings = dataclasses.replace(sampling, max_new_tokens=new, min_new_tokens=min(sampling.min_new_tokens, new))
        response = tuple(tokens[prompt : prompt + new])
        requests.append(
            Request(int(rollout.row[i]), seed, CANARY_STEP, tuple(tokens[:prompt]), version, settings, response)
        )
    return requests


def sampled_by(part: Rollout, version: int) -> bool:
    """Return True if weights `version` sampled all response tokens of `part`, the rows of the canary. At staleness 0
    this is always so.

    If True, the log-probs that were stored at sampling are an engine's log-probs for this version. So the canary first
    compares the stored log-probs with the trainer's. If they differ too much, the present engine scores the tokens
    again. After a resume, the present engine may be another one than the engine that sampled the tokens.
    """
    return bool((part.token_versions[part.response_mask] == version).all())


def engine_logprobs(
    engine: GenerationEngine, part: Rollout, sampling: SamplingConfig, *, seed: int, version: int
) -> np.ndarray:
    """Make the engine score the sampled tokens of these rows with weights `version`. Return the log-probs: float32
    [rows, seq].

    Raises:
        RuntimeError: the engine returned other tokens, or used other weights.
    """
    requests = canary_requests(part, sampling, seed=seed, version=version)
    by_row = {completion.row: completion for completion in engine.generate(requests)}
    logprobs = np.zeros(part.tokens.shape, np.float32)
    for i, request in enumerate(requests):
        completion = by_row.get(request.row)
        if completion is None or tuple(completion.tokens.tolist()) != request.forced:
            raise RuntimeError(f"the engine did not score the tokens that it was given in row {request.row}")
        if set(completion.versions.tolist()) != {version}:
            raise RuntimeError(f"row {request.row} was scored by versions {set(completion.versions.tolist())}")
        logprobs[i, part.response_mask[i]] = completion.logprobs
    return logprobs


def compared(
    engine: np.ndarray, part: Rollout, policy_logprobs: np.ndarray, num_rows: int
) -> tuple[CanaryLogprobs, dict[str, float]]:
    """Return the record of the engine's log-probs for a shard, and metrics that compare these log-probs with the
    trainer's log-probs.

    Args:
        engine: the engine's log-probs of the canary rows, [rows seq].
        part: the canary rows.
        policy_logprobs: the trainer's log-probs at the same version, [rows seq]. The canary rows come first.
        num_rows: number of rows of the shard."""
    metrics = canary_metrics(engine, policy_logprobs[: part.num_rows], part.sampler_logprobs, part.response_mask)
    return CanaryLogprobs(_all_rows(engine, num_rows)), metrics


def _all_rows(logprobs: np.ndarray, num_rows: int) -> np.ndarray:
    """Return log-probs of all rows of a shard, with zeros for the rows after the canary rows."""
    whole = np.zeros((num_rows, logprobs.shape[1]), np.float32)
    whole[: len(logprobs)] = logprobs
    return whole

"""Train a variant on rollouts that another run recorded, instead of sampling.

    generate, score, reference (stored) ──┬─► logprob, value (the variant's own models) ──► advantage ──► updates
                                          └─ sampler_logprobs and token_versions as recorded, for the correction

Each step runs in this process, in the pipeline's order, and shard by shard where the pipeline works by shards. So a
variant with the settings of the recorded run ends with the same bits as that run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.run import RunConfig
from pipeline.graph.graph import update_stages
from stages.advantage import advantage
from stages.forward import logprob, value
from stages.models.protocol import CriticBatch, ModelHost, PolicyBatch
from storage.address import Address
from storage.records import PolicyLogprobs, Rollout, Values, concatenate
from storage.rollouts import RolloutStore


@dataclass(frozen=True)
class RecordedStep:
    """The results of a step that was trained on recorded rollouts."""

    step: int
    metrics: Mapping[str, float]
    digests: Mapping[str, str]
    """Role -> digest of its model at version `step + 1`."""


def train_recorded(
    host: ModelHost, store: RolloutStore, config: RunConfig, steps: range, state: Mapping[str, Any]
) -> Iterator[RecordedStep]:
    """Train the policy of `host`, and its critic if there is one, on the rollouts in `store`. The models must be at
    version `steps.start`. Yield each step when its updates are done. `state`: the state that `advantage`
    returned for the step before `steps.start`; empty at step 0. `host` must have a single rank.

    Raises MissingOutput or StoreError if recorded data is missing or damaged."""
    for step in steps:
        rollouts: list[Rollout] = [store.read(Address("generate", step, s)) for s in range(config.rollout.shards)]
        policy = _logprobs(host, rollouts) if config.ppo.proximal == "recompute" else None
        values = _values(host, rollouts) if config.has_critic else None
        rollout: Rollout = concatenate(rollouts)
        reference = store.read_step("reference", step, config.rollout.shards)
        scores = store.read_step("score", step, config.rollout.shards)
        normalize = config.reward.normalize
        advantages, state, metrics = advantage(
            rollout, scores, reference, policy, values, config.ppo, step, config.staleness, state, normalize,
            config.rollout.responses_per_prompt,
        )  # fmt: skip
        updated = {**metrics, "policy/proximal_recomputed": float(policy is not None)}
        batch = PolicyBatch(rollout, advantages, policy, reference, state["step_kl_coef"])
        updated |= host.update_policy(step, batch)
        if values is not None:
            updated |= host.update_critic(step, CriticBatch(rollout, advantages, values))
        digests = {}
        for role in update_stages(config.graph()):
            digests[str(role)] = host.digest(role)
            host.mark_clean(role)
        yield RecordedStep(step, updated, digests)


def _logprobs(host: ModelHost, rollouts: list[Rollout]) -> PolicyLogprobs:
    logprobs: PolicyLogprobs = concatenate([record for rows in rollouts if (record := logprob(host, rows)) is not None])
    return logprobs


def _values(host: ModelHost, rollouts: list[Rollout]) -> Values:
    every: Values = concatenate([record for rows in rollouts if (record := value(host, rows)) is not None])
    return every

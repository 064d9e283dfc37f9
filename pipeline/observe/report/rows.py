"""The stored rows of a step as a report needs them: what each stage has made of them, as far as it is there.

May import numpy, storage and pipeline.observe.history.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.observe.history import History
from storage.address import Address
from storage.errors import StoreError
from storage.records import Rollout, Scores


@dataclass(frozen=True)
class StepRows:
    """Rows of a step; None for what a stage has not made, or does not make in this run."""

    step: int
    rollout: Rollout
    scores: Scores | None
    ref_logprobs: np.ndarray | None
    policy_logprobs: np.ndarray | None
    values: np.ndarray | None
    advantages: np.ndarray | None

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """log pi - log pi_ref by token, rows × seq; zero where nothing was sampled. pi is the trainer's policy at the
        step's start or, where its log-probs are not recomputed, what was sampled from."""
        if self.ref_logprobs is None:
            return None
        ours = self.rollout.sampler_logprobs if self.policy_logprobs is None else self.policy_logprobs
        return np.where(self.rollout.response_mask, ours - self.ref_logprobs, 0.0)

    @cached_property
    def kl(self) -> np.ndarray | None:
        """To the reference by row, nats per response: the sum of the log-ratio over its tokens."""
        return None if self.log_ratio is None else self.log_ratio.sum(axis=1, dtype=np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """log pi_trainer - log mu_sampler by token, rows × seq; zero where nothing was sampled."""
        if self.policy_logprobs is None:
            return None
        return np.where(self.rollout.response_mask, self.policy_logprobs - self.rollout.sampler_logprobs, 0.0)


def stored_steps(history: History) -> list[int]:
    """Steps of which all rows are sampled and kept, ascending."""
    found: dict[int, int] = {}
    for address in history.ledger.addresses("generate"):
        found[address.step] = found.get(address.step, 0) + 1
    before = history.store.dropped_before()
    return sorted(step for step, shards in found.items() if shards == history.spec.shards and step >= before)


def read_rows(history: History, step: int) -> StepRows:
    """Raises StoreError where the rollouts cannot be read; of other stages, what cannot be is None."""

    def read(stage: str, shards: int = history.spec.shards) -> Any:
        there = all(history.ledger.find(Address(stage, step, shard)) is not None for shard in range(shards))
        try:
            return history.store.read_step(stage, step, shards) if there else None
        except StoreError:
            return None

    rollout = history.store.read_step("generate", step, history.spec.shards)
    reference, policy, values, advantages = read("reference"), read("logprob"), read("value"), read("advantage", 1)
    return StepRows(
        step=step,
        rollout=rollout,
        scores=read("score"),
        ref_logprobs=None if reference is None else reference.ref_logprobs,
        policy_logprobs=None if policy is None else policy.policy_logprobs,
        values=None if values is None else values.values,
        advantages=None if advantages is None else advantages.advantages,
    )

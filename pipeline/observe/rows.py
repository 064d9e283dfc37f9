"""A run's rows with all that its stages have made of them: of a shard, of a whole step, of an evaluation.

Only what is committed is read, and each array is held to its CRC-32 (storage/rollouts.py): what a dead attempt left, or
commits too late, is never seen. May import numpy, storage and pipeline.observe.history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.observe.history import History
from storage.address import Address
from storage.errors import StoreError
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Scores, Values


@dataclass(frozen=True)
class StageRows:
    """Rows, and what each stage has made of them; None for what is not made yet, or not made in this run."""

    step: int
    shard: int
    """A whole step is shard 0."""
    rollout: Rollout
    scores: Scores | None = None
    reference: ReferenceLogprobs | None = None
    policy: PolicyLogprobs | None = None
    values: Values | None = None
    advantages: Advantages | None = None

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """log pi - log pi_ref by token, float32 [rows seq]; zero where nothing was sampled. pi is the trainer's policy
        at the step's start or, where its log-probs are not recomputed, what was sampled from."""
        if self.reference is None:
            return None
        ours = self.rollout.sampler_logprobs if self.policy is None else self.policy.policy_logprobs
        return np.where(self.rollout.response_mask, ours - self.reference.ref_logprobs, 0.0)

    @cached_property
    def kl(self) -> np.ndarray | None:
        """To the reference by row, nats per response: the sum of the log-ratio over its tokens, float64 [rows]."""
        return None if self.log_ratio is None else self.log_ratio.sum(axis=1, dtype=np.float64)

    @cached_property
    def mismatch(self) -> np.ndarray | None:
        """log pi_trainer - log mu_sampler by token, float32 [rows seq]; zero where nothing was sampled."""
        if self.policy is None:
            return None
        difference = self.policy.policy_logprobs - self.rollout.sampler_logprobs
        return np.where(self.rollout.response_mask, difference, 0.0)

    def array(self, name: str) -> np.ndarray | None:
        """A field of the records (of scores apart) by its name; None where it is not made."""
        for record in (self.rollout, self.reference, self.policy, self.values, self.advantages):
            if record is not None and name in record.arrays():
                return np.asarray(record.arrays()[name])
        return None


def no_rows() -> StageRows:
    """None at all: tables of it have their columns."""
    none, ints, floats = np.zeros((0, 1), bool), np.zeros((0, 1), np.int32), np.zeros((0, 1), np.float32)
    number, whole = np.zeros(0, np.int32), np.zeros(0, np.int64)
    rollout = Rollout(
        row=whole,
        prompt_index=whole,
        tokens=ints,
        prompt_lengths=number,
        response_lengths=number,
        response_mask=none,
        sampler_logprobs=floats,
        token_versions=ints,
        finish_reason=np.zeros(0, np.int8),
    )
    return StageRows(0, 0, rollout)


def stored_steps(history: History, *, whole: bool = False) -> list[int]:
    """Steps of which rows are committed and were not let go (`storage.keep.rollouts`), ascending; `whole`: those of
    which all rows are."""
    addresses = history.ledger.addresses("generate", history.store.dropped_before())
    shards = Counter(address.step for address in addresses)
    return sorted(step for step, number in shards.items() if not whole or number == history.spec.shards)


def whole_step(history: History, step: int) -> StageRows:
    """All rows of a step. Raises StoreError where the rollouts cannot be read; of other stages, what cannot be is
    None."""

    def read(stage: str, shards: int = history.spec.shards) -> Any:
        there = all(history.ledger.find(Address(stage, step, shard)) is not None for shard in range(shards))
        try:
            return history.store.read_step(stage, step, shards) if there else None
        except StoreError:
            return None

    rollout = history.store.read_step("generate", step, history.spec.shards)
    scores, reference = read("score"), read("reference")
    return StageRows(step, 0, rollout, scores, reference, read("logprob"), read("value"), read("advantage", 1))


def shards_of_step(history: History, step: int) -> Iterator[StageRows]:
    """The shards of a step that have been generated. Raises StoreError where a committed array is not what was
    committed, DroppedOutput where it was let go."""
    advantages = _read(history, "advantage", step)
    for shard in range(history.spec.shards):
        rollout = _read(history, "generate", step, shard)
        if rollout is not None:
            yield StageRows(
                step,
                shard,
                rollout,
                _read(history, "score", step, shard),
                _read(history, "reference", step, shard),
                _read(history, "logprob", step, shard),
                _read(history, "value", step, shard),
                None if advantages is None else advantages.rows(rollout.row),
            )


def shards_of_evaluation(history: History, version: int) -> Iterator[StageRows]:
    """Those of the held-out rows that a version of the weights sampled."""
    for shard in range(history.spec.eval_shards):
        rollout = _read(history, "evaluate", version, shard)
        if rollout is not None:
            scores = _read(history, "evaluate_score", version, shard)
            yield StageRows(version, shard, rollout, scores, _read(history, "evaluate_reference", version, shard))


def _read(history: History, stage: str, step: int, shard: int = 0) -> Any:
    """An output, or None where nothing is committed yet."""
    address = Address(stage, step, shard)
    return None if history.ledger.find(address) is None else history.store.read(address)

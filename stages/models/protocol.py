"""What the stages ask of the trained models, whatever framework holds them; implemented by `stages/models/host.py`.

A *gang* is the set of processes (ranks) that hold one parallel group. Every rank of a gang makes the same calls in the
same order; arguments are whole (all rows), each rank works on its share, and the answer is complete on rank 0 and None
on the others.

May import numpy, jaxtyping, the standard library and storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from storage.checkpoints import FileSum
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values


class Role(StrEnum):
    """Who a model is in PPO. GENERATE, SCORE and ADVANTAGE are roles of placement only: the host has the other
    three."""

    GENERATE = "generate"
    SCORE = "score"
    REFERENCE = "reference"
    POLICY = "policy"
    CRITIC = "critic"
    ADVANTAGE = "advantage"


MODEL_ROLES = frozenset({Role.REFERENCE, Role.POLICY, Role.CRITIC})
"""Roles whose models the ranks of a gang hold together: every rank runs their nodes, in one order."""


ALONE = "alone://"
"""Where the ranks of a gang of one meet: nowhere."""


@dataclass(frozen=True)
class Rank:
    """This process's place in its gang. `rendezvous` is where its ranks meet, a new one each time the gang is built:
    `tcp://HOST:PORT` of rank 0, `ALONE`, or any other init method of torch.distributed."""

    index: int
    size: int
    rendezvous: str
    threads: int
    device: int = 0
    """Of those GPUs that this process sees: its own. Not read where there are none."""
    collective_timeout_s: float = 600.0
    """After which a collective that other ranks do not come to is an error (`RanksMissing`)."""
    listening: int | None = None
    """Rank 0's under `tcp://`: the descriptor of the socket that listens there, which it takes over."""


@dataclass(frozen=True)
class PolicyBatch:
    """All rows of a step, as `update_policy` trains on them."""

    rollout: Rollout
    advantages: Advantages
    policy: PolicyLogprobs | None
    """None under `ppo.proximal: loglinear | sampler`."""
    reference: ReferenceLogprobs
    kl_coef: float
    """Used where `ppo.kl.where` is `loss`."""


@dataclass(frozen=True)
class CriticBatch:
    """All rows of a step, as `update_critic` trains on them."""

    rollout: Rollout
    advantages: Advantages
    values: Values


class ModelHost(Protocol):
    """Owns this rank's models. The resident policy and critic each have a version (what v updates have made) and a
    `dirty` flag: set from the first optimizer step of an update until `mark_clean`; on a dirty model everything but
    `load` raises."""

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        """Around calls that all ranks make: says what they belong to. Raises RanksMissing, naming it and the ranks, for
        a collective that not every rank came to."""
        ...

    def numerics(self) -> dict[str, str]:
        """What computes here, of several that differ in the last bits: kernels and products by name."""
        ...

    def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs | None: ...

    def ref_logprobs(self, rollout: Rollout) -> ReferenceLogprobs | None: ...

    def values(self, rollout: Rollout) -> Values | None: ...

    def update_policy(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        """Trains version `step` into `step + 1` and leaves the model dirty: the caller commits, then `mark_clean`s.
        Deterministic: same weights, same batch, same layout, same bits (CPU). Raises StateError on another version, and
        NonFiniteGradientsError after `ppo.max_skipped_steps` optimizer steps in a row without a finite gradient."""
        ...

    def update_critic(self, step: int, batch: CriticBatch) -> dict[str, float]: ...

    def last_update(self, role: Role) -> dict[str, float]:
        """How fast the role's last update was: tokens_per_s, tflops_per_s, peak_tflops, mfu. Empty where it has trained
        on nothing."""
        ...

    def trunk_counts(self) -> dict[str, float]:
        """Since the last call, on this rank: rows that the frozen blocks were asked for (`trunk/rows`) and those that
        had to be computed (`trunk/computed_rows`). Empty without frozen blocks."""
        ...

    def version(self, role: Role) -> int: ...

    def dirty(self, role: Role) -> bool: ...

    def mark_clean(self, role: Role) -> None: ...

    def digest(self, role: Role) -> str:
        """Hex digest of the role's trained weights, the same whatever the layout; on every rank."""
        ...

    def save(self, role: Role, directory: Path) -> Callable[[], Mapping[str, FileSum] | None]:
        """Takes a copy of weights, optimizer and version. The function returned writes it into the directory, which
        exists and is empty: every rank calls it, with the calls of one host one after another and in the order of the
        copies, in any thread and whatever else the ranks do meanwhile, but before the role is saved again. On rank 0
        it gives the sums of all files once every rank has written, on others None."""
        ...

    def load(self, role: Role, directory: Path | None) -> None:
        """From `save`'s directory, bit for bit, in whatever layout that was written; or, with None, back to version 0
        as built from the config and the run's seed. Raises StateError, on every rank, for another model's checkpoint;
        the role is then dirty, or as it was."""
        ...

    def trained_weights(self) -> Mapping[str, np.ndarray] | None:
        """The policy's trained tensors (those that `frozen_blocks` does not freeze; with LoRA those that have adapters,
        merged) by Hugging Face name, float32 (or
        the model's dtype as its bit pattern: see storage.weights); views where possible, valid until the next
        update (of a gang whose idle roles leave the device: until the next call)."""
        ...

    def export(self, directory: Path) -> Callable[[], None]:
        """Takes a copy of the policy. The function returned writes the whole of it in Hugging Face layout, on rank 0,
        in any thread: it loads with AutoModelForCausalLM.from_pretrained. With LoRA its adapters, for peft, lie in a
        directory `adapter` inside."""
        ...

    def rest(self) -> None:
        """Leaves the devices to others: models and optimizers move to the host's memory, where that is another one, and
        gradient buffers are given up, until a role is needed again. Nothing if it rests already."""
        ...

    def close(self) -> None: ...

"""The protocol between the stages and the trained models, independent of the framework that holds the models.
`stages/models/host.py` implements it. The errors are at the end. At run time this module imports only the standard
library.

A *gang* is the set of processes (ranks) that hold one parallel group. Every rank of a gang makes the same calls in the
same order. Every rank gets all rows as arguments and works on its share. Results per row (log-probs, values) are
complete on rank 0 and None on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # everything that reads a config imports `Role`, and importing the records takes half a second
    from storage.checkpoints import FileSum
    from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values
    from storage.weights import Manifest, WeightBoard


class Role(StrEnum):
    """A role in PPO. The config's `placement` says which gang serves it. A model host has models for REFERENCE, POLICY
    and CRITIC only."""

    GENERATE = "generate"
    SCORE = "score"
    REFERENCE = "reference"
    POLICY = "policy"
    CRITIC = "critic"
    ADVANTAGE = "advantage"


MODEL_ROLES = frozenset({Role.REFERENCE, Role.POLICY, Role.CRITIC})
"""Roles whose models are divided over the ranks of a gang. Every rank runs the nodes of these roles, in the same
order."""


ALONE = "alone://"
"""Value of `Rank.rendezvous` in a gang of one rank, which does not connect to other processes."""


@dataclass(frozen=True)
class Rank:
    """This process's rank in its gang. The ranks connect at `rendezvous`: `tcp://ADDRESS:PORT` of rank 0, `ALONE`, or
    any other init method of torch.distributed. Each time the gang is built it gets a new rendezvous."""

    index: int
    size: int
    rendezvous: str
    threads: int
    device: int = 0
    """Index of this process's GPU among the GPUs it sees. Not read without GPUs."""
    collective_timeout_s: float = 600.0
    """Maximum number of seconds that a collective waits for ranks that have not joined it. Then the collective raises
    an error (see `RanksMissing`)."""
    listening: int | None = None
    """On rank 0 under `tcp://`: file descriptor of the socket that listens at `rendezvous`. Rank 0 serves the gang's
    store on it. None on the other ranks and under other schemes."""


@dataclass(frozen=True)
class PolicyBatch:
    """All rows of a step, the input of `update_policy`."""

    rollout: Rollout
    advantages: Advantages
    policy: PolicyLogprobs | None
    """Log-probs of the proximal policy, from the stage `logprob`. None under `ppo.proximal: loglinear | sampler`, where
    this stage does not run."""
    reference: ReferenceLogprobs
    kl_coef: float
    """Coefficient of the KL penalty in the loss. Read only if `ppo.kl.where` is `loss`."""


@dataclass(frozen=True)
class CriticBatch:
    """All rows of a step, the input of `update_critic`."""

    rollout: Rollout
    advantages: Advantages
    values: Values


class ModelHost(Protocol):
    """Owns this rank's models. The policy and the critic in its memory (the *resident* models) each have a version (the
    number of updates made) and a `dirty` flag. An update or a failed `load` may set the flag; `mark_clean` or a
    successful `load` clears it. Calls that run, train, save, publish or export a dirty model raise StateError."""

    def collectives_of(self, where: str) -> AbstractContextManager[None]:
        """Return a context for calls that every rank must make. `where` names the graph node of these calls, for
        messages. The context raises RanksMissing if some ranks do not join a collective."""
        ...

    def numerics(self) -> dict[str, str]:
        """Return config key -> name of the implementation in use, for transformer blocks (`model.kernels`) and matrix
        products (`model.products`). The implementations decide the last bits of results."""
        ...

    def policy_logprobs(self, rollout: Rollout) -> PolicyLogprobs | None: ...

    def ref_logprobs(self, rollout: Rollout) -> ReferenceLogprobs | None: ...

    def values(self, rollout: Rollout) -> Values | None: ...

    def update_policy(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        """Train version `step` into `step + 1` and return metrics. The model is dirty afterwards, until the caller has
        committed the update and calls `mark_clean`.

        On a CPU the same weights, batch and layout give the same bits; on CUDA they do under `model.deterministic`.
        Raises StateError if the resident version is not `step`. Raises NonFiniteGradientsError after 8 optimizer steps
        in a row without a finite gradient."""
        ...

    def update_critic(self, step: int, batch: CriticBatch) -> dict[str, float]: ...

    def last_update(self, role: Role) -> dict[str, float]:
        """Return the speed of the role's last update: tokens_per_s, tflops_per_s, peak_tflops, mfu. Empty before the
        first update, and after an update that trained on no rows."""
        ...

    def trunk_counts(self) -> dict[str, float]:
        """Return this rank's counts of rows since the last call. `trunk/rows`: rows for which outputs of the frozen
        blocks were requested. `trunk/computed_rows`: rows among these whose outputs were not in the cache. Empty
        without frozen blocks."""
        ...

    def version(self, role: Role) -> int: ...

    def dirty(self, role: Role) -> bool: ...

    def mark_clean(self, role: Role) -> None: ...

    def digest(self, role: Role) -> str:
        """Return a hex digest of the role's trained weights, on every rank. It does not depend on the layout."""
        ...

    def save(self, role: Role, directory: Path) -> Callable[[], Mapping[str, FileSum] | None]:
        """Copy weights, optimizer state and version, and return a function that writes the copy into the directory.

        The directory must exist and be empty. Every rank must call the function before the role is saved again. A rank
        may call the function in any thread, also while it makes other calls. The functions of one host must be called
        one at a time, in the order of the copies. When every rank has written, the function returns the checksums of
        all files on rank 0, None on the others."""
        ...

    def load(self, role: Role, directory: Path | None) -> None:
        """Restore a checkpoint that `save` wrote in any layout, bit for bit. If `directory` is None, go back to version
        0, built from the config and the run's seed.

        Raises StateError on every rank if the checkpoint is of another model or damaged. The role then either has its
        old state, or it is dirty. A dirty role cannot be used until a `load` succeeds.
        """
        ...

    def publish(self, board: WeightBoard, version: int) -> Manifest | None:
        """Write the policy's trained tensors to a board, by Hugging Face name and in the model's dtype. Without LoRA
        these are all tensors that `frozen_blocks` does not freeze. With LoRA they are the tensors that have adapters,
        with the adapters merged.

        Return the manifest on rank 0, None on the others. Errors are raised on rank 0 only. ValueError means that the
        version exists with other bits. StoreRefused means that the board's memory is full. An error of the board on
        another rank is raised on rank 0 too."""
        ...

    def export(self, board: WeightBoard, directory: Path) -> Callable[[], None]:
        """Return a function that writes the policy to `directory` in Hugging Face layout. It writes the version that is
        resident now, and reads the weights from the board. If the board does not have this version, the call publishes
        it first. The version stays on the board until the function has run.

        The function may be called in any thread. It writes on rank 0 and does nothing on other ranks.
        AutoModelForCausalLM.from_pretrained loads the directory. With LoRA its subdirectory `adapter` has the adapters
        in peft's format.
        """
        ...

    def sleep(self) -> None:
        """Free the devices for other processes until a role is needed again. The call frees gradient buffers and, on a
        GPU, moves models and optimizers to the host's memory. A second call does nothing."""
        ...

    def close(self) -> None: ...


class StateError(RuntimeError):
    """An error for a model, a checkpoint or a process whose state does not allow the call:

    - The model has another version than the call needs.
    - The model's weights were changed, but the change was not committed.
    - The model is not placed on this gang.
    - A checkpoint does not fit the model or cannot be read.
    - A process that is already in a gang joins one.

    In the first three cases the message names the role. For a checkpoint it names the files.
    """


class NonFiniteGradientsError(RuntimeError):
    """An error for too many optimizer steps in a row without a finite gradient. The message names the step, the
    minibatch, its rows, and the losses and gradients that were not finite."""


class RanksMissing(RuntimeError):
    """An error for ranks that did not join a collective in time, or have ended. Earlier results are right, but the gang
    must be rebuilt."""

    def __init__(self, where: str, ranks: tuple[int, ...], detail: str) -> None:
        super().__init__(where, ranks, detail)
        self.where = where
        """Name of the node that the collective belonged to."""
        self.ranks = ranks
        """The missing ranks, ascending."""
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}"

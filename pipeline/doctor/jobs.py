"""The jobs of the doctor's computing tests, and their results. Both are records that processes send to each other as
JSON.

A job contains everything that its numbers depend on, so equal jobs have equal results. `rank.py` and `generate.py` run
jobs, `training.py` and `engines.py` compare the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stages.models.config import LayoutConfig, ModelConfig
from stages.models.memory import GangModels, MicroBatchSize, RowsSize, rank_bytes, state_bytes
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import read_spec
from storage.records import Advantages, Rollout

Dtype = Literal["float32", "bfloat16"]
LONG, SHORT = (48, 288), (8, 24)
"""(Maximum number of prompt tokens, maximum number of response tokens) of long rows and of short rows. Long rows exceed
256 tokens, where kernels begin to split a context."""
NUM_LONG, NUM_SHORT = 10, 4
"""Number of long rows and of short rows in a batch. All rows fit into one micro-batch
(`OptimizerConfig.micro_batch_tokens`)."""
SEED = 0


@dataclass(frozen=True)
class RankJob:
    """An update of policy and critic by the ranks of one gang."""

    model: str
    dtype: Dtype
    kernels: Literal["auto", "torch"] = "auto"
    size: int = 1
    tensor: int = 1
    pipeline: int = 1
    threads: int = 1
    device: int = 0
    """GPU of rank 0. The other ranks have the GPUs that follow it. Ignored on a CPU."""
    publish: bool = False
    """True if the trained weights are to be published to shared memory and read back."""
    on_gpu: bool = False


@dataclass(frozen=True)
class Published:
    """The result of publishing weights to shared memory."""

    num_bytes: int
    seconds: float
    sound: bool
    """True if the bytes that were read back have the checksums of the manifest."""


@dataclass(frozen=True)
class RankResult:
    """The results of a job, as computed by rank 0."""

    device: str
    logprobs: list[float]
    """Log-probs of the sampled tokens before the update, in nats."""
    after: list[float]
    """Log-probs of the same tokens after the update."""
    losses: dict[str, float]
    digests: list[str]
    """Two digests of the policy: after the update, and after the repeated update."""
    seconds: float
    """Duration in seconds of one step: forward passes, and updates of policy and critic. The job computes the step
    twice from the same weights, and measures the second computation."""
    state_bytes: int
    """Measured bytes of parameters, gradients, master weights and optimizer moments."""
    peak_bytes: int
    """Peak memory during the update, in bytes. On a GPU, torch counts it. On a CPU it is estimated: the bytes of the
    models' state, plus the growth of the process's memory between two updates. The first update has only short rows,
    and the second has long and short rows."""
    published: Published | None


@dataclass(frozen=True)
class EngineJob:
    """A job for an engine: generate rows before and after new weights are loaded."""

    model: str
    kind: Literal["embedded", "vllm", "tensorrt_llm"]
    dtype: Dtype
    kernels: Literal["auto", "torch"] = "auto"
    python: str | None = None
    threads: int = 1
    device: str | None = None
    """Torch device of the engine. If None, the engine chooses."""
    log: str | None = None
    """File for the output of an engine in its own environment."""


@dataclass(frozen=True)
class GeneratedRow:
    """One row that an engine generated for a test: the sampled tokens, and the log-prob of each in nats."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class EngineResult:
    """The rows that an engine generated, in the order of the requests, and its speed."""

    device: str
    draws: str
    """Repeatability of the tokens that the engine draws: keyed, seeded or free (never repeated). The meanings are those
    of `Capabilities.draws`."""
    start_s: float
    tokens_per_s: float
    refit_s: float
    refit_bytes: int
    slept: bool
    first: list[GeneratedRow]
    alone: list[GeneratedRow]
    """The first two rows again, each generated alone in the engine."""
    changed: list[GeneratedRow]
    """The rows under changed weights."""
    again: list[GeneratedRow]
    """The rows that the engine generated last, after it had loaded other weights and then the original weights again.
    So these rows should equal `first`."""


def random_batch(vocabulary: int, num_long: int, num_short: int) -> tuple[Rollout, Advantages]:
    """Return a rollout of random tokens, and random advantages for it. Both are the same on every machine."""
    rng = np.random.default_rng(SEED)
    rows = num_long + num_short
    prompt = np.concatenate(
        [rng.integers(most // 2, most + 1, n) for most, n in ((LONG[0], num_long), (SHORT[0], num_short))]
    )
    response = np.concatenate([np.full(num_long, LONG[1]), rng.integers(1, SHORT[1] + 1, num_short)])
    prompt, response = prompt.astype(np.int32), response.astype(np.int32)
    index = np.arange(int((prompt + response).max()))
    mask = (index >= prompt[:, None]) & (index < (prompt + response)[:, None])
    rollout = Rollout(
        row=np.arange(rows),
        prompt_index=np.arange(rows),
        tokens=rng.integers(3, vocabulary, mask.shape).astype(np.int32),
        prompt_lengths=prompt,
        response_lengths=response,
        response_mask=mask,
        sampler_logprobs=np.zeros(mask.shape, np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.zeros(rows, np.int8),
    )
    noise = [np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(3)]
    return rollout, Advantages(noise[0], noise[1], noise[2], mask)


def predicted_state_bytes(job: RankJob) -> int:
    """Return the predicted memory of the first rank for parameters, gradients, master weights and optimizer moments, in
    bytes."""
    return sum(state_bytes(_models(job), 0).values())


def predicted_peak_bytes(job: RankJob) -> int:
    """Return the predicted peak memory of the first rank in bytes, while it computes the batch in one micro-batch."""
    rollout, _ = random_batch(read_spec(job.model).vocab_size, NUM_LONG, NUM_SHORT)
    sampled = int(rollout.response_lengths.sum())
    size = MicroBatchSize(int(rollout.prompt_lengths.sum()) + sampled, sampled, rollout.tokens.shape[1])
    rows = RowsSize(rollout.tokens.shape[1], rollout.num_rows, rollout.num_rows)
    batches = {Role.POLICY: size, Role.CRITIC: size}
    return sum(rank_bytes(_models(job), batches, 0, rows=rows, device="cuda" if job.on_gpu else "cpu").values())


def _models(job: RankJob) -> GangModels:
    return GangModels(
        read_spec(job.model),
        ModelConfig(path=job.model, dtype=job.dtype),
        LayoutConfig(tensor=job.tensor, pipeline=job.pipeline),
        MODEL_ROLES,
        data_ranks=job.size // (job.tensor * job.pipeline),
        portable=job.on_gpu,
        on_gpu=job.on_gpu,
    )

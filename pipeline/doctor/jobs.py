"""The tasks of the rungs that compute, and their results: records that cross to other processes as JSON.

A task names everything that its numbers depend on, so equal tasks have one result. `rank.py` and `generate.py`
measure, `training.py` and `engines.py` compare.
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
"""Most tokens of a prompt and of a response. The long rows pass 256 tokens, where kernels begin to split a context."""
NUM_LONG, NUM_SHORT = 10, 4
"""Rows of the batch. All of them fit into one micro-batch (`OptimizerConfig.micro_batch_tokens`)."""
SEED = 0


@dataclass(frozen=True)
class RankJob:
    """An update that the ranks of a gang compute."""

    model: str
    dtype: Dtype
    kernels: Literal["auto", "torch"] = "auto"
    size: int = 1
    tensor: int = 1
    pipeline: int = 1
    threads: int = 1
    device: int = 0
    """GPU of rank 0; the other ranks have the next ones. Not read on a CPU."""
    publish: bool = False
    """Publish the trained weights to a board in shared memory."""
    on_gpu: bool = False


@dataclass(frozen=True)
class Published:
    """A publication to a board."""

    num_bytes: int
    seconds: float
    sound: bool
    """True if the bytes that were read back have the manifest's sums."""


@dataclass(frozen=True)
class RankResult:
    """The numbers of a test, from rank 0."""

    device: str
    logprobs: list[float]
    """Log-probs of the sampled tokens, in nats."""
    after: list[float]
    """Log-probs of the same tokens after the update."""
    losses: dict[str, float]
    digests: list[str]
    """Digest of the policy after the update and after its repetition."""
    seconds: float
    """Seconds of the repeated updates of policy and critic."""
    state_bytes: int
    """Measured bytes of parameters, gradients, masters and moments."""
    peak_bytes: int
    """Most bytes in use during the update. On a GPU torch counts them. On a CPU they are the state plus the growth of
    the process from an update of short rows to one of long rows."""
    published: Published | None


@dataclass(frozen=True)
class EngineJob:
    """Rows that an engine generates, before and after new weights."""

    model: str
    kind: Literal["embedded", "vllm", "tensorrt_llm"]
    dtype: Dtype
    kernels: Literal["auto", "torch"] = "auto"
    python: str | None = None
    threads: int = 1
    device: str | None = None
    """Device of torch; None: the engine chooses."""
    log: str | None = None
    """File of the output of an engine in an environment of its own."""


@dataclass(frozen=True)
class Drawn:
    """A generated row."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class EngineResult:
    """The rows of an engine, in the order of the requests, and its speed."""

    device: str
    draws: str
    """The engine's `Capabilities.draws`."""
    start_s: float
    tokens_per_s: float
    refit_s: float
    refit_bytes: int
    slept: bool
    first: list[Drawn]
    alone: list[Drawn]
    """The first two rows again, each generated alone."""
    changed: list[Drawn]
    """The rows under other weights."""
    again: list[Drawn]
    """The rows under the first weights, loaded again."""


def batch(vocabulary: int, num_long: int, num_short: int) -> tuple[Rollout, Advantages]:
    """Return rows of random tokens with random advantages, the same on every machine."""
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


def predicted_state(job: RankJob) -> int:
    """Return the predicted bytes of parameters, gradients, masters and moments of the first rank."""
    return sum(state_bytes(_models(job), 0).values())


def predicted_peak(job: RankJob) -> int:
    """Return the predicted bytes of the first rank while it computes the batch in one micro-batch."""
    rollout, _ = batch(read_spec(job.model).vocab_size, NUM_LONG, NUM_SHORT)
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

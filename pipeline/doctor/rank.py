"""One rank of a training test, as a process of its own: `python -m pipeline.doctor.rank JOB INDEX RENDEZVOUS RESULT`.

It builds the models that a run would build, computes log-probs and values, updates policy and critic, goes back to the
start, and does the same again. Rank 0 writes the numbers to the file RESULT.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.memory import GangModels, state_bytes
from stages.models.protocol import MODEL_ROLES, CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import read_spec
from stages.ppo.config import PPOConfig
from stages.publish import publish
from storage.codec import decode, encode
from storage.errors import DamagedWeights
from storage.records import Advantages, Rollout
from storage.weights import WeightBoard

ROWS, PROMPT, RESPONSE = 8, 8, 24
"""Rows of the test's batch, and the most tokens of a prompt and of a response."""
SEED = 0
LEARNING_RATE = 2e-5
"""Large enough for an update to change log-probs, small enough for rounding to stay rounding under Adam."""


@dataclass(frozen=True)
class RankJob:
    """Model, layout and options of a test that several ranks compute."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    kernels: Literal["auto", "torch"]
    size: int
    tensor: int
    pipeline: int
    threads: int
    publish: bool
    """Publish the trained weights to a board in shared memory."""
    on_cpu: bool
    """Hide the GPUs."""


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
    """The same after the update."""
    losses: dict[str, float]
    digests: list[str]
    """Digest of the policy after the update and after its repetition."""
    seconds: float
    """Seconds of the repeated updates of policy and critic."""
    state_bytes: int
    """Measured bytes of parameters, gradients, masters and moments."""
    predicted_bytes: int
    peak_bytes: int
    """Peak of the GPU's memory; on a CPU of the process."""
    published: Published | None


def batch(vocabulary: int) -> tuple[Rollout, Advantages]:
    """Return rows of random tokens with random advantages, the same on every machine."""
    rng = np.random.default_rng(SEED)
    prompt = rng.integers(2, PROMPT + 1, ROWS).astype(np.int32)
    response = rng.integers(1, RESPONSE + 1, ROWS).astype(np.int32)
    index = np.arange(PROMPT + RESPONSE)
    mask = (index >= prompt[:, None]) & (index < (prompt + response)[:, None])
    rollout = Rollout(
        row=np.arange(ROWS),
        prompt_index=np.arange(ROWS),
        tokens=rng.integers(3, vocabulary, mask.shape).astype(np.int32),
        prompt_lengths=prompt,
        response_lengths=response,
        response_mask=mask,
        sampler_logprobs=np.zeros(mask.shape, np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.zeros(ROWS, np.int8),
    )
    noise = [np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(3)]
    return rollout, Advantages(noise[0], noise[1], noise[2], mask)


def run(job: RankJob, index: int, rendezvous: str) -> RankResult | None:
    """Compute a job's part of rank `index`. Return the numbers on the rank that has them: rank 0."""
    with opened(job, index, rendezvous) as host:
        rollout, advantages = batch(read_spec(job.model).vocab_size)
        first, digest, losses = _step(host, rollout, advantages)
        logprobs = host.policy_logprobs(rollout)
        for role in (Role.POLICY, Role.CRITIC):
            host.load(role, None)
        began = time.perf_counter()
        _, again, _ = _step(host, rollout, advantages)
        seconds = time.perf_counter() - began
        measured = sum(host.state_bytes().values())
        published = _publish(host) if job.publish else None
        if index:
            return None
        assert logprobs is not None
        return RankResult(
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU",
            logprobs=first[rollout.response_mask].tolist(),
            after=logprobs.policy_logprobs[rollout.response_mask].tolist(),
            losses=losses,
            digests=[digest, again],
            seconds=seconds,
            state_bytes=measured,
            predicted_bytes=predicted_bytes(job),
            peak_bytes=_peak_bytes(),
            published=published,
        )


@contextmanager
def opened(job: RankJob, index: int, rendezvous: str) -> Iterator[MegatronHost]:
    """Own the models of a job's rank."""
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    host = MegatronHost(
        ModelConfig(path=job.model, dtype=job.dtype, kernels=job.kernels, policy=optimizer, critic=optimizer),
        SamplingConfig(),
        PPOConfig(),
        LayoutConfig(tensor=job.tensor, pipeline=job.pipeline),
        MODEL_ROLES,
        Rank(index, job.size, rendezvous, job.threads, device=index, collective_timeout_s=120.0),
        seed=SEED,
        total_steps=10,
        fsync=False,
    )
    try:
        yield host
    finally:
        host.close()


def _step(host: MegatronHost, rollout: Rollout, advantages: Advantages) -> tuple[np.ndarray, str, dict[str, float]]:
    """Run a step's forward passes and updates. Return the log-probs before it, the policy's digest after it, and the
    losses."""
    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    policy, reference, values = _from_rank_0(policy, reference, values)
    rollout = replace(rollout, sampler_logprobs=policy.policy_logprobs)
    metrics = host.update_policy(0, PolicyBatch(rollout, advantages, policy, reference, 0.1))
    metrics |= host.update_critic(0, CriticBatch(rollout, advantages, values))
    digest = host.digest(Role.POLICY)
    for role in (Role.POLICY, Role.CRITIC):
        host.mark_clean(role)
    losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
    return policy.policy_logprobs, digest, losses


def _from_rank_0(*items: Any) -> tuple[Any, ...]:
    """Return rank 0's items on every rank."""
    box = [items]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(box)
    return box[0]


def _publish(host: MegatronHost) -> Published | None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="stageline-doctor-") as folder,
        WeightBoard(folder) as board,
    ):
        began = time.perf_counter()
        manifest = publish(host, board, 1)
        seconds = time.perf_counter() - began
        if manifest is None:
            return None
        with board.open(1) as lease:
            try:
                lease.verify()
                sound = True
            except DamagedWeights:
                sound = False
        return Published(manifest.num_bytes, seconds, sound)


def predicted_bytes(job: RankJob) -> int:
    """Return the predicted bytes of parameters, gradients, masters and moments of the first rank."""
    gang = GangModels(
        read_spec(job.model),
        ModelConfig(path=job.model, dtype=job.dtype),
        LayoutConfig(tensor=job.tensor, pipeline=job.pipeline),
        MODEL_ROLES,
        data_ranks=job.size // (job.tensor * job.pipeline),
    )
    return sum(state_bytes(gang, 0).values())


def _peak_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    job, index, rendezvous, result = sys.argv[1:]
    found = run(decode(RankJob, job), int(index), rendezvous)
    if found is not None:
        Path(result).write_text(encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

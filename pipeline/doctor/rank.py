"""Run one rank of the training tests, in a process of its own: `python -m pipeline.doctor.rank JOBS INDEX FOLDER
RESULT`.

For each job the rank builds the models that a run would build, computes log-probs and values, and updates policy and
critic. Then it restores the original models and does the same again. Rank 0 writes the results of all jobs to the file
RESULT.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from pipeline.doctor.jobs import NUM_LONG, NUM_SHORT, SEED, Published, RankJob, RankResult, random_batch
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.numerics import peak_bytes
from stages.models.protocol import ALONE, MODEL_ROLES, CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import read_spec
from stages.ppo.config import PPOConfig
from stages.publish import publish
from storage.codec import decode, encode
from storage.errors import DamagedWeights
from storage.host import end_with_parent
from storage.records import Advantages, Rollout
from storage.weights import WeightBoard

LEARNING_RATE = 1e-4
"""Learning rate of the tests. It is large enough to change weights in bfloat16, and small enough to keep rounding
errors small under Adam."""


def run(job: RankJob, index: int, rendezvous: str) -> RankResult | None:
    """Run a job as rank `index`. Return the results on rank 0, and None on the other ranks. `rendezvous`: URL at which
    the ranks find each other; `ALONE` if there is only one rank."""
    with open_models(job, index, rendezvous) as host:
        vocabulary = read_spec(job.model).vocab_size
        _step(
            host, *random_batch(vocabulary, 0, NUM_SHORT)
        )  # warm-up: libraries load kernels, Adam creates its moments
        _reload_start_weights(host)
        rollout, advantages = random_batch(vocabulary, NUM_LONG, NUM_SHORT)
        before, of_process = sum(host.state_bytes().values()), _reset_peak()
        first, digest, losses = _step(host, rollout, advantages)
        state, peak = sum(host.state_bytes().values()), _peak_since(before, of_process)
        logprobs = host.policy_logprobs(rollout)
        _reload_start_weights(host)
        began = time.perf_counter()
        _, again, _ = _step(host, rollout, advantages)
        seconds = time.perf_counter() - began
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
            state_bytes=state,
            peak_bytes=peak,
            published=published,
        )


@contextmanager
def open_models(job: RankJob, index: int, rendezvous: str) -> Iterator[MegatronHost]:
    """Build and yield the models of one rank of a job. The models are closed at the end of the `with` block."""
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    host = MegatronHost(
        ModelConfig(path=job.model, dtype=job.dtype, kernels=job.kernels, policy=optimizer, critic=optimizer),
        SamplingConfig(),
        PPOConfig(minibatches=1),
        LayoutConfig(tensor=job.tensor, pipeline=job.pipeline),
        MODEL_ROLES,
        Rank(index, job.size, rendezvous, job.threads, device=job.device + index, collective_timeout_s=120.0),
        seed=SEED,
        total_steps=10,
        fsync=False,
    )
    try:
        yield host
    finally:
        host.close()


def _reload_start_weights(host: MegatronHost) -> None:
    for role in (Role.POLICY, Role.CRITIC):
        host.load(role, None)


def _step(host: MegatronHost, rollout: Rollout, advantages: Advantages) -> tuple[np.ndarray, str, dict[str, float]]:
    """Run the forward passes and the updates of one step. Return the policy's log-probs before the updates, the
    policy's digest after the updates, and the losses."""
    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    policy, reference, values = _broadcast_from_rank_0(policy, reference, values)
    rollout = replace(rollout, sampler_logprobs=policy.policy_logprobs)
    metrics = host.update_policy(0, PolicyBatch(rollout, advantages, policy, reference, 0.1))
    metrics |= host.update_critic(0, CriticBatch(rollout, advantages, values))
    digest = host.digest(Role.POLICY)
    for role in (Role.POLICY, Role.CRITIC):
        host.mark_clean(role)
    losses = {name: value for name, value in metrics.items() if name.endswith("loss")}
    return policy.policy_logprobs, digest, losses


def _broadcast_from_rank_0(*items: Any) -> tuple[Any, ...]:
    """Broadcast objects from rank 0. Return rank 0's objects on every rank."""
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


def _reset_peak() -> int:
    """Start a measurement of peak memory. Return the memory of this process in bytes, after glibc has returned free
    memory to the system."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _peak_since(state: int, of_process: int) -> int:
    """Return the peak bytes since `_reset_peak` returned `of_process`. Most memory of a process belongs to libraries,
    so on a CPU the peak is the models' bytes (`state`) plus the growth of the process."""
    return peak_bytes() if torch.cuda.is_available() else state + max(0, peak_bytes() - of_process)


def main() -> int:
    end_with_parent()
    text, index, folder, result = sys.argv[1:]
    results = []
    jobs = decode(list[RankJob], text)
    for number, job in enumerate(jobs):
        print(f"update {number + 1} of {len(jobs)}: {job}", flush=True)
        rendezvous = ALONE if job.size == 1 else f"file://{folder}/rendezvous-{number}"
        results.append(run(job, int(index), rendezvous))
    if index == "0":
        Path(result).write_text(encode(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

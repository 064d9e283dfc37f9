"""Run one rank of a gang without its GPUs and without the other ranks, and return the memory and the collectives of
each phase of its work.

    trace_stage ──► MegatronHost on a fake device (`fake_gpu`) ──► a first update, log-probs, values, another
                                                                update, publication, checkpoints ──► TracedRank

The host and the models are the real ones; only the tensors have no numbers. The rows need the most memory that the
config allows: they fill every micro-batch (`worst_batch`). There are as many micro-batches as pipeline stages, and at
least two, so that the first stage has the most micro-batches in flight. The first update is small, since its only
purpose is to make the optimizer create its moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from stages.models import host as host_module
from stages.models import parallel
from stages.models.config import LayoutConfig, ModelConfig, Offload, SamplingConfig
from stages.models.fake_gpu import Collective, NoNumbers, Recorder, fake_device, recording, replaced
from stages.models.host import MegatronHost
from stages.models.memory import MicroBatchSize
from stages.models.numerics import ProductChoice, Products
from stages.models.parallel import ParallelRank
from stages.models.protocol import ALONE, CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import read_config, read_spec, tensor_shapes
from stages.ppo.config import PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values


@dataclass(frozen=True)
class TracedGang:
    """The settings that the ranks of a gang are built with."""

    model: ModelConfig
    sampling: SamplingConfig
    ppo: PPOConfig
    layout: LayoutConfig
    roles: frozenset[Role]
    num_ranks: int
    max_prompt_tokens: int
    offload: Offload = "none"

    @property
    def data_ranks(self) -> int:
        return self.num_ranks // (self.layout.tensor * self.layout.pipeline)

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of an update on each data-parallel rank."""
        return max(2, self.layout.pipeline)


@dataclass(frozen=True)
class TraceBatch:
    """Rows of one micro-batch, all of the same length."""

    rows: int
    length: int
    new: int
    """Number of sampled tokens of a row."""

    @property
    def size(self) -> MicroBatchSize:
        return MicroBatchSize(self.rows * self.length, self.rows * self.new, self.length)


@dataclass(frozen=True)
class TracedPhase:
    """One phase of a rank's work."""

    name: str
    peak: Mapping[str, int]
    """Place (see `fake_gpu`) -> maximum number of bytes in use at one time."""
    collectives: Sequence[Collective]
    """Collectives in the order of the calls."""


@dataclass(frozen=True)
class TracedRank:
    """The traced work of one rank: its memory and collectives in each phase, and its torch operations."""

    index: int
    stage: int
    phases: Sequence[TracedPhase]
    published_bytes: int
    """Bytes of the tensors that this rank writes, or writes a part of, when the policy is published. Each of these
    tensors counts with its whole size."""
    operations: Mapping[str, int]
    """Name of a torch operation -> number of its calls in all phases."""

    def peak(self, place: str) -> int:
        return max(phase.peak.get(place, 0) for phase in self.phases)


def trace_stage(gang: TracedGang, stage: int) -> TracedRank:
    """Run the work of the first rank of a pipeline stage on a fake GPU, without the other ranks. Return the memory,
    collectives and operations of this work. Call this in a process that belongs to no process group, and that uses no
    real accelerator before or after the call."""
    phases: list[TracedPhase] = []
    index = stage * gang.num_ranks // gang.layout.pipeline  # Megatron orders ranks by tensor, data, then pipeline
    numbers = NoNumbers()
    with recording(numbers) as recorder, _fake_gang(recorder):

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            recorder.usage.restart()
            first = len(recorder.collectives)
            yield
            phases.append(TracedPhase(name, dict(recorder.usage.peak), tuple(recorder.collectives[first:])))

        with phase("build"):
            host = MegatronHost(
                # these settings would need the numbers of a device, or only repeat the same calls
                replace(gang.model, kernels="portable", tf32=False, peak_tflops=1.0),
                gang.sampling,
                replace(gang.ppo, epochs=1, minibatches=1, critic_warmup_steps=0),
                gang.layout,
                gang.roles,
                Rank(index, gang.num_ranks, ALONE, threads=1),
                seed=0,
                total_steps=2,
                offload=gang.offload,
            )
        trained: list[Role] = [role for role in (Role.CRITIC, Role.POLICY) if role in gang.roles]
        for role in trained:  # the first update makes the optimizer's moments
            batch = TraceBatch(1, 2, 1)
            numbers.lists = _sent_shape(gang, role, batch)
            _update(host, role, 0, rows_of(batch, gang.data_ranks))
        for role, forward in (
            (Role.REFERENCE, host.ref_logprobs),
            (Role.POLICY, host.policy_logprobs),
            (Role.CRITIC, host.values),
        ):
            if role in gang.roles:
                numbers.lists = _sent_shape(gang, role, worst_batch(gang, role))
                with phase({Role.REFERENCE: "reference", Role.POLICY: "logprob", Role.CRITIC: "value"}[role]):
                    forward(rows_of(worst_batch(gang, role), gang.data_ranks))
        for role in trained:
            numbers.lists = _sent_shape(gang, role, worst_batch(gang, role))
            with phase(f"update_{role}"):
                _update(host, role, 1, rows_of(worst_batch(gang, role), gang.data_ranks * gang.num_batches))
        published = 0
        if Role.POLICY in gang.roles:
            with phase("publish"):
                slabs = {slab.name: slab for slab, _, _ in host.published_blocks()}
                published = sum(math.prod(slab.shape) * slab.dtype.itemsize for slab in slabs.values())
        for role in trained:
            with phase(f"checkpoint {role}"):
                host.save(role, Path())  # copies; the returned function, which writes, is not called
        host.close()
    return TracedRank(index, stage, phases, published, recorder.operations)


def _update(host: MegatronHost, role: Role, step: int, rollout: Rollout) -> None:
    zeros = np.zeros(rollout.tokens.shape, np.float32)
    advantages = Advantages(rewards=zeros, advantages=zeros, returns=zeros, loss_mask=rollout.response_mask)
    if role is Role.POLICY:
        known = PolicyLogprobs(zeros, zeros), ReferenceLogprobs(zeros)
        host.update_policy(step, PolicyBatch(rollout, advantages, *known, kl_coef=0.0))
    else:
        values = Values(zeros, np.zeros(rollout.num_rows, np.float32))
        host.update_critic(step, CriticBatch(rollout, advantages, values))
    host.mark_clean(role)


def worst_batch(gang: TracedGang, role: Role) -> TraceBatch:
    """Return the micro-batch that needs the most memory. Its rows have one prompt token and the longest response, since
    the output layer is computed for response tokens. But if the longest row alone exceeds `micro_batch_tokens`, return
    a micro-batch of one longest row."""
    optimizer = gang.model.optimizer_of(role)
    new, most = gang.sampling.max_new_tokens, gang.max_prompt_tokens + gang.sampling.max_new_tokens
    length = most if most > optimizer.micro_batch_tokens else new + 1
    fitting = max(1, optimizer.micro_batch_tokens // length)
    return TraceBatch(min(optimizer.micro_batch_rows or fitting, fitting), length, new)


def rows_of(batch: TraceBatch, number: int) -> Rollout:
    """Return invented rows that fill `number` micro-batches of the same shape as `batch`."""
    rows = batch.rows * number
    mask = np.broadcast_to(np.arange(batch.length) >= batch.length - batch.new, (rows, batch.length)).copy()
    return Rollout(
        row=np.arange(rows, dtype=np.int64),
        prompt_index=np.zeros(rows, np.int64),
        tokens=np.arange(mask.size, dtype=np.int32).reshape(mask.shape) % 251,  # rows differ: tokens are keys of caches
        prompt_lengths=np.full(rows, batch.length - batch.new, np.int32),
        response_lengths=np.full(rows, batch.new, np.int32),
        response_mask=mask,
        sampler_logprobs=np.zeros(mask.shape, np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.ones(rows, np.int8),
    )


def _sent_shape(gang: TracedGang, role: Role, batch: TraceBatch) -> list[int]:
    """Return the shape of the hidden states that pipeline stages send each other."""
    shards = gang.layout.tensor if gang.layout.sequence_parallel else 1
    return [-(-batch.size.tokens // shards), 1, read_spec(gang.model.path_of(role)).hidden_size]


# ---- a gang of one process -------------------------------------------------------------------------------

_BACKEND = "cpu:fake,fakegpu:fake"
"""Backends of torch's process group in a gang of one process. They return from every collective at once."""


@contextmanager
def _fake_gang(recorder: Recorder) -> Iterator[None]:
    """Return a context in which a `MegatronHost` joins a gang without other processes. It reads no weights from files
    in the context: it gets tensors that have only shapes."""
    device = fake_device()

    def join(rank: Rank, layout: LayoutConfig, seed: int) -> ParallelRank:
        parallel.run_megatron_without_cuda(device)
        dist.init_process_group(_BACKEND, store=FakeStore(), rank=rank.index, world_size=rank.size)
        joined = parallel.create_groups(layout, seed, device, parallel.CollectiveWatch(replace(rank, index=0, size=1)))
        recorder.group_names = _group_names()
        return joined

    def shapes(path: str) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, read_config(path).get("dtype") or read_config(path).get("torch_dtype") or "float32")
        recorder.reads_files = True
        weights = {name: torch.empty(shape, dtype=dtype) for name, shape in tensor_shapes(read_spec(path)).items()}
        recorder.reads_files = False
        return weights

    new_group = dist.new_group
    with ExitStack() as stack:
        for owner, name, value in (
            (parallel, "join", join),
            (host_module, "read_weights", shapes),
            (host_module, "has_own_memory", lambda: True),
            (host_module, "choose_products", lambda *_: ProductChoice(Products.TORCH, "on a GPU", {})),
            (dist, "new_group", lambda *args, **options: new_group(*args, **options | {"backend": _BACKEND})),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def _group_names() -> dict[str, str]:
    groups = {
        "data": parallel_state.get_data_parallel_group(),
        "data, all": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
        "embedding": parallel_state.get_embedding_group(check_initialized=False),
    }
    return {group.group_name: name for name, group in groups.items() if group is not None}

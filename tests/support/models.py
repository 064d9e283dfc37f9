"""Megatron's models of one rank, and data for them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stages.models.config import LayoutConfig, ModelConfig, Offload, SamplingConfig
from stages.models.forward import MicroBatch, hidden_states, response_logprobs, run_backward
from stages.models.hf_conversion import named_by_block, to_hf
from stages.models.host import MegatronHost
from stages.models.minibatches import rank_micro_batches
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.ppo.config import PPOConfig
from stages.ppo.losses import LossStats
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values
from storage.weights import WeightBoard

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # the ranks of other tests, which import this, go without

SEED = 5
ALL_MODELS = frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC})


@contextlib.contextmanager
def opened(
    directory: Path,
    model: ModelConfig,
    ppo: PPOConfig | None = None,
    *,
    sampling: SamplingConfig | None = None,
    layout: LayoutConfig | None = None,
    offload: Offload = "none",
) -> Iterator[MegatronHost]:
    host = MegatronHost(
        model,
        sampling or SamplingConfig(),
        ppo or PPOConfig(),
        layout or LayoutConfig(),
        ALL_MODELS,
        Rank(0, 1, f"file://{directory}/rendezvous", 1),
        seed=SEED,
        total_steps=10,
        offload=offload,
    )
    try:
        yield host
    finally:
        host.close()


def published(host: MegatronHost) -> dict[str, np.ndarray] | None:
    """Return copies of the tensors that a gang publishes on rank 0, None on other ranks. All ranks make the call."""
    with tempfile.TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        board, version = WeightBoard(Path(of_first[0]) / "board"), host.version(Role.POLICY)
        if host.publish(board, version) is None:
            return None
        with contextlib.closing(board.open(version)) as lease:
            return {name: array.copy() for name, array in lease.tensors.items()}


def random_advantages(rng: np.random.Generator, mask: np.ndarray) -> Advantages:
    """Rewards, advantages and returns drawn normal for the tokens of a response_mask."""
    return Advantages(*(np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(3)), mask)


def update_both(
    host: MegatronHost,
    step: int,
    rollout: Rollout,
    advantages: Advantages,
    answers: tuple[PolicyLogprobs, ReferenceLogprobs, Values],
) -> dict[str, float]:
    """Train both models on rows that were sampled by their version. Return the metrics, without those of the
    process."""
    policy, reference, values = answers
    versions = np.where(rollout.response_mask, step, -1).astype(np.int32)
    now = replace(rollout, token_versions=versions, sampler_logprobs=policy.policy_logprobs)
    metrics = host.update_policy(step, PolicyBatch(now, advantages, policy, reference, 0.1))
    metrics |= host.update_critic(step, CriticBatch(now, advantages, values))
    for role in (Role.POLICY, Role.CRITIC):
        host.mark_clean(role)
    return {name: value for name, value in metrics.items() if not name.endswith("peak_memory_bytes")}


def update_on_random_rows(
    host: MegatronHost, rng: np.random.Generator, rows: int, seq: int, step: int = 0
) -> dict[str, float]:
    """Train both models on a step's data as the stages would have made it, with random advantages and returns."""
    rollout = random_rollout(rng, rows, seq, version=step)
    answers = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    return update_both(host, step, rollout, random_advantages(rng, rollout.response_mask), answers)


def random_rollout(rng: np.random.Generator, rows: int, seq: int, version: int = 0) -> Rollout:
    """Prompts of 2 to 4 and responses of 1 to 8 random tokens; tokens of the padding are random too, since nothing may
    depend on them. Log-probs of the sampler are zero."""
    prompt = rng.integers(2, 5, rows).astype(np.int32)
    response = rng.integers(1, 9, rows).astype(np.int32)
    index = np.arange(seq)
    mask = (index >= prompt[:, None]) & (index < (prompt + response)[:, None])
    return Rollout(
        row=np.arange(rows),
        prompt_index=np.arange(rows),
        tokens=rng.integers(3, 256, (rows, seq)).astype(np.int32),
        prompt_lengths=prompt,
        response_lengths=response,
        response_mask=mask,
        sampler_logprobs=np.zeros((rows, seq), np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        finish_reason=np.zeros(rows, np.int8),
    )


def transformers_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return the log-probs of every token but the first by transformers, [rows, seq - 1]."""
    tokens = torch.from_numpy(rollout.tokens).long()
    return model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def logprob_gradients(host: MegatronHost, rollout: Rollout) -> dict[str, Tensor]:
    """Return the gradients of the sum of the responses' log-probs, by Hugging Face name, of what the policy trains."""
    trainer = host._trainers[Role.POLICY]

    def loss(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossStats]:
        weight = trainer.model.output_layer.weight
        weight = trainer.model.embedding.word_embeddings.weight if weight is None else weight
        given = host._distribution, host.product_choice.products, host._kernels
        found, _ = response_logprobs(hidden, batch, weight, *given, entropy="none")
        return found.sum(), LossStats({}, {})

    batches = rank_micro_batches(rollout, np.arange(rollout.num_rows), trainer.config, host._blueprint)
    trainer._ddp.zero_grad_buffer()
    run_backward(trainer._ddp, None, batches, loss)
    return {
        of_name: tensor.clone()
        for name, block, parameter in named_by_block(trainer.model, 0)
        if parameter.requires_grad
        for of_name, tensor in to_hf(name, block, parameter.main_grad, host._blueprint.spec, lambda part: [part])
    }


def bytes_kept_for_backward(host: MegatronHost, role: Role, batch: MicroBatch) -> int:
    """Return what autograd keeps of a forward pass up to the hidden states, beside the weights."""
    trainer = host._trainers[role]
    weights = {parameter.untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, lest another takes a freed one's address

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory
        return tensor.detach()  # by the tensor itself the graph would hold itself

    trainer._ddp.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(trainer._ddp, host._trunk, batch)
    return sum(memory.nbytes() for memory in kept.values())

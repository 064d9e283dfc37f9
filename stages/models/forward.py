"""From rows of tokens to log-probs, entropies and values: micro-batches, Megatron's schedule, and what is read off the
hidden states.

Logits are made only for the positions that predict a sampled token; a distribution is the sampler's own (temperature,
suppressed tokens, no EOS before `min_new_tokens`). Suffixes: B rows, T tokens of the longest row, H hidden, V this
tensor-parallel rank's part of the vocabulary, N sampled tokens of the micro-batch.

May import numpy, torch, megatron.core, stages.ppo and this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from stages.models.layers import HiddenOutput
from stages.models.trunk import Trunk
from stages.ppo.masks import predictions_of_tokens
from stages.ppo.micro_batches import micro_batches

Read = TypeVar("Read")

EXCLUDED = -1e30
"""Logit of a token that cannot be sampled: its probability is exactly 0, and 0 times this is 0 (times -inf: NaN)."""

CHUNK_BYTES = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Of logits worked on at a time: on a CPU few enough to stay in its cache, on a GPU enough to fill it."""


@dataclass(frozen=True)
class Distribution:
    """The distribution that tokens are sampled from, given logits."""

    temperature: float
    suppressed: tuple[int, ...]
    eos: tuple[int, ...]
    min_new_tokens: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through a model together."""

    rows: np.ndarray
    """Their indices in the caller's arrays."""
    lengths: np.ndarray
    tokens: Tensor
    """int64 [B, T], on the device; T is the longest row, rounded up to a multiple of TP under sequence parallelism."""
    mask: Tensor
    """bool [B, T]: response_mask."""


def cut_micro_batches(
    tokens: np.ndarray, mask: np.ndarray, rows: np.ndarray, size: int, device: torch.device, multiple: int = 1
) -> list[MicroBatch]:
    """`rows` of tokens and response_mask [all rows, seq] in micro-batches of at most `size` rows of like length."""
    lengths = row_lengths(mask)
    made = []
    for part in micro_batches(rows, size, lengths[rows]):
        width = -(-int(lengths[part].max()) // multiple) * multiple
        pad = max(0, width - tokens.shape[1])
        made.append(
            MicroBatch(
                part,
                lengths[part],
                torch.from_numpy(np.pad(tokens[part, :width], ((0, 0), (0, pad)))).to(device, torch.int64),
                torch.from_numpy(np.pad(mask[part, :width], ((0, 0), (0, pad)))).to(device),
            )
        )
    return made


def row_lengths(mask: np.ndarray) -> np.ndarray:
    """Tokens of each row, prompt and response together, from response_mask [rows, seq]; 1 for a row without any."""
    last = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), last, 1)


def run_forward(
    model: GPTModel, trunk: Trunk | None, batches: Sequence[MicroBatch], read: Callable[[MicroBatch, Tensor], Read]
) -> list[Read]:
    """What `read` makes of each micro-batch's hidden states [B, T, H], without gradients; empty but on the last
    pipeline stage."""
    if not batches:
        return []

    def step(iterator: Iterator[MicroBatch], stage: GPTModel) -> tuple[Tensor, Callable[..., Read]]:
        batch = next(iterator)
        return hidden_states(stage, trunk, batch), lambda hidden, non_loss_data: read(batch, hidden)

    with torch.no_grad():
        return _schedule(model, batches, step, forward_only=True, collect_non_loss_data=True)


def run_backward(
    model: torch.nn.Module,
    trunk: Trunk | None,
    batches: Sequence[MicroBatch],
    loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Read]],
) -> list[Read]:
    """Adds the gradients of every micro-batch's loss up in the model's gradient buffers and reduces them over the gang.
    Returns what `loss` returns beside the loss; empty but on the last pipeline stage. Needs at least one micro-batch:
    every rank takes part in the reduction."""
    none = torch.tensor(0, dtype=torch.int)  # tokens to divide the gradient by: 0 tells Megatron not to

    def step(
        iterator: Iterator[MicroBatch], stage: GPTModel
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Read]]]:
        batch = next(iterator)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, Read]:
            value, read = loss(batch, hidden)
            return value, none, read

        return hidden_states(stage, trunk, batch), loss_of

    return _schedule(model, batches, step, forward_only=False)


def hidden_states(model: GPTModel, trunk: Trunk | None, batch: MicroBatch) -> Tensor:
    """One micro-batch through this rank's stage: [B, T, H] after the final norm on the last pipeline stage, what the
    next stage reads on the others."""
    if trunk is not None:
        stage = model if isinstance(model, GPTModel) else model.module
        hidden = trunk.hidden(batch.tokens, batch.lengths)
        if torch.is_grad_enabled() and stage.config.recompute_granularity == "full":
            hidden.requires_grad_()  # or the recomputed blocks, seeing no input with a gradient, get none either
        stage.set_input_tensor(hidden)
    # positions count from 0 inside Megatron's rotary embedding, and rows are padded on the right: no ids, no mask
    return model(batch.tokens, None, None)


def token_logprobs(
    hidden_BTH: Tensor, batch: MicroBatch, weight_VH: Tensor, distribution: Distribution, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """(log-prob of every sampled token, entropy in nats of the distribution it was drawn from), float32 [B, T] each, 0
    where nothing was sampled. Vocabulary-parallel: each TP rank multiplies with its part and all get the answer."""
    hidden_NH = predictions_of_tokens(hidden_BTH)[batch.mask]
    first_token = parallel_state.get_tensor_model_parallel_rank() * weight_VH.shape[0]
    index_N = (batch.mask.cumsum(1) - 1)[batch.mask]  # of the token within its response
    logprobs_N, entropy_N = _TokenLogprobs.apply(
        hidden_NH,
        weight_VH,
        batch.tokens[batch.mask] - first_token,
        index_N < distribution.min_new_tokens,
        _shifted(distribution, first_token, weight_VH.shape[0]),
        entropy_gradient,
    )
    empty = torch.zeros(batch.mask.shape, device=hidden_BTH.device)
    return empty.masked_scatter(batch.mask, logprobs_N), empty.masked_scatter(batch.mask, entropy_N)


def head_values(hidden_BTH: Tensor, head: HiddenOutput) -> Tensor:
    """The critic's output at every position, float32 [B, T]."""
    assert head.weight is not None  # a critic's stand-in always has one
    return F.linear(hidden_BTH.float(), head.weight, head.bias)[..., 0]


def _schedule(model: Any, batches: Sequence[MicroBatch], step: Callable[..., Any], **options: Any) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        # read only where pipeline stages agree on one shape beforehand; ours tell each other (variable_seq_lengths)
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=batches[0].tokens.shape[0],
        **options,
    )


def _shifted(distribution: Distribution, first_token: int, width: int) -> Distribution:
    """The distribution with its tokens counted from this rank's first, other ranks' left out."""

    def local(tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(t - first_token for t in tokens if 0 <= t - first_token < width)

    return replace(distribution, suppressed=local(distribution.suppressed), eos=local(distribution.eos))


class _TokenLogprobs(torch.autograd.Function):
    """(log softmax(logits)[target], entropy) of logits = hidden @ weight.T, whose vocabulary is spread over the
    tensor-parallel ranks; all ranks get the same outputs and the same gradient of hidden.

        dlogp/dz_j = 1[j = target] - p_j            dH/dz_j = -p_j (log p_j + H)

    Logits are the largest thing in a step, and time goes into moving them through memory: one float32 buffer [N, V]
    becomes the logits, exp(z - max z), and in the backward pass the gradient of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        early_N: Tensor,
        distribution: Distribution,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """`target_N` and the distribution's tokens count from this rank's first token (a target of another rank lies
        outside 0..V-1); `early_N`: the response may not end here."""
        # in float32 under bfloat16 too: logits of 20 would be rounded to multiples of 1/16
        buffer_NV = F.linear(hidden_NH.float(), weight_VH.float())
        if distribution.temperature != 1:
            buffer_NV /= distribution.temperature
        if distribution.suppressed:
            buffer_NV[:, list(distribution.suppressed)] = EXCLUDED
        if distribution.eos and distribution.min_new_tokens:
            buffer_NV[early_N.nonzero(), list(distribution.eos)] = EXCLUDED
        here_N = (target_N >= 0) & (target_N < buffer_NV.shape[1])
        index_N = torch.where(here_N, target_N, 0)
        largest_N = _over_ranks(buffer_NV.amax(1), dist.ReduceOp.MAX)
        # sums over the vocabulary of exp(z) and of exp(z) z, and the z of the target, z = logit - largest logit
        sums_3N = torch.zeros(3, len(target_N), device=buffer_NV.device)
        sums_3N[2] = torch.where(here_N, buffer_NV.gather(1, index_N[:, None])[:, 0] - largest_N, 0)
        chunk = max(1, CHUNK_BYTES[buffer_NV.device.type] // (4 * buffer_NV.shape[1]))
        for start in range(0, len(target_N), chunk):
            part = slice(start, start + chunk)
            z_NV = buffer_NV[part] - largest_N[part, None]
            torch.exp(z_NV, out=buffer_NV[part])
            sums_3N[0, part] = buffer_NV[part].sum(1)
            sums_3N[1, part] = torch.linalg.vecdot(buffer_NV[part], z_NV)
        total_N, weighted_z_N, target_z_N = _over_ranks(sums_3N, dist.ReduceOp.SUM)
        entropy_N = total_N.log() - weighted_z_N / total_N
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(hidden_NH, weight_VH, buffer_NV, index_N, here_N, total_N, entropy_N)
        ctx.temperature, ctx.entropy_gradient = distribution.temperature, entropy_gradient
        return target_z_N - total_N.log(), entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, buffer_NV, index_N, here_N, total_N, entropy_N = ctx.saved_tensors
        # from here on the buffer holds the gradient of the logits; a second backward would be wrong, and never happens
        if ctx.entropy_gradient:
            p_NV = buffer_NV / total_N[:, None]
            torch.mul(p_NV, -(grad_logprob_N + grad_entropy_N * entropy_N)[:, None], out=buffer_NV)
            buffer_NV -= torch.xlogy(p_NV, p_NV) * grad_entropy_N[:, None]
        else:
            buffer_NV *= (-grad_logprob_N / total_N)[:, None]
        buffer_NV.scatter_add_(1, index_N[:, None], torch.where(here_N, grad_logprob_N, 0)[:, None])
        if ctx.temperature != 1:
            buffer_NV /= ctx.temperature
        grad_hidden_NH = grad_weight_VH = None
        if ctx.needs_input_grad[0]:
            grad_hidden_NH = _over_ranks(buffer_NV @ weight_VH.float(), dist.ReduceOp.SUM).to(hidden_NH.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight_VH = (buffer_NV.T @ hidden_NH.float()).to(weight_VH.dtype)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None


def _over_ranks(partial: Tensor, operation: Any) -> Tensor:
    """The tensor-parallel ranks' parts reduced to one, the same on each."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(partial, op=operation, group=group)
    return partial

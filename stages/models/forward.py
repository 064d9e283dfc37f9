"""From rows of tokens to log-probs, entropies and values: micro-batches, Megatron's schedule, and what is read off the
hidden states.

Logits are made only for the positions that predict a sampled token. Suffixes: B rows, T tokens of the longest row,
H hidden, V this tensor-parallel rank's part of the vocabulary, N sampled tokens of the micro-batch.

May import numpy, torch, megatron.core, stages.ppo and this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from stages.models.layers import HiddenOutput
from stages.models.products import Products
from stages.models.token_logprobs import Distribution, Entropy, token_logprobs
from stages.models.trunk import Trunk
from stages.ppo.masks import predictions_of_tokens
from stages.ppo.micro_batches import micro_batches

Read = TypeVar("Read")


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
        if torch.is_grad_enabled() and stage.config.recompute_granularity is not None:
            hidden.requires_grad_()  # or what is recomputed, seeing no input with a gradient, gets none either
        stage.set_input_tensor(hidden)
    # positions count from 0 inside Megatron's rotary embedding, and rows are padded on the right: no ids, no mask
    return model(batch.tokens, None, None)


def response_logprobs(
    hidden_BTH: Tensor,
    batch: MicroBatch,
    weight_VH: Tensor,
    distribution: Distribution,
    products: Products,
    *,
    entropy: Entropy,
) -> tuple[Tensor, Tensor]:
    """(log-prob of every sampled token, entropy in nats of its distribution), float32 [B, T] each, 0 where nothing was
    sampled. No other position goes through the output layer."""
    logprobs_N, entropy_N = token_logprobs(
        predictions_of_tokens(hidden_BTH)[batch.mask],
        weight_VH,
        batch.tokens[batch.mask],
        (batch.mask.cumsum(1) - 1)[batch.mask],
        distribution,
        products,
        entropy=entropy,
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

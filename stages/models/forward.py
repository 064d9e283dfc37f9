"""From rows of tokens to log-probs, entropies and values: micro-batches, Megatron's schedule, and what is read off the
hidden states.

Rows are packed: no padding goes through a model, and logits are made only for the positions that predict a sampled
token. Suffixes: B rows, T tokens of the longest, N tokens of all of them, S of those sampled, H hidden, V this
tensor-parallel rank's part of the vocabulary.

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

from stages.models.kernels.protocol import BlockKernels
from stages.models.layers import HiddenOutput
from stages.models.packing import Packing, pack
from stages.models.products import Products, rows_multiple
from stages.models.token_logprobs import Distribution, Entropy, token_logprobs
from stages.models.trunk import Trunk
from stages.ppo.micro_batches import micro_batches

Read = TypeVar("Read")


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through a model together, packed one after another, the longest first."""

    rows: np.ndarray
    """Their indices in the caller's arrays."""
    lengths: np.ndarray
    tokens: Tensor
    """int64 [N], on the device; under sequence parallelism N is rounded up to a multiple of TP by zeros at the end,
    and on CPUs for 16-bit products (`products.rows_multiple`)."""
    packing: Packing
    mask: Tensor
    """bool [B, T]: response_mask; T is the longest row."""
    targets: Tensor
    """int64 [S]: the sampled tokens, row by row."""
    predictors: Tensor
    """int64 [S]: the packed index of the token before each of them, whose hidden state predicts it."""
    places: Tensor
    """int64 [tokens of the rows]: where each packed token lies in a flattened [B, T]."""

    def padded(self, per_token_N: Tensor) -> Tensor:
        """Numbers of the packed tokens as [B, T], 0 at padding. Differentiable."""
        flat = per_token_N.new_zeros(self.mask.numel())
        return flat.index_put((self.places,), per_token_N[: len(self.places)]).view(self.mask.shape)


def cut_micro_batches(
    tokens: np.ndarray,
    mask: np.ndarray,
    rows: np.ndarray,
    device: torch.device,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    multiple: int = 1,
) -> list[MicroBatch]:
    """`rows` of tokens and response_mask [all rows, seq] in micro-batches of like numbers of tokens, each of at most
    `max_tokens` (but for a row that is longer) and `max_rows`. Raises ValueError for a row whose first token was
    sampled: nothing predicts it."""
    if mask[rows, 0].any():
        raise ValueError(f"row {rows[mask[rows, 0]][0]} has no prompt: nothing predicts its first token")
    lengths = row_lengths(mask)
    cut = micro_batches(rows, lengths[rows], max_tokens=max_tokens, max_rows=max_rows)
    return [_micro_batch(tokens, mask, part, lengths[part], device, multiple) for part in cut]


def _micro_batch(
    tokens: np.ndarray, mask: np.ndarray, rows: np.ndarray, lengths: np.ndarray, device: torch.device, multiple: int
) -> MicroBatch:
    width, total = int(lengths.max()), int(lengths.sum())
    own_mask, inside = mask[rows, :width], np.arange(width) < lengths[:, None]
    filling = -total % multiple
    starts = np.cumsum(lengths) - lengths
    row_of, position = np.nonzero(own_mask)

    def on_device(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    return MicroBatch(
        rows,
        lengths,
        on_device(np.pad(tokens[rows, :width][inside], (0, filling))),
        pack([*map(int, lengths), *([filling] if filling else [])], device),
        on_device(own_mask, torch.bool),
        on_device(tokens[rows, :width][own_mask]),
        on_device(starts[row_of] + position - 1),
        on_device(np.flatnonzero(inside)),
    )


def row_lengths(mask: np.ndarray) -> np.ndarray:
    """Tokens of each row, prompt and response together, from response_mask [rows, seq]; 1 for a row without any."""
    last = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), last, 1)


class KeptForwards:
    """Owns hidden states with all that their backward pass needs, by the tokens they were made of. The weights that
    made them must not change until they are taken or forgotten."""

    def __init__(self) -> None:
        self._hidden: dict[bytes, Tensor] = {}

    def keep(self, batch: MicroBatch, hidden: Tensor) -> None:
        """For one backward pass."""
        self._hidden[_key(batch)] = hidden

    def take(self, batch: MicroBatch) -> Tensor | None:
        """What was kept of a micro-batch of the same rows, if anything was."""
        return self._hidden.pop(_key(batch), None)

    def clear(self) -> None:
        self._hidden.clear()


def _key(batch: MicroBatch) -> bytes:
    return batch.lengths.tobytes() + batch.tokens.cpu().numpy().tobytes()


def run_forward(
    model: GPTModel,
    trunk: Trunk | None,
    batches: Sequence[MicroBatch],
    read: Callable[[MicroBatch, Tensor], Read],
    kept: KeptForwards | None = None,
) -> list[Read]:
    """What `read` makes of each micro-batch's hidden states [N, H], without gradients; empty but on the last
    pipeline stage. With `kept` (on a pipeline of one stage) the same forward serves a later `run_backward` too."""
    if not batches:
        return []
    if kept is not None:
        answers = []
        for batch in batches:
            with torch.enable_grad():
                hidden = hidden_states(model, trunk, batch)
            kept.keep(batch, hidden)
            with torch.no_grad():
                answers.append(read(batch, hidden[0]))
        return answers

    def step(iterator: Iterator[MicroBatch], stage: GPTModel) -> tuple[Tensor, Callable[..., Read]]:
        batch = next(iterator)
        return hidden_states(stage, trunk, batch), lambda hidden, non_loss_data: read(batch, hidden[0])

    with torch.no_grad():
        return _schedule(model, batches, step, forward_only=True, collect_non_loss_data=True)


def run_backward(
    model: torch.nn.Module,
    trunk: Trunk | None,
    batches: Sequence[MicroBatch],
    loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Read]],
    kept: KeptForwards | None = None,
) -> list[Read]:
    """Adds the gradients of every micro-batch's loss up in the model's gradient buffers and reduces them over the gang.
    Returns what `loss` returns beside the loss; empty but on the last pipeline stage. Needs at least one micro-batch:
    every rank takes part in the reduction. Forwards that were `kept` are not computed again."""
    none = torch.tensor(0, dtype=torch.int)  # tokens to divide the gradient by: 0 tells Megatron not to

    def step(
        iterator: Iterator[MicroBatch], stage: GPTModel
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor, Read]]]:
        batch = next(iterator)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, Read]:
            value, read = loss(batch, hidden[0])
            return value, none, read

        hidden = kept.take(batch) if kept is not None else None
        return hidden_states(stage, trunk, batch) if hidden is None else hidden, loss_of

    return _schedule(model, batches, step, forward_only=False)


def hidden_states(model: GPTModel, trunk: Trunk | None, batch: MicroBatch) -> Tensor:
    """One micro-batch through this rank's stage: [1, N, H] after the final norm on the last pipeline stage, what the
    next stage reads, [N, 1, H], on the others."""
    if trunk is not None:
        stage = model if isinstance(model, GPTModel) else model.module
        hidden = trunk.hidden(batch.tokens, batch.lengths)
        if torch.is_grad_enabled() and stage.config.recompute_granularity is not None:
            hidden.requires_grad_()  # or what is recomputed, seeing no input with a gradient, gets none either
        stage.set_input_tensor(hidden)
    return model(batch.tokens[None], None, None, packed_seq_params=batch.packing)


def response_logprobs(
    hidden_NH: Tensor,
    batch: MicroBatch,
    weight_VH: Tensor,
    distribution: Distribution,
    products: Products,
    kernels: BlockKernels,
    *,
    entropy: Entropy,
) -> tuple[Tensor, Tensor]:
    """(log-prob of every sampled token, entropy in nats of its distribution), float32 [B, T] each, 0 where nothing was
    sampled. No other position goes through the output layer."""
    number = len(batch.targets)
    filling = 0, -number % rows_multiple(weight_VH.dtype, weight_VH.device)
    logprobs_S, entropy_S = token_logprobs(
        hidden_NH[F.pad(batch.predictors, filling)],
        weight_VH,
        F.pad(batch.targets, filling),
        F.pad((batch.mask.cumsum(1) - 1)[batch.mask], filling),
        distribution,
        products,
        kernels,
        entropy=entropy,
    )
    empty = torch.zeros(batch.mask.shape, device=hidden_NH.device)
    logprobs_S, entropy_S = logprobs_S[:number], entropy_S[:number]
    return empty.masked_scatter(batch.mask, logprobs_S), empty.masked_scatter(batch.mask, entropy_S)


def head_values(hidden_NH: Tensor, batch: MicroBatch, head: HiddenOutput) -> Tensor:
    """The critic's output at every position, float32 [B, T]; 0 at padding."""
    assert head.weight is not None  # a critic's stand-in always has one
    return batch.padded(F.linear(hidden_NH.float(), head.weight, head.bias)[:, 0])


def _schedule(model: Any, batches: Sequence[MicroBatch], step: Callable[..., Any], **options: Any) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        # read only where pipeline stages agree on one shape beforehand; ours tell each other (variable_seq_lengths)
        seq_length=len(batches[0].tokens),
        micro_batch_size=1,
        **options,
    )

"""Compute log-probs, entropies and values from rows of tokens: micro-batches, Megatron's schedule, output layers.

Rows are packed: no padding goes through a model, and logits are computed only for positions that predict a sampled
token. Shape suffixes: B rows, T tokens of the longest row, N tokens of all rows, S sampled tokens, H hidden size, V
this tensor-parallel rank's part of the vocabulary.

The frozen lowest blocks (`Trunk`) are computed once per row. A bounded cache keeps their outputs for the reference, the
log-probs, the values and every epoch of the updates.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from stages.models.kernels.blocks import BlockKernels
from stages.models.layers import HiddenOutput, Packing, pack
from stages.models.numerics import Products, rows_multiple
from stages.models.token_logprobs import Distribution, Entropy, token_logprobs
from stages.ppo.micro_batches import micro_batches

Read = TypeVar("Read")


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through a model together, packed one after another, the longest first."""

    rows: np.ndarray
    """Index of each row in the caller's arrays."""
    lengths: np.ndarray
    tokens: Tensor
    """int64 [N], on the device. Zeros at the end round N up to a multiple of TP under sequence parallelism, and to a
    multiple that 16-bit products need on CPUs (`numerics.rows_multiple`)."""
    packing: Packing
    mask: Tensor
    """bool [B, T]: response_mask; T is the longest row."""
    targets: Tensor
    """int64 [S]: the sampled tokens, row by row."""
    predictors: Tensor
    """int64 [S]: for each sampled token the packed index of the token before it, whose hidden state predicts it."""
    in_response: Tensor
    """int64 [S]: the index of each sampled token in its response."""
    places: Tensor
    """int64 [tokens of the rows]: the index of each packed token in a flattened [B, T]."""
    row_tokens: tuple[np.ndarray, ...]
    """The tokens of each row, on the host. (Reading them from the device would wait for the device's work.)"""

    def padded(self, per_token_N: Tensor) -> Tensor:
        """Return `per_token_N`, one number per packed token, in the form [B, T], with 0 at padding. Differentiable."""
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
    """Divide some rows into micro-batches with similar numbers of tokens. Raises ValueError for a row whose first token
    was sampled, since nothing predicts that token.

    Args:
        tokens: token ids of all rows, [all rows, seq].
        mask: response_mask of all rows, [all rows, seq].
        rows: indices of the rows that the micro-batches get.
        device: device of the tensors in the micro-batches.
        max_tokens: maximum number of tokens of a micro-batch. A longer row gets a micro-batch of its own.
        max_rows: maximum number of rows of a micro-batch; None: no limit.
        multiple: the number of tokens of each micro-batch is rounded up to a multiple of this number.
    """
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
    packed = tokens[rows, :width][inside]

    def on_device(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    return MicroBatch(
        rows,
        lengths,
        on_device(np.pad(packed, (0, filling))),
        pack([*map(int, lengths), *([filling] if filling else [])], device),
        on_device(own_mask, torch.bool),
        on_device(tokens[rows, :width][own_mask]),
        on_device(starts[row_of] + position - 1),
        on_device((own_mask.cumsum(1) - 1)[own_mask]),
        on_device(np.flatnonzero(inside)),
        tuple(np.split(packed, starts[1:])),
    )


def row_lengths(mask: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each row, prompt and response together. A row ends with its last sampled token. A
    row without a sampled token gets the length 1. `mask`: response_mask [rows, seq]."""
    last = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), last, 1)


class KeptForwards:
    """Owns hidden states together with their autograd graphs. The hidden states are found by the tokens that they were
    computed from. The weights must not change until the hidden states are taken or cleared."""

    def __init__(self) -> None:
        self._hidden: dict[bytes, Tensor] = {}

    def keep(self, batch: MicroBatch, hidden: Tensor) -> None:
        """Keep the hidden states of a micro-batch for one backward pass."""
        self._hidden[_key(batch)] = hidden

    def take(self, batch: MicroBatch) -> Tensor | None:
        """Remove and return the hidden states kept for a micro-batch of the same tokens, or return None."""
        return self._hidden.pop(_key(batch), None)

    def clear(self) -> None:
        self._hidden.clear()


def _key(batch: MicroBatch) -> bytes:
    return b"".join(_digests(batch.row_tokens))


def run_forward(
    model: GPTModel,
    trunk: Trunk | None,
    batches: Sequence[MicroBatch],
    read: Callable[[MicroBatch, Tensor], Read],
    kept: KeptForwards | None = None,
) -> list[Read]:
    """Run micro-batches through the model. Return what `read` returns for each, given the micro-batch and its hidden
    states [N, H].

    The list is empty except on the last pipeline stage. Without `kept` no autograd graph is made. With `kept`, which
    needs a pipeline of one stage, the graphs are kept there, and a later `run_backward` does not repeat the forward
    passes.
    """
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
    """Add up the gradients of all micro-batches' losses in the model's gradient buffers and reduce them over the gang.

    Returns the second result of `loss` per micro-batch; the list is empty except on the last pipeline stage. Needs at
    least one micro-batch, since every rank takes part in the reduction. Forward passes in `kept` are not repeated.
    """
    none = torch.tensor(0, dtype=torch.int)  # number of tokens to divide the gradient by; 0: Megatron does not divide

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
    """Run one micro-batch through this rank's pipeline stage. The last stage returns the hidden states after the final
    norm, [1, N, H]. Other stages return the input of the next stage, [N, 1, H]."""
    if trunk is not None:
        stage = model if isinstance(model, GPTModel) else model.module
        hidden = trunk.hidden(batch)
        if torch.is_grad_enabled() and stage.config.recompute_granularity is not None:
            hidden.requires_grad_()  # recomputed modules get gradients only if their input requires one
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
    """Return (log-prob of every sampled token, entropy in nats of its distribution), float32 [B, T] each, 0 where no
    token was sampled. No other position goes through the output layer."""
    number = len(batch.targets)
    filling = 0, -number % rows_multiple(weight_VH.dtype, weight_VH.device)
    logprobs_S, entropy_S = token_logprobs(
        hidden_NH[F.pad(batch.predictors, filling)],
        weight_VH,
        F.pad(batch.targets, filling),
        F.pad(batch.in_response, filling),
        distribution,
        products,
        kernels,
        entropy=entropy,
    )
    empty = torch.zeros(batch.mask.shape, device=hidden_NH.device)
    logprobs_S, entropy_S = logprobs_S[:number], entropy_S[:number]
    return empty.masked_scatter(batch.mask, logprobs_S), empty.masked_scatter(batch.mask, entropy_S)


def head_values(hidden_NH: Tensor, batch: MicroBatch, head: HiddenOutput) -> Tensor:
    """Return the critic's output at every position, float32 [B, T], 0 at padding."""
    assert head.weight is not None  # a critic's HiddenOutput always has one
    return batch.padded(F.linear(hidden_NH.float(), head.weight, head.bias)[:, 0])


def _schedule(model: Any, batches: Sequence[MicroBatch], step: Callable[..., Any], **options: Any) -> list[Any]:
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        # used only by pipelines of fixed shapes; here stages send each other their shapes (variable_seq_lengths)
        seq_length=len(batches[0].tokens),
        micro_batch_size=1,
        **options,
    )


# ---- frozen blocks ---------------------------------------------------------------------------------------


class Trunk:
    """Owns the frozen blocks and a cache of their outputs. The key of a row is a digest of its tokens. The cache drops
    the least recently used row first. The outputs never become stale, since nothing trains the trunk."""

    def __init__(self, model: GPTModel, cache_bytes: int) -> None:
        self.model = model
        self.cache_bytes = cache_bytes
        self.num_rows = 0
        """Number of rows requested so far."""
        self.num_computed = 0
        """Number of requested rows that went through the blocks; the others came from the cache."""
        config = model.config
        self._multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.output_weight = model.embedding.word_embeddings.weight.detach()
        """[vocab / TP, hidden]: the embedding, used as a tied output layer."""
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self._counted = (0, 0)

    @torch.no_grad()
    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the frozen blocks' outputs for a micro-batch's rows: [N, 1, H], or this rank's part [N / TP, 1, H]
        under sequence parallelism. Padding tokens after the last row get zeros."""
        tokens_N, lengths = batch.tokens, batch.lengths
        starts = np.cumsum(lengths) - lengths
        row_tokens = [tokens_N[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        keys = _digests(batch.row_tokens)
        # held here as well, so that a cache smaller than the micro-batch still works
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        missing = np.array([b for b, key in enumerate(keys) if key not in rows], dtype=int)
        widths = _padded_widths(lengths[missing], self._multiple)
        for width in np.unique(widths):
            alike = missing[widths == width]
            computed_BTH = self._run(torch.stack([F.pad(row_tokens[b], (0, width - int(lengths[b]))) for b in alike]))
            for hidden_TH, b in zip(computed_BTH, alike, strict=True):
                rows[keys[b]] = hidden_TH[: lengths[b]].clone()
        self.num_rows += len(keys)
        self.num_computed += len(missing)
        hidden_NH = rows[keys[0]].new_zeros(len(tokens_N), rows[keys[0]].shape[-1])
        for start, length, key in zip(starts, lengths, keys, strict=True):
            hidden_NH[start : start + length] = rows[key]
            self._keep(key, rows[key])
        return self._shard(hidden_NH)[:, None]

    def counts(self) -> dict[str, float]:
        """Return the numbers of rows requested and computed since the last call, as metrics."""
        (rows, computed), self._counted = self._counted, (self.num_rows, self.num_computed)
        return {
            "trunk/rows": float(self.num_rows - rows),
            "trunk/computed_rows": float(self.num_computed - computed),
        }

    def forget(self) -> None:
        """Drop all cached rows."""
        self._rows.clear()
        self._bytes = 0

    def _run(self, tokens_BT: Tensor) -> Tensor:
        """Run padded rows through the frozen blocks. Return [B, T, H]."""
        rows, width = tokens_BT.shape
        packing = pack([width] * rows, tokens_BT.device)
        hidden_N1H = self.model(tokens_BT.view(1, -1), None, None, packed_seq_params=packing)
        if self.model.config.sequence_parallel:
            hidden_N1H = gather_from_sequence_parallel_region(hidden_N1H)
        return hidden_N1H.view(rows, width, -1)

    def _shard(self, hidden_NH: Tensor) -> Tensor:
        if not self.model.config.sequence_parallel:
            return hidden_NH
        size = parallel_state.get_tensor_model_parallel_world_size()
        return hidden_NH.chunk(size)[parallel_state.get_tensor_model_parallel_rank()].clone()

    def _keep(self, key: bytes, row: Tensor) -> None:
        if key not in self._rows:
            self._bytes += row.nbytes
        self._rows[key] = row
        self._rows.move_to_end(key)
        while self._bytes > self.cache_bytes:
            _, dropped = self._rows.popitem(last=False)
            self._bytes -= dropped.nbytes


def _padded_widths(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Return the padded width of each row: at most an eighth longer, at least 4 (matrix products with fewer rows use
    other code), and a multiple of `multiple`. On a CPU the bits of a row's output depend on its padding but not on
    other rows. So a width that depends only on the row gives a cached, recomputed or replayed row the same bits."""
    step = np.maximum(1, 2 ** np.log2(lengths).astype(int) // 8)
    widths = np.maximum(4, -(-lengths // step) * step)
    return -(-widths // multiple) * multiple


def _digests(rows: Sequence[np.ndarray]) -> list[bytes]:
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]

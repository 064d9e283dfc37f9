"""The frozen lowest blocks, computed once per row: their outputs are kept in a bounded cache, from which reference,
log-probs, values and every epoch of the updates read.

May import numpy, torch, megatron.core and stages.models.packing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from stages.models.packing import pack


class Trunk:
    """Owns the frozen blocks' outputs, by a digest of the row's tokens, least recently used dropped first. They are
    never stale: nothing trains the trunk."""

    def __init__(self, model: GPTModel, cache_bytes: int) -> None:
        self.model = model
        self.cache_bytes = cache_bytes
        self.num_rows = 0
        """Rows asked for so far."""
        self.num_computed = 0
        """Of these, rows that went through the blocks; the others came from the cache."""
        config = model.config
        self._multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.output_weight = model.embedding.word_embeddings.weight.detach()
        """[vocab / TP, hidden]: the embedding as a tied output layer."""
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self._counted = (0, 0)

    @torch.no_grad()
    def hidden(self, tokens_N: Tensor, lengths: np.ndarray) -> Tensor:
        """Outputs of the frozen blocks for packed rows of these lengths, [N, 1, H] (this rank's [N / TP, 1, H] under
        sequence parallelism); zero for tokens after the last row."""
        starts = np.cumsum(lengths) - lengths
        row_tokens = [tokens_N[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        keys = _digests(row_tokens)
        # taken out one by one, so that a cache smaller than the micro-batch still serves it
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
        """Rows asked for, and computed, since the last call, as metrics."""
        (rows, computed), self._counted = self._counted, (self.num_rows, self.num_computed)
        return {
            "trunk/rows": float(self.num_rows - rows),
            "trunk/computed_rows": float(self.num_computed - computed),
        }

    def forget(self) -> None:
        """Lets go of all rows."""
        self._rows.clear()
        self._bytes = 0

    def _run(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, H] of padded rows."""
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
    """Width that each row is padded to, a function of its own length alone.

    On a CPU a row's output has the same bits whatever rows are computed beside it, but not whatever it is padded to. A
    width of its own makes a cached row, one computed again after an eviction, and one computed in a replay equal.
    At most an eighth is padding; no less than 4 tokens, below which matrix products take another path.
    """
    step = np.maximum(1, 2 ** np.log2(lengths).astype(int) // 8)
    widths = np.maximum(4, -(-lengths // step) * step)
    return -(-widths // multiple) * multiple


def _digests(rows: Sequence[Tensor]) -> list[bytes]:
    return [hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest() for row in rows]

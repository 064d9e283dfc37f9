"""The keys and values of the rows in flight. May import torch.

Shape letters: S slots, K key/value heads, T positions of a slot, D head dimension, N tokens of a batch.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64

_ROUND_TOKENS = 32
"""Attention runs over a multiple of this many positions (the rest masked): fewer different shapes, aligned rows."""


def round_up(tokens: int) -> int:
    """The next multiple of the granule that slots and attention spans are made of."""
    return -(-tokens // _ROUND_TOKENS) * _ROUND_TOKENS


def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, max_seq: int, dtype: torch.dtype) -> int:
    """Memory that one row's keys and values take at their longest."""
    return 2 * num_layers * num_kv_heads * round_up(max_seq) * head_dim * dtype.itemsize


class KVCache:
    """Owns the memory of the keys and values: per layer two tensors [S, K, T, D], rows in slots 0..rows-1 without gaps.

    Slots are contiguous per head, so that a batch of rows is one batched matrix product without a copy."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self._shape = (num_layers, num_slots, num_kv_heads, round_up(max_seq), head_dim)
        self._dtype, self.device = dtype, device
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self.allocate()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all slots hold together."""
        return self._shape[1] * self._shape[3]

    @property
    def allocated(self) -> bool:
        return self._keys is not None

    def allocate(self) -> None:
        """Takes the memory (again). Zeros: a masked position is multiplied by 0, which NaN would survive."""
        self._keys = torch.zeros(self._shape, dtype=self._dtype, device=self.device)
        self._values = torch.zeros(self._shape, dtype=self._dtype, device=self.device)

    def release(self) -> None:
        """Gives the memory back."""
        self._keys = self._values = None

    def index(
        self, slots: Int64[torch.Tensor, " N"], positions: Int64[torch.Tensor, " N"]
    ) -> Int64[torch.Tensor, " N*K"]:
        """Where `write` puts the heads of N tokens; the same for all layers."""
        _, _, kv_heads, length, _ = self._shape
        heads = torch.arange(kv_heads, device=slots.device)
        return ((slots[:, None] * kv_heads + heads) * length + positions[:, None]).reshape(-1)

    def write(
        self, layer: int, index: torch.Tensor, keys: Float[torch.Tensor, "N K D"], values: Float[torch.Tensor, "N K D"]
    ) -> None:
        head_dim = self._shape[-1]
        for memory, new in ((self._keys, keys), (self._values, values)):
            assert memory is not None, "the cache is asleep"
            memory[layer].view(-1, head_dim).index_copy_(0, index, new.reshape(-1, head_dim))

    def read(self, layer: int, rows: int, span: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows*K, span, D] of slots 0..rows-1, positions 0..span-1; views."""
        assert self._keys is not None
        assert self._values is not None
        _, _, kv_heads, length, head_dim = self._shape
        keys = self._keys[layer].view(-1, length, head_dim)[: rows * kv_heads, :span]
        values = self._values[layer].view(-1, length, head_dim)[: rows * kv_heads, :span]
        return keys, values

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` positions of a slot over another, in all layers."""
        for memory in (self._keys, self._values):
            assert memory is not None
            memory[:, target, :, :num_tokens] = memory[:, source, :, :num_tokens]

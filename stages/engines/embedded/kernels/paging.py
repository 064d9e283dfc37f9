"""How keys and values are divided into blocks: what kernels, cache and scheduler must agree on. May import torch (its
dtypes)."""

from __future__ import annotations

import torch

BLOCK_TOKENS = 16
"""Positions of a block; `kernels.c` has the same number."""
NO_BLOCK = 0
"""Stands in tables for positions that no token has yet; never written, so it stays finite."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many positions."""
    return -(-num_tokens // BLOCK_TOKENS)


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Memory of one block, keys and values of all layers."""
    return 2 * num_layers * num_kv_heads * BLOCK_TOKENS * head_dim * dtype.itemsize

"""Blocks of the key/value cache. Used by kernels, cache and scheduler. The module imports nothing, because it is also
used where torch is not loaded: to predict a run's memory.
"""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Number of positions in a block. `kernels.c` has the same number."""
NO_BLOCK = 0
"""Table entry for positions without a token. This block is never written, so its contents are always finite."""


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_TOKENS)


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Return the bytes of one block: keys and values of all layers."""
    return 2 * num_layers * num_kv_heads * BLOCK_TOKENS * head_dim * bytes_per_number

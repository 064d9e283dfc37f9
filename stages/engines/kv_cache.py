"""The keys and values of the rows in flight: memory in blocks, and who holds which. May import torch.

Shape letters: P blocks, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class KVCache:
    """Owns the memory: per layer keys [P, K, D, BLOCK_TOKENS] and values [P, K, BLOCK_TOKENS, D]. Keys lie the way a
    block's scores are computed side by side."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks`: that rows can hold; `NO_BLOCK` comes on top."""
        self._num_layers = num_layers
        self._heads = (num_blocks + 1, num_kv_heads)
        self._head_dim = head_dim
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(keys, values); empty while the memory is given back."""
        self.allocate()

    @property
    def allocated(self) -> bool:
        return bool(self.layers)

    def allocate(self) -> None:
        """Takes the memory (again). Zeros: a masked position is multiplied by 0, which NaN would survive."""

        def zeros(*block: int) -> torch.Tensor:
            return torch.zeros(*self._heads, *block, dtype=self._dtype, device=self._device)

        dim = self._head_dim
        self.layers = [(zeros(dim, BLOCK_TOKENS), zeros(BLOCK_TOKENS, dim)) for _ in range(self._num_layers)]

    def release(self) -> None:
        """Gives the memory back."""
        self.layers = []


class BlockPool:
    """Owns the numbers of the blocks: which are free, how many rows hold each, and which hold the start of a prompt.

    Rows whose prompts begin alike share the full blocks of that beginning. A shared block is never written again, so
    nothing has to be copied. A block is known by its parent (the block before it) and its own tokens; since whoever
    holds a block holds its parent too, a parent's number is not given to others while the child is known."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NO_BLOCK, -1))
        self._holders = [0] * (num_blocks + 1)
        self._by_content: dict[tuple[int, tuple[int, ...]], int] = {}
        self._content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.peak_used = 0
        """Blocks held at once since `reset_peak`."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def reset_peak(self) -> None:
        self.peak_used = self.num_used

    def take(self) -> int:
        """A free block, now held once. Raises IndexError if there is none."""
        block = self._free.pop()
        self._holders[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a row; what nobody holds is free, and forgotten."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                content = self._content.pop(block, None)
                if content is not None:
                    del self._by_content[content]
                self._free.append(block)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The known blocks that hold the beginning of `tokens` (full blocks only), now held once more each."""
        blocks: list[int] = []
        parent = NO_BLOCK
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = self._by_content.get((parent, tuple(tokens[start : start + BLOCK_TOKENS])))
            if block is None:
                break
            self._holders[block] += 1
            blocks.append(block)
            parent = block
        return blocks

    def publish(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Makes the full blocks that hold the beginning of `tokens` known to `match`. From now on they may be read by
        others as soon as the pass that computes them has written its keys."""
        parent = NO_BLOCK
        for i, block in enumerate(blocks[: len(tokens) // BLOCK_TOKENS]):
            content = (parent, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]))
            if block not in self._content:
                if content in self._by_content:
                    return  # another row computed the same meanwhile: its blocks are the known ones
                self._by_content[content] = block
                self._content[block] = content
            parent = block

    def forget(self) -> None:
        """What blocks hold is no longer true (the weights changed): nobody may share them."""
        self._by_content.clear()
        self._content.clear()

"""The key/value cache of the rows in flight: the memory in blocks, and the pool that assigns blocks to rows.

Shape letters: P blocks, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, NO_BLOCK, blocks_for
from stages.engines.embedded.kernels.packed import Slabs

_NO_PARENT = 0
"""Serial number that stands for the predecessor of a prompt's first block."""
_Content = tuple[int, tuple[int, ...]]
"""Content of a known block (see `BlockPool`): the serial number of the block before it, and the block's own tokens."""


class KVCache:
    """Owns the memory of keys and values. Each layer has keys [P, K, D, BLOCK_TOKENS] and values [P, K, BLOCK_TOKENS,
    D].

    In this layout the keys of a block's positions lie side by side, so a kernel computes their scores together. Keys
    and values have the dtype of the weights. A wider dtype would add little precision, but would take longer to read.
    (If rows are many or long, decoding spends most of its time on reading the cache.) On a CPU the system may back the
    memory with huge pages."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory. `num_blocks`: number of blocks that rows can hold. One more block is allocated,
        `NO_BLOCK`: unused entries of block tables point to it."""
        self._num_layers = num_layers
        self._heads = (num_blocks + 1, num_kv_heads)
        self._head_dim = head_dim
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(keys, values) per layer; empty while the memory is released."""
        self.allocate()

    @property
    def allocated(self) -> bool:
        return bool(self.layers)

    def allocate(self) -> None:
        """Allocate the memory and fill it with zeros. Does nothing if it is allocated already. Zeros are needed since
        attention multiplies masked positions by 0, and 0 * NaN would be NaN."""
        if self.allocated:
            return

        slabs, dim = Slabs(), self._head_dim
        num_bytes = math.prod(self._heads) * dim * BLOCK_TOKENS * self._dtype.itemsize

        def zeros(*block: int) -> torch.Tensor:
            if self._device.type != "cpu":
                return torch.zeros(*self._heads, *block, dtype=self._dtype, device=self._device)
            return slabs.take(num_bytes).view(self._dtype).view(*self._heads, *block)

        self.layers = [(zeros(dim, BLOCK_TOKENS), zeros(BLOCK_TOKENS, dim)) for _ in range(self._num_layers)]

    def release(self) -> None:
        """Free the memory. On a CUDA device, give it back to the driver, so that other processes can use it."""
        self.layers = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def read(self, blocks: Sequence[int], num_positions: int) -> Float[np.ndarray, "layers 2 K positions D"]:
        """Return a float32 copy of the keys and values of the first `num_positions` positions in `blocks`. The copy is
        not divided into blocks."""
        index = torch.tensor(blocks[: blocks_for(num_positions)], device=self._device)
        copied = torch.stack(
            [
                torch.stack([keys[index].permute(1, 0, 3, 2), values[index].permute(1, 0, 2, 3)])
                for keys, values in self.layers
            ]
        )
        return copied.flatten(3, 4)[:, :, :, :num_positions].contiguous().float().cpu().numpy()

    def write(self, blocks: Sequence[int], copied: Float[np.ndarray, "layers 2 K positions D"]) -> None:
        """Write a copy made by `read` into `blocks`. The rest of the last block becomes 0."""
        layers, both, heads, positions, dim = copied.shape
        index = torch.tensor(blocks[: blocks_for(positions)], device=self._device)
        whole = torch.zeros(layers, both, heads, len(index) * BLOCK_TOKENS, dim, dtype=self._dtype)
        whole[:, :, :, :positions] = torch.from_numpy(np.array(copied))  # torch warns about read-only arrays
        in_blocks = whole.unflatten(3, (len(index), BLOCK_TOKENS)).to(self._device)
        for (keys, values), (new_keys, new_values) in zip(self.layers, in_blocks, strict=True):
            keys[index] = new_keys.permute(1, 0, 3, 2)
            values[index] = new_values.permute(1, 0, 2, 3)


class BlockPool:
    """Assigns the blocks to rows. Knows which blocks are free, how many rows hold each block, and which blocks hold the
    beginning of a prompt.

    Rows whose prompts begin alike share the full blocks of that beginning. A shared block is never written again, so
    nothing is copied. A block is known if `publish` has registered its content: its own tokens, and the serial number
    of the block before it. Serial numbers are never reused. A block without holders keeps its content for as long as
    possible: `take` prefers free blocks without content. If there are none, it returns the free block that has been
    unused for the longest time. So rows of the same prompt can share blocks even if they do not run at the same
    time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NO_BLOCK, -1))
        """Free blocks without known content."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Free blocks with known content, the longest unused first."""
        self._reference_counts = [0] * (num_blocks + 1)
        self._by_content: dict[_Content, int] = {}
        self._content: dict[int, _Content] = {}
        self._serials: dict[int, int] = {}
        """Serial number of each known block."""
        self._next_serial = _NO_PARENT + 1
        self.peak_used = 0
        """Maximum number of blocks that were held at the same time since `reset_peak`."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can return."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def reset_peak(self) -> None:
        self.peak_used = self.num_used

    def take(self) -> int:
        """Return a free block and make the caller its first holder. Raises IndexError if no block is free."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            del self._by_content[self._content.pop(block)], self._serials[block]
        else:
            raise IndexError(f"all {self.num_blocks} blocks are held")
        self._add_reference(block)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block of a row. Blocks without holders become free. A row's last blocks are freed
        first, so they are reused first. This is best because `match` finds a block only if all blocks before it are
        still known."""
        for block in reversed(blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                if block in self._content:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Unregister the content of those blocks in `blocks` that only the caller's row holds, so that `match` no
        longer finds them. Return these blocks. They still belong to the row."""
        own = [block for block in blocks if self._reference_counts[block] == 1]
        for block in own:
            if block in self._content:
                del self._by_content[self._content.pop(block)], self._serials[block]
        return own

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that already hold the beginning of `tokens`, and count one more holder of each. Only blocks
        that `publish` has registered are found. `publish` registers full blocks only."""
        blocks: list[int] = []
        serial = _NO_PARENT
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = self._by_content.get((serial, tuple(tokens[start : start + BLOCK_TOKENS])))
            if block is None:
                break
            self._evictable.pop(block, None)
            self._add_reference(block)
            blocks.append(block)
            serial = self._serials[block]
        return blocks

    def publish(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Let `match` find the full blocks that hold the beginning of `tokens`. Rows of later batches may read these
        blocks, and rows of the same batch too, since a batch writes its keys before it reads."""
        serial = _NO_PARENT
        for i, block in enumerate(blocks[: len(tokens) // BLOCK_TOKENS]):
            if block not in self._content:
                content = (serial, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]))
                if content in self._by_content:
                    return  # another row has published the same tokens meanwhile; its blocks stay the known ones
                self._by_content[content] = block
                self._content[block] = content
                self._serials[block] = self._next_serial
                self._next_serial += 1
            serial = self._serials[block]

    def forget(self) -> None:
        """Forget the content of all blocks, since the weights changed or the memory was released."""
        self._free += self._evictable
        for known in (self._evictable, self._by_content, self._content, self._serials):
            known.clear()

    def _add_reference(self, block: int) -> None:
        self._reference_counts[block] += 1
        self.peak_used = max(self.peak_used, self.num_used)

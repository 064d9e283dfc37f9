"""The keys and values of the rows in flight: memory in blocks, and who holds which.

May import numpy, torch, stages.engines.embedded.kernels (arena and paging).

Shape letters: P blocks, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from stages.engines.embedded.kernels.arena import Slabs
from stages.engines.embedded.kernels.paging import BLOCK_TOKENS, NO_BLOCK, blocks_for

_BEGINNING = 0
"""Stands for the block before a prompt's first."""
_Content = tuple[int, tuple[int, ...]]
"""What a known block holds: serial number of the block before it, its own tokens."""


class KVCache:
    """Owns the memory: per layer keys [P, K, D, BLOCK_TOKENS] and values [P, K, BLOCK_TOKENS, D]. Keys lie the way a
    block's scores are computed side by side. Of the weights' dtype: decoding many or long rows is mostly reading the
    cache, and what it holds came out of a product of such numbers. On a CPU the system may back it with huge pages."""

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
        """Takes the memory (again), unless it is there. Zeros: a masked position is multiplied by 0, which NaN would
        survive."""
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
        """Gives the memory back."""
        self.layers = []

    def read(self, blocks: Sequence[int], num_positions: int) -> Float[np.ndarray, "layers 2 K positions D"]:
        """A copy of the first positions of a row that holds these blocks, in a form that says nothing of blocks."""
        index = torch.tensor(blocks[: blocks_for(num_positions)], device=self._device)
        copied = torch.stack(
            [
                torch.stack([keys[index].permute(1, 0, 3, 2), values[index].permute(1, 0, 2, 3)])
                for keys, values in self.layers
            ]
        )
        return copied.flatten(3, 4)[:, :, :, :num_positions].contiguous().float().cpu().numpy()

    def write(self, blocks: Sequence[int], copied: Float[np.ndarray, "layers 2 K positions D"]) -> None:
        """What `read` read, into a row's blocks; positions after the last are 0."""
        layers, both, heads, positions, dim = copied.shape
        index = torch.tensor(blocks[: blocks_for(positions)], device=self._device)
        whole = torch.zeros(layers, both, heads, len(index) * BLOCK_TOKENS, dim, dtype=self._dtype)
        whole[:, :, :, :positions] = torch.from_numpy(np.array(copied))  # torch warns of arrays it must not write to
        in_blocks = whole.unflatten(3, (len(index), BLOCK_TOKENS)).to(self._device)
        for (keys, values), (new_keys, new_values) in zip(self.layers, in_blocks, strict=True):
            keys[index] = new_keys.permute(1, 0, 3, 2)
            values[index] = new_values.permute(1, 0, 2, 3)


class BlockPool:
    """Owns the numbers of the blocks: which are free, how many rows hold each, and which hold the start of a prompt.

    Rows whose prompts begin alike share the full blocks of that beginning. A shared block is never written again, so
    nothing has to be copied. A block is known by what it continues (the serial number of the block before it, which is
    never given twice) and its own tokens. When its last holder lets go it stays known, and is taken for something else
    only when no other block is free, the longest unused first: so rows of a prompt also share when they do not meet."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NO_BLOCK, -1))
        """Free, and not known to hold anything."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free, but still known; longest unused first."""
        self._holders = [0] * (num_blocks + 1)
        self._by_content: dict[_Content, int] = {}
        self._content: dict[int, _Content] = {}
        self._serials: dict[int, int] = {}
        """Of known blocks."""
        self._next_serial = _BEGINNING + 1
        self.peak_used = 0
        """Blocks held at once since `reset_peak`."""

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def reset_peak(self) -> None:
        self.peak_used = self.num_used

    def take(self) -> int:
        """A free block, now held once. Raises IndexError if there is none."""
        if self._free:
            block = self._free.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            del self._by_content[self._content.pop(block)], self._serials[block]
        else:
            raise IndexError(f"all {self.num_blocks} blocks are held")
        self._hold(block)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a row; what nobody holds is free. Ends before beginnings: an end is of no
        use without its beginning."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._content:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """What blocks hold is of no use: those that nobody else holds are not known any more, and returned. Still held
        by whoever asks."""
        own = [block for block in blocks if self._holders[block] == 1]
        for block in own:
            if block in self._content:
                del self._by_content[self._content.pop(block)], self._serials[block]
        return own

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The known blocks that hold the beginning of `tokens` (full blocks only), now held once more each."""
        blocks: list[int] = []
        serial = _BEGINNING
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = self._by_content.get((serial, tuple(tokens[start : start + BLOCK_TOKENS])))
            if block is None:
                break
            self._kept.pop(block, None)
            self._hold(block)
            blocks.append(block)
            serial = self._serials[block]
        return blocks

    def publish(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Makes the full blocks that hold the beginning of `tokens` known to `match`. From now on they may be read by
        others as soon as the batch that computes them has written its keys."""
        serial = _BEGINNING
        for i, block in enumerate(blocks[: len(tokens) // BLOCK_TOKENS]):
            if block not in self._content:
                content = (serial, tuple(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]))
                if content in self._by_content:
                    return  # another row computed the same meanwhile: its blocks are the known ones
                self._by_content[content] = block
                self._content[block] = content
                self._serials[block] = self._next_serial
                self._next_serial += 1
            serial = self._serials[block]

    def forget(self) -> None:
        """What blocks hold is no longer true (the weights changed, the memory was given back): nobody may share
        them."""
        self._free += self._kept
        for known in (self._kept, self._by_content, self._content, self._serials):
            known.clear()

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self.peak_used = max(self.peak_used, self.num_used)

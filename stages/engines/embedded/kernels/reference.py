"""The kernels in plain torch, for any device.

On a CPU the results for a token have the same bits in any batch, because each query position is an entry of its own in
a batched product. For this, keys and values must be copied before they are read. The native kernels read them in place.

Shape letters: see `kernels.protocol`. In addition: T positions that are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt64

from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.kernels.packed import Packed, linear, pack, unpack
from stages.engines.embedded.kernels.protocol import Angles, Tokens, TreePaths
from stages.engines.embedded.sampling import sample, sample_part

_GATHERED_BYTES = 64 * 2**20
"""Maximum number of bytes of keys and values that are copied at a time, unless one token alone needs more."""


@dataclass(frozen=True)
class TorchKernels:
    """The kernels in plain torch. They implement `Kernels`."""

    name: str = "torch"
    supports_trees: bool = True

    def pack(
        self, parts: Mapping[int, torch.Tensor], dtype: torch.dtype, *, old: Packed | None = None, wide: bool = False
    ) -> Packed:
        assert old is None or isinstance(old, torch.Tensor)
        return pack(parts, dtype, old, wide)

    def unpack(self, packed: Packed) -> torch.Tensor:
        assert isinstance(packed, torch.Tensor)
        return unpack(packed)

    def linear(self, x: torch.Tensor, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(packed, torch.Tensor)
        return linear(x, packed, dtype)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        if delta is not None:
            x.add_(delta)
        return F.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)

    def attend(
        self, qkv: torch.Tensor, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        _, kv_heads, dim, _ = keys.shape
        num = qkv.shape[0]
        parts = qkv.float().view(num, -1, dim)
        rotated = parts.shape[1] - kv_heads
        heads = rotated - kv_heads
        turned = _rotate(parts[:, :rotated], angles.cos[tokens.positions], angles.sin[tokens.positions])

        # blocks of one head, numbered through the cache: [N, K, blocks of the row]
        tables, tree = tokens.tables.long()[tokens.rows.long()], tokens.tree_paths
        head = torch.arange(kv_heads, device=qkv.device)
        blocks = tables[:, None, : blocks_for(tokens.longest)] * kv_heads + head[:, None]
        cells = tokens.positions if tree is None else tree.cells
        own = (tables.gather(1, cells[:, None] // BLOCK_TOKENS) * kv_heads + head).reshape(-1)
        offset = (cells % BLOCK_TOKENS).repeat_interleave(kv_heads)
        keys, values = keys.view(-1, dim, BLOCK_TOKENS), values.view(-1, BLOCK_TOKENS, dim)
        keys[own, :, offset] = turned[:, heads:].reshape(-1, dim).to(keys.dtype)
        values[own, offset] = parts[:, rotated:].reshape(-1, dim).to(values.dtype)

        span = blocks.shape[2] * BLOCK_TOKENS
        later = torch.arange(span, device=qkv.device) > tokens.positions[:, None]
        mask = torch.zeros(num, span, dtype=torch.float32, device=qkv.device).masked_fill_(later, float("-inf"))
        queries = turned[:, :heads].reshape(num, kv_heads, -1, dim)
        out = torch.empty(num, heads * dim, dtype=qkv.dtype, device=qkv.device)
        step = max(1, _GATHERED_BYTES // (2 * kv_heads * span * dim * mask.dtype.itemsize))
        for start in range(0, num, step):
            part = slice(start, start + step)
            read_keys, read_values = keys[blocks[part]].float(), values[blocks[part]].float()
            if tree is not None:
                for n in range(*part.indices(num)):
                    _put_in_place(tree, tokens, n, keys, values, read_keys[n - start], read_values[n - start])
            out[part] = _read(queries[part], read_keys, read_values, mask[part])
        return out

    def end_threads(self) -> None:
        """Do nothing: torch gives no access to its threads."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def choose(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits, temperatures, keys)

    def choose_part(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"], first: int, vocab: int
    ) -> torch.Tensor:
        return sample_part(logits, temperatures, keys, first, vocab)


def _put_in_place(
    tree: TreePaths,
    tokens: Tokens,
    n: int,
    keys: Float[torch.Tensor, "P*K D 16"],
    values: Float[torch.Tensor, "P*K 16 D"],
    read_keys: Float[torch.Tensor, "K blocks D 16"],
    read_values: Float[torch.Tensor, "K blocks 16 D"],
) -> None:
    """Copy the keys and values on token n's path through the tree of guesses. In the cache (`keys`, `values`) they lie
    at the places that `tree` lists. In `read_keys` and `read_values` they are written at their positions."""
    kv_heads = len(read_keys)
    start, table = int(tree.starts[n]), tokens.tables[tokens.rows[n].long()].long()
    for position in range(start, int(tokens.positions[n]) + 1):
        cell = int(tree.paths[n, position - start])
        block = table[cell // BLOCK_TOKENS] * kv_heads + torch.arange(kv_heads, device=keys.device)
        place, offset = divmod(position, BLOCK_TOKENS)
        read_keys[:, place, :, offset] = keys[block, :, cell % BLOCK_TOKENS].float()
        read_values[:, place, offset] = values[block, cell % BLOCK_TOKENS].float()


def _read(
    queries: Float[torch.Tensor, "N K group D"],
    keys: Float[torch.Tensor, "N K blocks D 16"],
    values: Float[torch.Tensor, "N K blocks 16 D"],
    mask: Float[torch.Tensor, "N T"],
) -> Float[torch.Tensor, "N H*D"]:
    """Return softmax(Q K^T / sqrt(D) + mask) V, by batched products. It does not use `scaled_dot_product_attention`,
    whose results on a CPU depend on the number of threads."""
    num, kv_heads, group, dim = queries.shape
    span, num_blocks = mask.shape[1], keys.shape[2]
    per_block = queries[:, :, None].expand(-1, -1, num_blocks, -1, -1).reshape(-1, group, dim)
    scores = torch.bmm(per_block, keys.view(-1, dim, BLOCK_TOKENS)).view(num, kv_heads, num_blocks, group, BLOCK_TOKENS)
    scores = scores.transpose(2, 3).reshape(num, kv_heads, group, span).mul_(dim**-0.5).add_(mask[:, None, None])
    weights = scores.softmax(-1).view(-1, group, span)
    if group == 1:  # torch sums a product of one row in an order that depends on the batch's width: see `packed`
        weights = weights.expand(-1, 2, -1)
    return torch.bmm(weights, values.view(-1, span, dim))[:, :group].reshape(num, -1)


def _rotate(x: Float[torch.Tensor, "N heads D"], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding in Hugging Face's order: number i of a head's first half is a, of its second half
    b."""
    halves = x.view(x.shape[0], x.shape[1], 2, -1)
    signed = torch.stack([-sin, sin], dim=1)[:, None]
    return torch.addcmul(halves * cos[:, None, None], halves.flip(2), signed).view(x.shape)

"""Whether what the kernels in C are given is of the sizes that they read and write. Every function raises ValueError,
naming what is not as it should be. Values (positions, blocks) are the scheduler's to answer for, and not looked at.

Shape letters: see `kernels.protocol`. May import numpy, torch, stages.native and kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from stages.engines.embedded.kernels.packed import NativeWeight
from stages.engines.embedded.kernels.paging import BLOCK_TOKENS
from stages.engines.embedded.kernels.protocol import Angles, Block, HeadWeights, Tokens
from stages.native.arguments import KINDS, expect, require

FLOATS = tuple(KINDS)
_INT32, _INT64 = (torch.int32,), (torch.int64,)


def check_weights(
    block: Block, qkv: NativeWeight, out: NativeWeight, gate_up: NativeWeight, down: NativeWeight
) -> None:
    """Of one block: each product's output is as wide as the next one's input."""
    width = qkv.in_features
    require(out.out_features == width, f"out gives {out.out_features} numbers, the block takes {width}")
    require(gate_up.in_features == width, f"gate_up takes {gate_up.in_features} numbers, the block {width}")
    require(down.out_features == width, f"down gives {down.out_features} numbers, the block takes {width}")
    gated = 2 * down.in_features
    require(gate_up.out_features == gated, f"gate_up gives {gate_up.out_features} numbers, down takes half of {gated}")
    dtypes = {weight.dtype for weight in (qkv, out, gate_up, down)}
    require(len(dtypes) == 1, f"the weights of a block have several dtypes: {sorted(map(str, dtypes))}")
    expect("attention_norm", block.attention_norm, (width,))
    expect("mlp_norm", block.mlp_norm, (width,))


def check_heads(num_heads: int, width: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`width`: of queries, keys and values together. The cache's shape says how many key/value heads there are."""
    require(keys.ndim == 4, f"keys have {keys.ndim} axes, and not 4")
    pool, kv_heads, dim, _ = keys.shape
    expect("keys", keys, (pool, kv_heads, dim, BLOCK_TOKENS), FLOATS)
    expect("values", values, (pool, kv_heads, BLOCK_TOKENS, dim), (keys.dtype,))
    require(dim > 0 and dim % 2 == 0, f"heads of {dim} numbers cannot be turned in pairs")
    shared = kv_heads > 0 and num_heads > 0 and num_heads % kv_heads == 0
    require(shared, f"{num_heads} query heads cannot share {kv_heads} key/value heads equally")
    wanted = (num_heads + 2 * kv_heads) * dim
    require(width == wanted, f"qkv is {width} wide; {num_heads} + 2 x {kv_heads} heads of {dim} take {wanted}")


def check_head_vectors(block: Block, num_heads: int, kv_heads: int, dim: int) -> None:
    """Biases and norms of queries and keys, where the model has such."""
    require((block.q_norm is None) == (block.k_norm is None), "there is one of q_norm and k_norm without the other")
    if block.qkv_bias is not None:
        expect("qkv_bias", block.qkv_bias, ((num_heads + 2 * kv_heads) * dim,))
    if block.q_norm is not None and block.k_norm is not None:
        expect("q_norm", block.q_norm, (dim,))
        expect("k_norm", block.k_norm, (dim,))


def check_tokens(num: int, tokens: Tokens, angles: Angles, dim: int) -> None:
    """Of a batch of `num` tokens with heads of `dim`."""
    expect("positions", tokens.positions, (num,), _INT64)
    expect("rows", tokens.rows, (num,), _INT32)
    require(tokens.tables.ndim == 2, f"tables have {tokens.tables.ndim} axes, and not 2")
    expect("tables", tokens.tables, tokens.tables.shape, _INT32)
    covered = tokens.tables.shape[1] * BLOCK_TOKENS
    require(covered >= tokens.longest, f"the longest row has {tokens.longest} positions, tables hold {covered}")
    known = angles.cos.shape[0]
    require(known >= tokens.longest, f"the longest row has {tokens.longest} positions, there are angles of {known}")
    expect("cos", angles.cos, (known, dim // 2))
    expect("sin", angles.sin, (known, dim // 2))
    if (tree := tokens.tree_paths) is not None:
        expect("cells", tree.cells, (num,), _INT64)
        expect("starts", tree.starts, (num,), _INT64)
        require(tree.paths.ndim == 2, f"paths have {tree.paths.ndim} axes, and not 2")
        expect("paths", tree.paths, (num, tree.paths.shape[1]), _INT64)


def check_draws(num: int, num_temperatures: int, keys: np.ndarray) -> None:
    """Of `num` draws."""
    require(num_temperatures == num, f"{num_temperatures} temperatures for {num} draws")
    require(keys.dtype == np.uint64, f"keys of noise are uint64, not {keys.dtype}")
    require(keys.size == num, f"{keys.size} keys of noise for {num} draws")


def check_draft_head(
    head: HeadWeights, up: NativeWeight, down: NativeWeight, out: NativeWeight, state: torch.Tensor, slots: np.ndarray
) -> None:
    """Of `unroll`."""
    require(state.ndim == 2, f"state has {state.ndim} axes, and not 2")
    rows, width = state.shape
    num_slots = out.out_features
    expect("state", state, (rows, width))
    found = [(weight.out_features, weight.in_features) for weight in (up, down, out)]
    wanted = [(2 * width, 2 * width), (width, width), (num_slots, width)]
    require(found == wanted, f"the head's weights are {found}; wanted: {wanted}")
    require(len({weight.dtype for weight in (up, down, out)}) == 1, "the head's weights have several dtypes")
    expect("embedding", head.embedding, (num_slots + 1, width))
    expect("words", head.words, (1, num_slots), _INT32)
    require(
        slots.dtype == np.int64 and slots.shape == (rows,), f"slots are {slots.dtype} {slots.shape}, of {rows} rows"
    )
    known = not slots.size or (slots.min() >= 0 and slots.max() <= num_slots)
    require(bool(known), f"slots are 0 to {num_slots}")

"""What a forward pass needs between its matrix products, behind one protocol: `torch_kernels` (any device) and
`native_kernels` (CPUs with a C compiler). May import torch.

Shape letters: N tokens of a pass, R rows, W blocks of the longest row, H query heads, K key/value heads, D head
dimension, C hidden size, F size of the MLP, V vocabulary, P blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Int64, UInt64


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens that one pass computes, of any number of rows: prompts, single new tokens, drafts."""

    ids: Int64[torch.Tensor, " N"]
    positions: Int64[torch.Tensor, " N"]
    """A token attends to its row's positions 0 up to its own."""
    rows: Int32[torch.Tensor, " N"]
    """Which row of `tables` a token belongs to."""
    tables: Int32[torch.Tensor, "R W"]
    """Block of the cache that holds each 16 positions of a row."""
    longest: int
    """Largest position + 1."""


@dataclass(frozen=True)
class Angles:
    """Of the rotary embedding."""

    cos: Float32[torch.Tensor, "positions D//2"]
    sin: Float32[torch.Tensor, "positions D//2"]


class Kernels(Protocol):
    """Every function's result for one token depends on nothing but that token's own row, bit for bit on a CPU."""

    @property
    def name(self) -> str: ...

    def add_norm(
        self,
        x: Float32[torch.Tensor, "N C"],
        delta: Float[torch.Tensor, "N C"] | None,
        weight: Float32[torch.Tensor, " C"],
        eps: float,
        dtype: torch.dtype,
    ) -> Float[torch.Tensor, "N C"]:
        """Adds `delta` to the residual stream `x` in place; returns x / sqrt(mean(x²) + eps) * weight as `dtype`."""
        ...

    def attend(
        self,
        qkv: Float[torch.Tensor, "N (H+2K)*D"],
        angles: Angles,
        tokens: Tokens,
        keys: Float32[torch.Tensor, "P K D 16"],
        values: Float32[torch.Tensor, "P K 16 D"],
    ) -> Float[torch.Tensor, "N H*D"]:
        """Turns queries and keys by their positions' angles, writes the keys and values of all tokens to the cache,
        then reads: softmax(q K^T / sqrt(D)) V, in float32. The result has the dtype of `qkv`."""
        ...

    def gate(self, gate_up: Float[torch.Tensor, "N 2*F"]) -> Float[torch.Tensor, "N F"]:
        """silu(gate) * up."""
        ...

    def choose(
        self, logits: Float32[torch.Tensor, "N V"], temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """The token of each distribution softmax(logits / temperature) that its noise picks, and its log-prob; see
        `sampling`. May overwrite `logits`."""
        ...

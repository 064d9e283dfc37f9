"""What a forward pass is made of, behind one protocol: `reference` (plain torch, any device), `cpu` (C, where there is
a compiler) and `cuda` (Triton). May import numpy, torch, stages.engines.embedded.kernels.packed.

Shape letters: N tokens of a batch, R rows, W blocks of the longest row, H query heads, K key/value heads, D head
dimension, C hidden size, F size of the MLP, V vocabulary, P blocks of the cache, B banned tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64, UInt64

from stages.engines.embedded.kernels.packed import Packed


@dataclass(frozen=True, eq=False, kw_only=True)
class TreePaths:
    """Where the last keys of each token lie, its own the last: those of a tree's guesses lie side by side, but their
    positions are those of their paths (see `draft_tree`)."""

    cells: Int64[torch.Tensor, " N"]
    """Place in its row where each token's key is written; its position, for tokens whose keys are all in place."""
    starts: Int64[torch.Tensor, " N"]
    """The first position whose key is not in place; after the token's own, for those."""
    paths: Int64[torch.Tensor, "N L"]
    """Places of the keys of positions starts, starts + 1, ... up to the token's own; then anything."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The tokens that one batch computes, of any number of rows: prompts, single new tokens, drafts."""

    ids: Int64[torch.Tensor, " N"]
    positions: Int64[torch.Tensor, " N"]
    """A token attends to its row's positions 0 up to its own."""
    rows: Int32[torch.Tensor, " N"]
    """Which row of `tables` a token belongs to."""
    tables: Int32[torch.Tensor, "R W"]
    """Block of the cache that holds each 16 positions of a row."""
    longest: int
    """Largest position + 1, or a bound of it."""
    tree_paths: TreePaths | None = None
    """Where tokens attend to keys that lie elsewhere than at their positions: guesses beside the main chain."""
    independent: bool = False
    """No token reads a key that another one of the batch writes, so that keys may be written while others are read."""


class PagedCache(Protocol):
    """The keys and values that a forward pass reads and writes (`cache.KVCache` holds them)."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Of each block of the model keys [P, K, D, 16] and values [P, K, 16, D]."""


@dataclass(frozen=True, kw_only=True)
class Angles:
    """Of the rotary embedding."""

    cos: Float32[torch.Tensor, "positions D//2"]
    sin: Float32[torch.Tensor, "positions D//2"]


class Kernels(Protocol):
    """Every function's result for one token depends on nothing but that token's own row, bit for bit on a CPU."""

    @property
    def name(self) -> str: ...

    @property
    def supports_trees(self) -> bool:
        """Whether batches may have `Tokens.tree_paths`."""
        ...

    def pack(
        self,
        parts: Mapping[int, Float[torch.Tensor, "rows in"]],
        dtype: torch.dtype,
        *,
        old: Packed | None = None,
        wide: bool = False,
    ) -> Packed:
        """The weight that consists of `parts`, each from the row of its key on, rounded to `dtype`, as `linear` takes
        it; or `old` with those rows replaced, in new memory. `wide`: products with it may be asked for in float32.
        Raises NotFiniteError."""
        ...

    def unpack(self, packed: Packed) -> Float[torch.Tensor, "out in"]:
        """The exact inverse of `pack`."""
        ...

    def linear(
        self, x: Float[torch.Tensor, "N in"], packed: Packed, dtype: torch.dtype
    ) -> Float[torch.Tensor, "N out"]:
        """x W^T, summed in float32, as `dtype`: the weight's own, or float32 if it was packed `wide`."""
        ...

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
        keys: Float[torch.Tensor, "P K D 16"],
        values: Float[torch.Tensor, "P K 16 D"],
    ) -> Float[torch.Tensor, "N H*D"]:
        """Turns queries and keys by their positions' angles, writes the keys and values of all tokens to the cache,
        then reads: softmax(q K^T / sqrt(D)) V, in float32 (the operands of the two products may be rounded to the
        cache's dtype). The result has the dtype of `qkv`."""
        ...

    def end_threads(self) -> None:
        """Ends the threads that the calling thread had at its disposal, where they would slow those of others."""
        ...

    def gate(self, gate_up: Float[torch.Tensor, "N 2*F"]) -> Float[torch.Tensor, "N F"]:
        """silu(gate) * up."""
        ...

    def choose(
        self, logits: Float32[torch.Tensor, "N V"], temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """The token of each distribution softmax(logits / temperature) that its noise picks, and its log-prob; see
        `sampling.draw`. May overwrite `logits`."""
        ...

    def choose_part(
        self,
        logits: Float32[torch.Tensor, "N part"],
        temperatures: list[float],
        keys: UInt64[np.ndarray, " N"],
        first: int,
        vocab: int,
    ) -> Float64[torch.Tensor, "N 5"]:
        """What is to be known of the tokens first, first + 1, ... of `vocab` to choose among all: see
        `sampling.draw.join_parts`. May overwrite `logits`."""
        ...


@dataclass(frozen=True)
class Block:
    """One transformer block; linears packed and fused. All vectors are float32."""

    attention_norm: torch.Tensor
    qkv: Packed
    out: Packed
    mlp_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    qkv_bias: Float32[torch.Tensor, " (H+2K)*D"] | None = None
    """Added to what `qkv` gives."""
    q_norm: Float32[torch.Tensor, " D"] | None = None
    """Every query head goes through an RMS norm of this weight before it is turned."""
    k_norm: Float32[torch.Tensor, " D"] | None = None
    """The same of every key head; there if and only if `q_norm` is."""


@runtime_checkable
class FusedKernels(Kernels, Protocol):
    """Kernels that compute half a block, or all of them, in one call. What lies between two operations is not rounded,
    but for the operands of the products."""

    def attention(
        self,
        x: Float32[torch.Tensor, "N C"],
        block: Block,
        eps: float,
        angles: Angles,
        tokens: Tokens,
        keys: Float32[torch.Tensor, "P K D 16"],
        values: Float32[torch.Tensor, "P K 16 D"],
        into: Float32[torch.Tensor, "N C"],
    ) -> None:
        """into += linear(attend(head_norms(linear(norm(x), qkv) + qkv_bias)), out). `into` may be `x` itself."""
        ...

    def mlp(
        self, x: Float32[torch.Tensor, "N C"], block: Block, eps: float, into: Float32[torch.Tensor, "N C"]
    ) -> None:
        """into += linear(gate(linear(norm(x), gate_up)), down). `into` may be `x` itself."""
        ...

    def run_blocks(
        self,
        x: Float32[torch.Tensor, "N C"],
        blocks: tuple[Block, ...],
        eps: float,
        angles: Angles,
        tokens: Tokens,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Both, for each block in turn, with `x` as `into`. `layers`: keys and values of each."""
        ...


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Of the draft head, ready to run; it guesses among T tokens, its slots."""

    up: Packed
    down: Packed
    """Times the scale a."""
    out: Packed
    embedding: Float32[torch.Tensor, "T+1 C"]
    """The last row stands for all other tokens."""
    words: Int32[torch.Tensor, "1 T"]
    """Of the noise."""


@dataclass(frozen=True, eq=False)
class Guessed:
    """Guesses for `depth` positions of R rows: of each position the G best ones, the best first."""

    slots: Int64[np.ndarray, "R depth G"]
    parents: Int64[np.ndarray, "R depth G"]
    """Which of the guesses for the position before each follows; 0 at the first position."""
    ranks: Int64[np.ndarray, "R depth G"]
    """0: the best one behind its parent, 1: the second, ...; -1: there are fewer guesses; the rest means nothing."""
    gaps: Float32[np.ndarray, "R depth G"]
    """How far it is behind the best, in logits, noise included; of the best, how far it is ahead of the second."""


@runtime_checkable
class DraftingKernels(Protocol):
    """Kernels that make all positions of all drafts in one call."""

    def unroll(
        self,
        head: HeadWeights,
        state: Float32[torch.Tensor, "R C"],
        slots: Int64[np.ndarray, " R"],
        depth: int,
        branches: int,
        temperatures: Sequence[float],
        keys: UInt64[np.ndarray, "R depth"],
        banned: Sequence[Sequence[int]],
    ) -> Guessed:
        """See `drafts.draft_head.unroll`."""
        ...


@runtime_checkable
class DeviceKernels(Protocol):
    """Beside `Kernels`, what it takes for a whole batch to read nothing from the host, so that it can be captured."""

    def choose_on_device(
        self,
        logits: Float32[torch.Tensor, "N V"],
        temperatures: Float32[torch.Tensor, " N"],
        keys: Int32[torch.Tensor, "N 2"],
        banned: Int32[torch.Tensor, "N B"],
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """`choose` with everything in tensors: the halves of each key, low first, and tokens that a draw cannot give
        (negative: none)."""
        ...


class NoTritonKernelsError(RuntimeError):
    """Triton is not there, or cannot run on the device."""

"""The protocol of a forward pass's operations, and the records that they take.

`reference` implements it in plain torch for any device, `cpu` in C (if there is a compiler), `cuda` in Triton. Keys and
values are divided into blocks of 16 positions (`blocks`).

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
    """Places of the last keys that each token reads, its own included. A place is an index into the keys of the token's
    row as the cache holds them. The guesses of a tree are written one after the other, while their positions count
    along their paths. So a guess's place may differ from its position (see `rows`)."""

    cells: Int64[torch.Tensor, " N"]
    """Place where each token's key is written. It equals the token's position if all keys that the token reads are in
    place."""
    starts: Int64[torch.Tensor, " N"]
    """First position whose key is not in place; if all are, the position after the token's own."""
    paths: Int64[torch.Tensor, "N L"]
    """Places of the keys of positions starts, starts + 1, ... up to the token's own; the remaining entries mean
    nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The tokens that one batch computes, of any number of rows: prompts, single new tokens, guesses."""

    ids: Int64[torch.Tensor, " N"]
    positions: Int64[torch.Tensor, " N"]
    """A token attends to its row's positions from 0 to its own."""
    rows: Int32[torch.Tensor, " N"]
    """Row of `tables` that each token belongs to."""
    tables: Int32[torch.Tensor, "R W"]
    """Cache block of each 16 positions of a row."""
    longest: int
    """Largest position + 1, or an upper bound."""
    tree_paths: TreePaths | None = None
    """Places of keys, if the batch has guesses outside a main chain; None if all keys are in place."""
    independent: bool = False
    """True if no token reads a key that another token of the batch writes, so keys may be written while others are
    read."""


class PagedCache(Protocol):
    """The keys and values that a forward pass reads and writes (`cache.KVCache` holds them)."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """Per block of the model: keys [P, K, D, 16] and values [P, K, 16, D]."""


@dataclass(frozen=True, kw_only=True)
class Angles:
    """Cosines and sines of the rotary embedding."""

    cos: Float32[torch.Tensor, "positions D//2"]
    sin: Float32[torch.Tensor, "positions D//2"]


class Kernels(Protocol):
    """The operations of a forward pass. On a CPU a token's results depend, bit for bit, on its own row alone."""

    @property
    def name(self) -> str: ...

    @property
    def supports_trees(self) -> bool:
        """True if batches may have `Tokens.tree_paths`."""
        ...

    def pack(
        self,
        parts: Mapping[int, Float[torch.Tensor, "rows in"]],
        dtype: torch.dtype,
        *,
        old: Packed | None = None,
        wide: bool = False,
    ) -> Packed:
        """Return a weight made of `parts`, rounded to `dtype` and packed for `linear`. Each key of `parts` is the row
        at which its part begins. With `old`, return a copy of `old` with these rows replaced. `wide`: products of the
        weight may be requested in float32. Raises NotFiniteError."""
        ...

    def unpack(self, packed: Packed) -> Float[torch.Tensor, "out in"]:
        """Invert `pack` exactly."""
        ...

    def linear(
        self, x: Float[torch.Tensor, "N in"], packed: Packed, dtype: torch.dtype
    ) -> Float[torch.Tensor, "N out"]:
        """Return x W^T, summed in float32, as `dtype`: the weight's own, or float32 if it was packed `wide`."""
        ...

    def add_norm(
        self,
        x: Float32[torch.Tensor, "N C"],
        delta: Float[torch.Tensor, "N C"] | None,
        weight: Float32[torch.Tensor, " C"],
        eps: float,
        dtype: torch.dtype,
    ) -> Float[torch.Tensor, "N C"]:
        """Add `delta` to the residual stream `x` in place. Return x / sqrt(mean(x²) + eps) * weight as `dtype`."""
        ...

    def attend(
        self,
        qkv: Float[torch.Tensor, "N (H+2K)*D"],
        angles: Angles,
        tokens: Tokens,
        keys: Float[torch.Tensor, "P K D 16"],
        values: Float[torch.Tensor, "P K 16 D"],
    ) -> Float[torch.Tensor, "N H*D"]:
        """Rotate queries and keys by their positions' angles, write the keys and values of all tokens to the cache,
        then return softmax(q K^T / sqrt(D)) V, in float32 (the operands of the two products may be rounded to the
        cache's dtype). The result has the dtype of `qkv`."""
        ...

    def end_threads(self) -> None:
        """End the calling thread's helper threads, if they would slow those of other threads."""
        ...

    def gate(self, gate_up: Float[torch.Tensor, "N 2*F"]) -> Float[torch.Tensor, "N F"]:
        """Return silu(gate) * up."""
        ...

    def choose(
        self, logits: Float32[torch.Tensor, "N V"], temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """Draw a token from each softmax(logits / temperature), with the noise of its key. Return tokens and log-probs;
        see `sampling.sample`. May overwrite `logits`."""
        ...

    def choose_part(
        self,
        logits: Float32[torch.Tensor, "N part"],
        temperatures: list[float],
        keys: UInt64[np.ndarray, " N"],
        first: int,
        vocab: int,
    ) -> Float64[torch.Tensor, "N 5"]:
        """Return the contribution of tokens first, first + 1, ... of `vocab` to the draw from all tokens; see
        `sampling.join_parts`. May overwrite `logits`."""
        ...


@dataclass(frozen=True)
class Block:
    """One transformer block, its linears packed and fused. All vectors are float32."""

    attention_norm: torch.Tensor
    qkv: Packed
    out: Packed
    mlp_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    qkv_bias: Float32[torch.Tensor, " (H+2K)*D"] | None = None
    """Bias of the output of `qkv`."""
    q_norm: Float32[torch.Tensor, " D"] | None = None
    """Weight of the RMS norm of every query head, before the rotation."""
    k_norm: Float32[torch.Tensor, " D"] | None = None
    """Weight of the RMS norm of every key head; given if and only if `q_norm` is."""


@runtime_checkable
class FusedKernels(Kernels, Protocol):
    """Kernels that compute half a block, or all blocks, in one call. Only the operands of the products are rounded."""

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
        """Compute into += linear(attend(head_norms(linear(norm(x), qkv) + qkv_bias)), out). `into` may be `x`."""
        ...

    def mlp(
        self, x: Float32[torch.Tensor, "N C"], block: Block, eps: float, into: Float32[torch.Tensor, "N C"]
    ) -> None:
        """Compute into += linear(gate(linear(norm(x), gate_up)), down). `into` may be `x`."""
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
        """Apply `attention` and `mlp` of each block in turn, with `x` as `into`. `layers`: keys and values per
        block."""
        ...


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Weights of the draft head, ready to run. It guesses among T of the vocabulary's tokens, numbered by draft ids."""

    up: Packed
    down: Packed
    """Multiplied by the scale a of `drafts.draft_head`."""
    out: Packed
    embedding: Float32[torch.Tensor, "T+1 C"]
    """The last row stands for all other tokens."""
    words: Int32[torch.Tensor, "1 T"]
    """Token words of the noise."""


@dataclass(frozen=True, eq=False)
class Guessed:
    """Guesses for `depth` positions of R rows: the G best ones per position, the best first."""

    draft_ids: Int64[np.ndarray, "R depth G"]
    parents: Int64[np.ndarray, "R depth G"]
    """Index of the guess that each one follows, among the guesses of the position before; 0 at the first position."""
    ranks: Int64[np.ndarray, "R depth G"]
    """0: the best guess after its parent, 1: the second, ...; -1: there is no guess, and the other arrays mean
    nothing."""
    gaps: Float32[np.ndarray, "R depth G"]
    """Distance to the best guess, in logits, noise included; for the best one, its lead over the second."""


@runtime_checkable
class DraftingKernels(Protocol):
    """Kernels that make all positions of all drafts in one call."""

    def unroll(
        self,
        head: HeadWeights,
        state: Float32[torch.Tensor, "R C"],
        draft_ids: Int64[np.ndarray, " R"],
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
    """Kernels with which a whole batch reads nothing from the host, so that it can be captured as a CUDA graph."""

    def choose_on_device(
        self,
        logits: Float32[torch.Tensor, "N V"],
        temperatures: Float32[torch.Tensor, " N"],
        keys: Int32[torch.Tensor, "N 2"],
        banned: Int32[torch.Tensor, "N B"],
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """Do as `choose`, with all arguments as tensors. `keys`: the halves of each key, low first. `banned`: the
        tokens that a draw cannot give, padded with negative numbers."""
        ...


class NoTritonKernelsError(RuntimeError):
    """Triton is not installed, or cannot run on the device."""

"""The protocol `Kernels` for the operations of a forward pass, and the records that these operations take.

There are three implementations: `reference` in plain torch for any device, `cpu` in C (if there is a compiler), and
`cuda` in Triton. Keys and values are divided into blocks of 16 positions (`blocks`).

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
    """For each token of a batch, the places of the keys on the token's path in a tree of guesses. The path ends with
    the token itself.

    A place is an index into the keys of a row as the cache holds them. The guesses of a tree are written one after the
    other, but their positions are counted along their paths. So the place of a guess may differ from its position (see
    `rows`)."""

    cells: Int64[torch.Tensor, " N"]
    """For each token, the place at which its key is written: an index into the row's keys in the cache. It equals the
    token's position in the row if `paths` lists no places for the token."""
    starts: Int64[torch.Tensor, " N"]
    """For each token, the first position whose place is in `paths`. The place of a position is the index of its key in
    the row's cache. Before the first position, places equal positions. If `paths` lists no place for the token, the
    value is the token's position + 1."""
    paths: Int64[torch.Tensor, "N L"]
    """For each token, the places of the keys that it reads, from position `starts` up to the token's own position. A
    place is the index of a key in the row's cache. Further entries of a line are unused."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The tokens of one batch, from any number of rows: tokens of prompts, single new tokens and guesses."""

    ids: Int64[torch.Tensor, " N"]
    positions: Int64[torch.Tensor, " N"]
    """Position of each token in its row. A token attends to all positions from 0 up to its own position."""
    rows: Int32[torch.Tensor, " N"]
    """Row of `tables` that each token belongs to."""
    tables: Int32[torch.Tensor, "R W"]
    """Cache blocks of each row in order. Each block holds 16 positions."""
    longest: int
    """Upper bound of the context lengths in the batch: the largest position + 1, or any larger number. The kernels size
    their work and their buffers for it."""
    tree_paths: TreePaths | None = None
    """Places of the keys that each token reads. None if the place of every key equals its position. This is the case
    without guesses, and with guesses that form chains."""
    independent: bool = False
    """True if no token reads a key that another token of the batch writes. Then keys may be written while other keys
    are read."""


class PagedCache(Protocol):
    """The keys and values that a forward pass reads and writes (`cache.KVCache` holds them)."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    """For each block of the model: keys [P, K, D, 16] and values [P, K, 16, D]. P cache blocks of 16 positions, K
    key/value heads, D head dimension."""


@dataclass(frozen=True, kw_only=True)
class Angles:
    """Cosines and sines of the rotary embedding."""

    cos: Float32[torch.Tensor, "positions D//2"]
    sin: Float32[torch.Tensor, "positions D//2"]


class Kernels(Protocol):
    """The operations of a forward pass. On a CPU the results for a token depend, bit for bit, only on its own row."""

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
        """Return a weight packed for `linear`.

        Args:
            parts: first row of a part -> the part of the weight.
            dtype: dtype to which the weight is rounded.
            old: a packed weight from which rows that are not in `parts` are copied. It is not changed.
            wide: True if `linear` must be able to return float32.

        Raises:
            NotFiniteError: a part holds NaN or infinity after rounding.
        """
        ...

    def unpack(self, packed: Packed) -> Float[torch.Tensor, "out in"]:
        """Return the weight that `pack` has packed. The result is exact."""
        ...

    def linear(
        self, x: Float[torch.Tensor, "N in"], packed: Packed, dtype: torch.dtype
    ) -> Float[torch.Tensor, "N out"]:
        """Return x W^T, summed in float32, as `dtype`. `dtype` must be the weight's own dtype, or float32 if the weight
        was packed with `wide`."""
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
        """Return the attention softmax(q K^T / sqrt(D)) V of each token, in the dtype of `qkv`.

        First rotate queries and keys by the angles of their positions, and write the keys and values of all tokens to
        the cache. The computation is in float32, but the operands of the two products may be rounded to the dtype of
        the cache."""
        ...

    def end_threads(self) -> None:
        """End the helper threads of the calling thread if they would slow down other threads."""
        ...

    def gate(self, gate_up: Float[torch.Tensor, "N 2*F"]) -> Float[torch.Tensor, "N F"]:
        """Return silu(gate) * up. `gate_up` holds gate in its first half and up in its second."""
        ...

    def choose(
        self, logits: Float32[torch.Tensor, "N V"], temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """Draw a token for each row of logits from softmax(logits / temperature), with the noise of the row's key.
        Return tokens and log-probs, as `sampling.sample` does. May overwrite `logits`."""
        ...

    def choose_part(
        self,
        logits: Float32[torch.Tensor, "N part"],
        temperatures: list[float],
        keys: UInt64[np.ndarray, " N"],
        first: int,
        vocab: int,
    ) -> Float64[torch.Tensor, "N 5"]:
        """Return five numbers for each draw: what one part of the vocabulary contributes to a draw from the whole
        vocabulary (see `sampling.sample_part`). `first`: first token of the part. `vocab`: size of the whole
        vocabulary. May overwrite `logits`."""
        ...


@dataclass(frozen=True)
class Block:
    """One transformer block. Its matrices are packed. Matrices that are applied to the same input are fused into one.
    All vectors are float32."""

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
    """Kernels that compute half a block, or all blocks, in one call. They round only the operands of the matrix
    products."""

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
        """Add linear(attend(head_norms(linear(norm(x), qkv) + qkv_bias)), out) to `into`, which may be `x`."""
        ...

    def mlp(
        self, x: Float32[torch.Tensor, "N C"], block: Block, eps: float, into: Float32[torch.Tensor, "N C"]
    ) -> None:
        """Add linear(gate(linear(norm(x), gate_up)), down) to `into`, which may be `x`."""
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
        """Apply `attention` and then `mlp` of each block in turn. Both add their results to `x`. `layers`: keys and
        values of each block."""
        ...


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """Weights of the draft head in the form that kernels use. The head can guess only a subset of the vocabulary. The
    tokens of this subset are numbered from 0 to T - 1, and such a number is a draft id."""

    up: Packed
    down: Packed
    """The matrix W_down, multiplied by the scale a (see `drafts.draft_head`)."""
    out: Packed
    embedding: Float32[torch.Tensor, "T+1 C"]
    """Embedding of each draft id. The last row is the embedding of all other tokens."""
    words: Int32[torch.Tensor, "1 T"]
    """For each draft id, 32 well-mixed bits that stand for its token (see `sampling.token_words`). The noise of the
    token is computed from these bits."""


@dataclass(frozen=True, eq=False)
class Guessed:
    """Guesses for `depth` positions of R rows: the G best ones per position, the best first."""

    draft_ids: Int64[np.ndarray, "R depth G"]
    parents: Int64[np.ndarray, "R depth G"]
    """Index of each guess's parent among the guesses of the position before; 0 at the first position."""
    ranks: Int64[np.ndarray, "R depth G"]
    """Rank of each guess among the guesses after its parent; 0 is the best guess. -1 if this entry has no guess. Then
    the entries of the other arrays have no meaning."""
    gaps: Float32[np.ndarray, "R depth G"]
    """Logit of the best guess after the same parent minus the logit of this guess, both with noise. For the best guess
    itself: its logit minus the logit of the second-best guess."""


@runtime_checkable
class DraftingKernels(Protocol):
    """Kernels that compute all positions of all drafts in one call."""

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
        """Return the guesses of the draft head for `depth` positions of all rows. For the arguments see
        `drafts.draft_head.unroll`."""
        ...


@runtime_checkable
class DeviceKernels(Protocol):
    """Kernels that can compute a whole batch without reading anything from the host. Such a batch can be captured as a
    CUDA graph."""

    def choose_on_device(
        self,
        logits: Float32[torch.Tensor, "N V"],
        temperatures: Float32[torch.Tensor, " N"],
        keys: Int32[torch.Tensor, "N 2"],
        banned: Int32[torch.Tensor, "N B"],
    ) -> tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]:
        """Draw tokens like `choose`, with all arguments as tensors on the device. `keys`: halves of each key, the low
        one first. `banned`: tokens that each draw must not give, padded with negative numbers."""
        ...


class NoTritonKernelsError(RuntimeError):
    """Triton is not installed, or cannot run on the device."""

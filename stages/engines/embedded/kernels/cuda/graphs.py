"""Decode batches on a CUDA device: padded to one of a few sizes, captured once per size, and then replayed.

The forward pass of a small model is some hundred kernels of a few microseconds each. If Python launches them one by
one, the device mostly waits for the host. A CUDA graph launches all of them at once, but with fixed memory and shapes,
and nothing read from the host in between. Therefore

    shapes    a batch is padded to the next of `SIZES` tokens; padding tokens have no block and are ignored
    memory    ids, positions, tables, noise keys, temperatures and banned tokens arrive in one buffer per size, by one
                  copy; the draws leave through another buffer
    lengths   the kernels read the length of a token's context from the token's position (`triton_kernels`), so one
              graph serves every length
    weights   stay in place: a refit copies into them (`LocalRunner.swap`). Two sets of weights, each with its own
              graphs, would save that copy (8 ms for 16 GB at 4 TB/s, read and written) but take twice the memory
    cache     stays in place; when its memory is released, the graphs are dropped too (`clear`)

Only batches that draw after every token are captured: rows that decode, with or without drafts. Prompts run eagerly.
Without capture (`run_directly`) a batch is padded too, so it gives the same results as a graph would. Tests use this on
a CPU.

Shape letters: see `kernels.protocol`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32, Int32, Int64, UInt64

from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, NO_BLOCK, blocks_for
from stages.engines.embedded.kernels.protocol import Tokens

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of tokens that a captured batch can have. A matrix product must read all weights even for one token, so it
costs little to pad a batch, even by half."""
BANNED = 8
"""Maximum number of banned tokens per draw in a captured batch. Batches with more run eagerly."""
_NO_TOKEN = -1
"""Entry of `banned` that stands for no token."""
_ALIGNMENT = 16
"""Alignment of each input in its buffer, in bytes. Kernels are fastest if compiled for aligned memory."""

Run = Callable[[], None]


class DecodeBatch(Protocol):
    """The fields of a batch that are used here: N tokens of R rows, and M draws. See
    `stages.engines.embedded.batch.Batch`."""

    @property
    def ids(self) -> Int64[np.ndarray, " N"]: ...
    @property
    def positions(self) -> Int64[np.ndarray, " N"]: ...
    @property
    def rows(self) -> Int32[np.ndarray, " N"]: ...
    @property
    def tables(self) -> Int32[np.ndarray, "R W"]: ...
    @property
    def drawn(self) -> Int64[np.ndarray, " M"]: ...
    @property
    def keys(self) -> UInt64[np.ndarray, " M"]: ...
    @property
    def temperatures(self) -> Sequence[float]: ...
    @property
    def banned(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def wants_hidden(self) -> bool: ...
    @property
    def tree_paths(self) -> object | None: ...


@dataclass(frozen=True)
class Drawing:
    """Arguments for sampling, as tensors on the device. One token is drawn after each of a batch's N tokens."""

    temperatures: Float32[torch.Tensor, " N"]
    keys: Int32[torch.Tensor, "N 2"]
    """The two halves of each draw's 64-bit key, the low half first. The noise of the draw is computed from the key."""
    banned: Int32[torch.Tensor, "N B"]


Compute = Callable[[Tokens, Drawing], tuple[Int64[torch.Tensor, " N"], Float32[torch.Tensor, " N"]]]
"""Function that computes a whole batch. It returns the token drawn after every token, and the log-prob of the drawn
token."""


def run_directly(run: Run) -> Run:
    """Return `run` itself instead of a captured graph, so every replay runs the Python code."""
    return run


class GraphCapture:
    """Captures functions that launch kernels as CUDA graphs. Owns the stream on which they are captured, and the memory
    of the graphs. All graphs share this memory, since only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Capture `run` as a graph, and return a function that replays it. `run` is called once before it is captured,
        so that kernels are compiled and workspaces allocated."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may be packing new weights meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


class CapturedBatches:
    """Owns the buffers and graphs of each size, made when a batch first needs them."""

    def __init__(
        self, compute: Compute, max_seq: int, device: torch.device, capture: Callable[[Run], Run] = run_directly
    ) -> None:
        self._compute, self._max_seq, self._device, self._capture = compute, max_seq, device, capture
        self._buffers: dict[int, _StaticBuffers] = {}
        self._replays: dict[tuple[int, bool], Run] = {}

    @property
    def captured(self) -> list[tuple[int, bool]]:
        """Keys of the graphs that exist: (size, `Tokens.independent`)."""
        return sorted(self._replays)

    def takes(self, batch: DecodeBatch) -> bool:
        """Return True if a CUDA graph can be captured for this batch. There are four conditions:

        - A token is drawn after every token of the batch. So the batch feeds no prompts.
        - It has at most `SIZES[-1]` tokens, and at most `BANNED` banned tokens per draw.
        - It has no tree paths: the guesses of each row form a chain.
        - It does not return hidden states, which a learned drafter would need.
        """
        return (
            not batch.wants_hidden
            and batch.tree_paths is None
            and len(batch.ids) == len(batch.drawn)
            and len(batch.ids) <= SIZES[-1]
            and all(len(tokens) <= BANNED for tokens in batch.banned)
        )

    def run(self, batch: DecodeBatch) -> tuple[Int64[np.ndarray, " N"], Float32[np.ndarray, " N"]]:
        """Return the tokens drawn after each of the batch's tokens, and their log-probs. Waits for the result."""
        size = size_for(len(batch.ids))
        key = size, reads_no_new_key(batch)
        buffers = self._buffers.get(size)
        if buffers is None:
            buffers = self._buffers[size] = _StaticBuffers(size, blocks_for(self._max_seq), self._device)
        buffers.fill(batch)
        replay = self._replays.get(key)
        if replay is None:
            replay = self._replays[key] = self._capture(lambda: self._run(buffers, key[1]))
        replay()
        return buffers.draws(len(batch.ids))

    def clear(self) -> None:
        """Drop all graphs and buffers. Later batches make them anew."""
        self._replays.clear()
        self._buffers.clear()

    def _run(self, buffers: _StaticBuffers, independent: bool) -> None:
        inputs = buffers.inputs
        ids, positions, tables = inputs["ids"], inputs["positions"], inputs["tables"]
        tokens = Tokens(
            ids=ids,
            positions=positions,
            rows=buffers.rows,
            tables=tables,
            longest=self._max_seq,
            independent=independent,
        )
        drawing = Drawing(inputs["temperatures"], inputs["keys"], inputs["banned"])
        chosen, logprobs = self._compute(tokens, drawing)
        buffers.chosen.copy_(chosen)
        buffers.logprobs.copy_(logprobs)


def size_for(num_tokens: int) -> int:
    """Return the smallest size that holds `num_tokens` tokens."""
    return next(size for size in SIZES if size >= num_tokens)


def reads_no_new_key(batch: DecodeBatch) -> bool:
    """Return True if each row has one token, and no token reads a key that another token of the batch writes.

    To test the second condition, check that each block that is written occurs only once in the tables. A written block
    can occur twice, since rows share the full blocks of their prompts. For example, one row feeds the last token of a
    block, and in the same batch another row begins to read this block.
    """
    if len(batch.tables) != len(batch.ids):
        return False
    written = batch.tables[batch.rows, batch.positions // BLOCK_TOKENS]
    is_written = np.zeros(int(batch.tables.max()) + 1, bool)
    is_written[written] = True
    return int(is_written[batch.tables].sum()) == len(written)


class _StaticBuffers:
    """Owns the memory of batches of one size, on the host and on the device."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        fields: dict[str, tuple[type[np.generic], torch.dtype, tuple[int, ...]]] = {
            "ids": (np.int64, torch.int64, (size,)),
            "positions": (np.int64, torch.int64, (size,)),
            "keys": (np.int32, torch.int32, (size, 2)),
            "temperatures": (np.float32, torch.float32, (size,)),
            "banned": (np.int32, torch.int32, (size, BANNED)),
            "tables": (np.int32, torch.int32, (size, width)),
        }
        num_bytes = [_aligned(math.prod(shape) * kind.itemsize) for _, kind, shape in fields.values()]
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(num_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device)
        self._views: dict[str, np.ndarray] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        offset = 0
        for (name, (numpy_kind, kind, shape)), taken in zip(fields.items(), num_bytes, strict=True):
            used = slice(offset, offset + math.prod(shape) * kind.itemsize)
            self._views[name] = self._host.numpy()[used].view(numpy_kind).reshape(shape)
            self.inputs[name] = self._device[used].view(kind).view(shape)
            offset += taken
        self.rows = torch.arange(size, dtype=torch.int32, device=device)
        # draws: tokens, then log-probs
        self._drawn = torch.zeros(size * 12, dtype=torch.uint8, device=device)
        self._drawn_host = torch.zeros(size * 12, dtype=torch.uint8, pin_memory=pinned)
        self.chosen = self._drawn[: size * 8].view(torch.int64)
        self.logprobs = self._drawn[size * 8 :].view(torch.float32)

    def fill(self, batch: DecodeBatch) -> None:
        """Copy a batch to the device in one transfer. Each token gets a copy of its row's table."""
        num = len(batch.ids)
        views = self._views
        views["ids"][:num], views["ids"][num:] = batch.ids, 0
        views["positions"][:num], views["positions"][num:] = batch.positions, 0
        views["keys"][:num] = batch.keys.view(np.int32).reshape(-1, 2)
        views["temperatures"][:num], views["temperatures"][num:] = batch.temperatures, 0.0
        views["tables"][:num, : batch.tables.shape[1]] = batch.tables[batch.rows]
        views["tables"][num:, 0] = NO_BLOCK  # padding tokens are at position 0 and read no other block
        views["banned"].fill(_NO_TOKEN)
        for place, tokens in enumerate(batch.banned):
            if tokens:
                views["banned"][place, : len(tokens)] = tokens
        self._device.copy_(self._host, non_blocking=True)

    def draws(self, num: int) -> tuple[Int64[np.ndarray, " num"], Float32[np.ndarray, " num"]]:
        """Return the first `num` drawn tokens and their log-probs. Waits for the device."""
        self._drawn_host.copy_(self._drawn, non_blocking=True)
        if self._drawn.is_cuda:
            torch.cuda.current_stream().synchronize()
        drawn = self._drawn_host.numpy()
        half = len(drawn) * 2 // 3
        return drawn[:half].view(np.int64)[:num].copy(), drawn[half:].view(np.float32)[:num].copy()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

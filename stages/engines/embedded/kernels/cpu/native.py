"""The kernels as C (`kernels.c`, `gemm.c`, `drafts.c`), called through ctypes. They share torch's OpenMP threads where
both use the GNU runtime (as torch's own packages for Linux do).

May import numpy, torch, stages.native, stages.engines.embedded.sampling, kernels.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt64

from stages.engines.embedded.kernels.arena import Slabs
from stages.engines.embedded.kernels.cpu.arguments import (
    FLOATS,
    check_draft_head,
    check_draws,
    check_head_vectors,
    check_heads,
    check_tokens,
    check_weights,
)
from stages.engines.embedded.kernels.cpu.records import (
    RECORDS,
    BlockRecord,
    BuffersRecord,
    ContextRecord,
    GuessesRecord,
    WeightRecord,
)
from stages.engines.embedded.kernels.packed import NativeWeight, NotFiniteError, Packed
from stages.engines.embedded.kernels.protocol import Angles, Block, Guessed, HeadWeights, Tokens
from stages.engines.embedded.sampling.noise import token_words
from stages.native.arguments import expect, kind_of, require
from stages.native.compile import load_library

_SOURCES, _HEADERS = ("kernels.c", "gemm.c", "drafts.c"), ("kernels.h",)
_CPU = torch.device("cpu")
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PACKABLE = (torch.float32, torch.bfloat16)


class _Here(threading.local):
    """What one thread keeps between two calls."""

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self.passed: list[weakref.ref[object]] = []
        """The blocks that the last forward pass went through, and their cache: not to be kept alive."""
        self.addresses: ctypes.Array[BlockRecord] | None = None
        """Of those."""


def load_native_kernels() -> NativeKernels:
    """Compiles if need be. Raises NoNativeKernelsError."""
    library = load_library("kernels", Path(__file__).parent, _SOURCES, _HEADERS, RECORDS)
    library.add_norm.argtypes = [_P, _P, _I, _P, _F, _P, _I, _I, _I]
    library.end_threads.argtypes = []
    library.use_matrix_registers.argtypes = [_I]
    library.gate.argtypes = [_P, _P, _I, _I, _I]
    library.attend.argtypes = [_P, _I, _I, _P, _P, _P]
    library.attention.argtypes = [_P, _P, _F, _I, _P, _P, _P]
    library.mlp.argtypes = [_P, _P, _F, _I, _P, _P]
    library.run_blocks.argtypes = [_P, _P, _I, _F, _I, _P, _P]
    library.packed_bytes.argtypes = [_L, _L, _I]
    library.packed_bytes.restype = _L
    library.pack.argtypes = [_P, _I, _L, _L, _P, _I, _L, _L]
    library.unpack.argtypes = [_P, _I, _L, _L, _P]
    library.product.argtypes = [_P, _P, _L, _P, _I]
    library.draft.argtypes = [*[_P] * 5, _I, _I, _I, *[_P] * 14]
    library.choose.argtypes = [_P, _P, _P, _P, _I, _I, _P, _P, _P]
    for name in ("add_norm", "gate", "choose", "mlp", "unpack", "product", "draft", "end_threads"):
        getattr(library, name).restype = None
    return NativeKernels(library)


@dataclass(frozen=True)
class NativeKernels:
    """See `FusedKernels`. All tensors on the CPU and contiguous."""

    library: ctypes.CDLL
    name: str = "native"
    supports_trees: bool = True
    _slabs: Slabs = field(default_factory=Slabs)
    _here: _Here = field(default_factory=_Here)

    def use_matrix_registers(self, wanted: bool) -> bool:
        """Whether bfloat16 products go through the CPU's matrix registers (Intel's AMX) from now on, in the whole
        process: if `wanted` and there are any. They do by default."""
        return bool(self.library.use_matrix_registers(wanted))

    def pack(
        self, parts: Mapping[int, torch.Tensor], dtype: torch.dtype, *, old: Packed | None = None, wide: bool = False
    ) -> NativeWeight:
        if old is None:
            packed = self._empty(sum(map(len, parts.values())), next(iter(parts.values())).shape[1], dtype)
        else:
            before = _native(old)
            packed = self._empty(before.out_features, before.in_features, dtype)
            packed.tiles.copy_(before.tiles)
        for start, part in parts.items():
            inside = start >= 0 and start + len(part) <= packed.out_features
            require(inside, f"rows {start} to {start + len(part)} of a weight of {packed.out_features}")
            require(part.shape[1:] == (packed.in_features,), f"a part is {list(part.shape)}, of {packed.in_features}")
            rows = (part if part.dtype in _PACKABLE else part.float()).contiguous()
            address, kind = packed.tiles.data_ptr(), kind_of(rows.dtype)
            sizes = (start, packed.out_features)
            if not self.library.pack(rows.data_ptr(), kind, *rows.shape, address, kind_of(dtype), *sizes):
                raise NotFiniteError(start)
        return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        weight = _native(packed)
        out = torch.empty(weight.out_features, weight.in_features, dtype=weight.dtype)
        self.library.unpack(weight.tiles.data_ptr(), kind_of(weight.dtype), *out.shape, out.data_ptr())
        return out

    def linear(self, x: torch.Tensor, packed: Packed, dtype: torch.dtype) -> torch.Tensor:
        weight = _native(packed)
        out = torch.empty(len(x), weight.out_features, dtype=dtype)
        x = x.to(weight.dtype)
        expect("x", x, (len(x), weight.in_features), (weight.dtype,))
        self.library.product(x.data_ptr(), weight.handle, len(x), out.data_ptr(), kind_of(dtype))
        return out

    def attention(
        self,
        x: torch.Tensor,
        block: Block,
        eps: float,
        angles: Angles,
        tokens: Tokens,
        keys: torch.Tensor,
        values: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        buffers = self._buffers(len(x), block)
        given = ctypes.byref(_block(block, keys, values))
        context = _context_of(block, x, angles, tokens, keys, values)
        expect("into", into, x.shape)
        failed = self.library.attention(
            x.data_ptr(), given, eps, len(x), ctypes.byref(context), ctypes.byref(buffers), into.data_ptr()
        )
        _check_memory(failed, tokens)

    def mlp(self, x: torch.Tensor, block: Block, eps: float, into: torch.Tensor) -> None:
        buffers, given = self._buffers(len(x), block), ctypes.byref(_block(block, None, None))
        expect("x", x, (len(x), _native(block.qkv).in_features))
        expect("into", into, x.shape)
        self.library.mlp(x.data_ptr(), given, eps, len(x), ctypes.byref(buffers), into.data_ptr())

    def run_blocks(
        self,
        x: torch.Tensor,
        blocks: tuple[Block, ...],
        eps: float,
        angles: Angles,
        tokens: Tokens,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        here, (keys, values) = self._here, layers[0]
        passed = (*blocks, keys)  # the cache's layers come and go together
        if len(here.passed) != len(passed) or any(ref() is not it for ref, it in zip(here.passed, passed, strict=True)):
            given = (_block(block, *layer) for block, layer in zip(blocks, layers, strict=True))
            for layer in layers:
                expect("keys", layer[0], keys.shape, (keys.dtype,))
                expect("values", layer[1], values.shape, (values.dtype,))
            here.passed, here.addresses = [weakref.ref(it) for it in passed], (BlockRecord * len(blocks))(*given)
        buffers = self._buffers(len(x), blocks[0])
        context = _context_of(blocks[0], x, angles, tokens, keys, values)
        failed = self.library.run_blocks(
            x.data_ptr(), here.addresses, len(blocks), eps, len(x), ctypes.byref(context), ctypes.byref(buffers)
        )
        _check_memory(failed, tokens)

    def _buffers(self, num: int, block: Block) -> BuffersRecord:
        """For batches of `num` tokens through blocks of this size; taken back by the next call of the same thread."""
        qkv, out, gate_up, down = map(_native, (block.qkv, block.out, block.gate_up, block.down))
        size, projected = qkv.dtype.itemsize, max(qkv.out_features, gate_up.out_features)
        widths = (qkv.in_features * size, projected * 4, out.in_features * 4, out.in_features * size)
        return BuffersRecord(*self._workspace(num, (*widths, down.in_features * size)))

    def _workspace(self, rows: int, row_bytes: tuple[int, ...]) -> list[int]:
        """Addresses of buffers of so many bytes a row each, on cache lines, in memory that this thread keeps: fresh
        memory would have to be cleared by the system, page by page."""
        ends = list(itertools.accumulate(-(-rows * size // 64) * 64 for size in row_bytes))
        here = self._here
        if here.workspace.numel() < ends[-1]:
            here.workspace = torch.empty(ends[-1], dtype=torch.uint8)
        return [here.workspace.data_ptr() + start for start in (0, *ends[:-1])]

    def _empty(self, out_features: int, in_features: int, dtype: torch.dtype) -> NativeWeight:
        tiles = self._slabs.take(self.library.packed_bytes(out_features, in_features, kind_of(dtype)))
        record = WeightRecord(tiles.data_ptr(), out_features, in_features, kind_of(dtype))
        return NativeWeight(tiles, out_features, in_features, dtype, ctypes.addressof(record), record)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=dtype)
        address, kind = (None, 0) if delta is None else (delta.data_ptr(), kind_of(delta.dtype))
        rows, width = x.shape
        expect("x", x, (rows, width))
        expect("weight", weight, (width,))
        if delta is not None:
            expect("delta", delta, (rows, width), FLOATS)
        self.library.add_norm(
            x.data_ptr(), address, kind, weight.data_ptr(), eps, out.data_ptr(), kind_of(dtype), rows, width
        )
        return out

    def attend(
        self, qkv: torch.Tensor, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        _, kv_heads, dim, _ = keys.shape
        num, width = qkv.shape
        heads = width // dim - 2 * kv_heads
        expect("qkv", qkv, (num, width), FLOATS)
        check_heads(heads, width, keys, values)
        check_tokens(num, tokens, angles, dim)
        out = torch.empty(num, heads * dim, dtype=qkv.dtype)
        queries = torch.empty(num, heads * dim, dtype=torch.float32)
        context = _context(heads, angles, tokens, keys, values)
        failed = self.library.attend(
            qkv.data_ptr(), kind_of(qkv.dtype), num, ctypes.byref(context), queries.data_ptr(), out.data_ptr()
        )
        _check_memory(failed, tokens)
        return out

    def end_threads(self) -> None:
        self.library.end_threads()

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        expect("gate_up", gate_up, (rows, width // 2 * 2), FLOATS)
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        self.library.gate(gate_up.data_ptr(), out.data_ptr(), kind_of(gate_up.dtype), rows, width // 2)
        return out

    def unroll(
        self,
        head: HeadWeights,
        state: torch.Tensor,
        slots: Int64[np.ndarray, " rows"],
        depth: int,
        branches: int,
        temperatures: Sequence[float],
        keys: UInt64[np.ndarray, "rows depth"],
        banned: Sequence[Sequence[int]],
    ) -> Guessed:
        up, down, out = map(_native, (head.up, head.down, head.out))
        check_draft_head(head, up, down, out, state, slots)
        check_draws(len(keys), len(temperatures), keys[:, 0])
        rows, width = state.shape
        require(keys.shape == (rows, depth), f"keys of noise are {keys.shape}, of {rows} rows x {depth} positions")
        require(
            len(banned) == rows * depth, f"{len(banned)} lists of banned slots, for {rows} rows x {depth} positions"
        )
        require(0 < branches < out.out_features, f"{branches} guesses among {out.out_features} slots")
        shape = (rows, depth, branches)
        guessed_slots, parents, ranks = np.empty((3, *shape), np.int64)
        guessed = Guessed(guessed_slots, parents, ranks, np.empty(shape, np.float32))
        found = GuessesRecord(*(getattr(guessed, each.name).ctypes.data for each in fields(guessed)))
        warmth = np.array(temperatures, np.float32)
        keys, slots = np.ascontiguousarray(keys), np.ascontiguousarray(slots)
        bans = np.array([slot for some in banned for slot in some], np.int64)
        require(not bans.size or (bans.min() >= 0 and bans.max() < out.out_features), "banned slots that are none")
        bans_from = np.array([0, *itertools.accumulate(map(len, banned))], np.int64)
        size, tokens = up.dtype.itemsize, out.out_features
        sizes = (2 * width * size, 2 * width * 4, width * size, tokens * 4, 2 * width * 4, 4, tokens * 4)
        places = self._workspace(rows * branches, sizes)
        self.library.draft(
            up.handle,
            down.handle,
            out.handle,
            head.embedding.data_ptr(),
            head.words.data_ptr(),
            rows,
            depth,
            branches,
            warmth.ctypes.data,
            keys.ctypes.data,
            bans.ctypes.data,
            bans_from.ctypes.data,
            state.data_ptr(),
            slots.ctypes.data,
            ctypes.byref(found),
            *places,
        )
        return guessed

    def choose(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._choose(logits, temperatures, keys, token_words(logits.shape[1], _CPU), None)

    def choose_part(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"], first: int, vocab: int
    ) -> torch.Tensor:
        parts = torch.empty(logits.shape[0], 4, dtype=torch.float64)
        words = token_words(vocab, _CPU)[0, first : first + logits.shape[1]]
        tokens, _ = self._choose(logits, temperatures, keys, words, parts.data_ptr())
        return torch.cat([(tokens + first).double()[:, None], parts], dim=1)

    def _choose(
        self,
        logits: torch.Tensor,
        temperatures: list[float],
        keys: UInt64[np.ndarray, " N"],
        words: torch.Tensor,
        parts: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits.shape
        expect("logits", logits, (rows, vocab))
        expect("words", words, (*words.shape[:-1], vocab), (torch.int32,))
        check_draws(rows, len(temperatures), keys)
        chosen, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        divisors = torch.tensor(temperatures, dtype=torch.float32)
        keys = np.ascontiguousarray(keys)
        self.library.choose(
            logits.data_ptr(),
            divisors.data_ptr(),
            keys.ctypes.data,
            words.data_ptr(),
            rows,
            vocab,
            chosen.data_ptr(),
            logprobs.data_ptr(),
            parts,
        )
        return chosen, logprobs


def _context_of(
    block: Block, x: torch.Tensor, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor
) -> ContextRecord:
    """For tokens `x` on their way through a block whose weights fit one another. Raises ValueError."""
    qkv, dim = _native(block.qkv), keys.shape[2]
    heads = _native(block.out).in_features // dim
    expect("x", x, (len(x), qkv.in_features))
    check_heads(heads, qkv.out_features, keys, values)
    check_head_vectors(block, heads, keys.shape[1], dim)
    check_tokens(len(x), tokens, angles, dim)
    return _context(heads, angles, tokens, keys, values)


def _context(heads: int, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor) -> ContextRecord:
    tree = tokens.tree_paths
    return ContextRecord(
        angles.cos.data_ptr(),
        angles.sin.data_ptr(),
        tokens.positions.data_ptr(),
        tokens.rows.data_ptr(),
        tokens.tables.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        *((None, None, None) if tree is None else (t.data_ptr() for t in (tree.cells, tree.starts, tree.paths))),
        kind_of(keys.dtype),
        tokens.tables.shape[1],
        0 if tree is None else tree.paths.shape[1],
        tokens.longest,
        heads,
        keys.shape[1],
        keys.shape[2],
    )


def _block(block: Block, keys: torch.Tensor | None, values: torch.Tensor | None) -> BlockRecord:
    weights = tuple(map(_native, (block.qkv, block.out, block.gate_up, block.down)))
    check_weights(block, *weights)
    norms = (block.attention_norm.data_ptr(), block.mlp_norm.data_ptr())
    others = (keys, values, block.qkv_bias, block.q_norm, block.k_norm)
    addresses = (None if part is None else part.data_ptr() for part in others)
    return BlockRecord(*norms, *(weight.handle for weight in weights), *addresses)


def _native(packed: Packed) -> NativeWeight:
    assert isinstance(packed, NativeWeight)
    return packed


def _check_memory(failed: int, tokens: Tokens) -> None:
    if failed:
        raise MemoryError(f"no memory for the attention weights of {tokens.longest} positions")

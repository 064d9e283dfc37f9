"""The kernels in C (`kernels.c`, `gemm.c`, `drafts.c`), called through ctypes.

If the kernels and torch both use the GNU runtime of OpenMP, they share threads. torch's packages for Linux use this
runtime. The records mirror the structs in C, and `load_library` compares their layouts. The functions `check_...` raise
ValueError if the sizes of the arguments do not match. They do not check values (positions, block numbers): the
scheduler is responsible for these.

Shape letters: see `kernels.protocol`.
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

from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS
from stages.engines.embedded.kernels.packed import NativeWeight, NotFiniteError, Packed, Slabs
from stages.engines.embedded.kernels.protocol import Angles, Block, Guessed, HeadWeights, Tokens
from stages.engines.embedded.sampling import token_words
from stages.native.compile import KINDS, expect, kind_of, load_library, require

_SOURCES, _HEADERS = ("kernels.c", "gemm.c", "drafts.c"), ("kernels.h",)
_CPU = torch.device("cpu")
_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PACKABLE = (torch.float32, torch.bfloat16)


class _ThreadState(threading.local):
    """State that one thread keeps between calls."""

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self.last_pass: list[weakref.ref[object]] = []
        """Weak references to the blocks of the last forward pass and to the first layer's keys."""
        self.addresses: ctypes.Array[BlockRecord] | None = None
        """C structs of the blocks in `last_pass`, with the addresses of their weights, keys and values. None before the
        first pass."""


def load_native_kernels() -> NativeKernels:
    """Return the kernels in the compiled library, which is compiled first if necessary. Raises NoNativeKernelsError if
    it cannot be compiled or loaded."""
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
    """The kernels in C. They implement `FusedKernels` and `DraftingKernels`. All tensors are contiguous and on the
    CPU."""

    library: ctypes.CDLL
    name: str = "native"
    supports_trees: bool = True
    _slabs: Slabs = field(default_factory=Slabs)
    _thread_state: _ThreadState = field(default_factory=_ThreadState)

    def use_matrix_registers(self, wanted: bool) -> bool:
        """Choose, for the whole process, whether bfloat16 products use the CPU's matrix registers (Intel's AMX). By
        default they are used. Return True if the registers are wanted and available."""
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
            require(
                part.shape[1:] == (packed.in_features,), f"a part is {list(part.shape)}; a row has {packed.in_features}"
            )
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
        record = ctypes.byref(_block(block, keys, values))
        context = _context_of(block, x, angles, tokens, keys, values)
        expect("into", into, x.shape)
        failed = self.library.attention(
            x.data_ptr(), record, eps, len(x), ctypes.byref(context), ctypes.byref(buffers), into.data_ptr()
        )
        _check_memory(failed, tokens)

    def mlp(self, x: torch.Tensor, block: Block, eps: float, into: torch.Tensor) -> None:
        buffers, record = self._buffers(len(x), block), ctypes.byref(_block(block, None, None))
        expect("x", x, (len(x), _native(block.qkv).in_features))
        expect("into", into, x.shape)
        self.library.mlp(x.data_ptr(), record, eps, len(x), ctypes.byref(buffers), into.data_ptr())

    def run_blocks(
        self,
        x: torch.Tensor,
        blocks: tuple[Block, ...],
        eps: float,
        angles: Angles,
        tokens: Tokens,
        layers: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        state, (keys, values) = self._thread_state, layers[0]
        last_pass = (*blocks, keys)  # the cache's layers are allocated and released together
        if len(state.last_pass) != len(last_pass) or any(
            ref() is not it for ref, it in zip(state.last_pass, last_pass, strict=True)
        ):
            records = (_block(block, *layer) for block, layer in zip(blocks, layers, strict=True))
            for layer in layers:
                expect("keys", layer[0], keys.shape, (keys.dtype,))
                expect("values", layer[1], values.shape, (values.dtype,))
            state.last_pass, state.addresses = (
                [weakref.ref(it) for it in last_pass],
                (BlockRecord * len(blocks))(*records),
            )
        buffers = self._buffers(len(x), blocks[0])
        context = _context_of(blocks[0], x, angles, tokens, keys, values)
        failed = self.library.run_blocks(
            x.data_ptr(), state.addresses, len(blocks), eps, len(x), ctypes.byref(context), ctypes.byref(buffers)
        )
        _check_memory(failed, tokens)

    def _buffers(self, num: int, block: Block) -> BuffersRecord:
        """Return the buffers for a batch of `num` tokens. The thread's next call reuses their memory."""
        qkv, out, gate_up, down = map(_native, (block.qkv, block.out, block.gate_up, block.down))
        size, projected = qkv.dtype.itemsize, max(qkv.out_features, gate_up.out_features)
        widths = (qkv.in_features * size, projected * 4, out.in_features * 4, out.in_features * size)
        return BuffersRecord(*self._workspace(num, (*widths, down.in_features * size)))

    def _workspace(self, rows: int, row_bytes: tuple[int, ...]) -> list[int]:
        """Return the addresses of buffers with `rows` rows of so many bytes, each at a cache line. Each thread reuses
        its memory, since the system would have to clear new memory page by page."""
        ends = list(itertools.accumulate(-(-rows * size // 64) * 64 for size in row_bytes))
        state = self._thread_state
        if state.workspace.numel() < ends[-1]:
            state.workspace = torch.empty(ends[-1], dtype=torch.uint8)
        return [state.workspace.data_ptr() + start for start in (0, *ends[:-1])]

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
        draft_ids: Int64[np.ndarray, " rows"],
        depth: int,
        branches: int,
        temperatures: Sequence[float],
        keys: UInt64[np.ndarray, "rows depth"],
        banned: Sequence[Sequence[int]],
    ) -> Guessed:
        up, down, out = map(_native, (head.up, head.down, head.out))
        check_draft_head(head, up, down, out, state, draft_ids)
        check_draws(len(keys), len(temperatures), keys[:, 0])
        rows, width = state.shape
        require(keys.shape == (rows, depth), f"keys of noise are {keys.shape}; wanted: {(rows, depth)}")
        require(
            len(banned) == rows * depth, f"{len(banned)} lists of banned draft ids, for {rows} rows x {depth} positions"
        )
        require(0 < branches < out.out_features, f"{branches} guesses among {out.out_features} draft ids")
        shape = (rows, depth, branches)
        guessed_ids, parents, ranks = np.empty((3, *shape), np.int64)
        guessed = Guessed(guessed_ids, parents, ranks, np.empty(shape, np.float32))
        record = GuessesRecord(*(getattr(guessed, each.name).ctypes.data for each in fields(guessed)))
        temperature_array = np.array(temperatures, np.float32)
        keys, draft_ids = np.ascontiguousarray(keys), np.ascontiguousarray(draft_ids)
        bans = np.array([draft_id for some in banned for draft_id in some], np.int64)
        require(not bans.size or (bans.min() >= 0 and bans.max() < out.out_features), "banned draft ids out of range")
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
            temperature_array.ctypes.data,
            keys.ctypes.data,
            bans.ctypes.data,
            bans_from.ctypes.data,
            state.data_ptr(),
            draft_ids.ctypes.data,
            ctypes.byref(record),
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
    """Return the C struct with the sizes and addresses that a block needs to process the tokens `x`. Raises ValueError
    if sizes do not match."""
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


# ---- records of C ----------------------------------------------------------------------------------------

_P_RECORDS, _I_RECORDS, _L_RECORDS = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class WeightRecord(ctypes.Structure):
    """A packed weight as the C kernels take it: a pointer to its bytes, its two sizes and its dtype. The fields are
    those of `struct weight` in kernels.h."""

    _fields_ = (("tiles", _P_RECORDS), ("out", _L_RECORDS), ("in", _L_RECORDS), ("dtype", _I_RECORDS))


class ContextRecord(ctypes.Structure):
    """The `struct context` of kernels.c."""

    _fields_ = (
        *((name, _P_RECORDS) for name in ("cosines", "sines", "positions", "rows", "tables", "keys", "values")),
        *((name, _P_RECORDS) for name in ("cells", "starts", "paths")),
        *((name, _I_RECORDS) for name in ("cache", "table_width", "path_width", "longest", "heads", "kv_heads", "dim")),
    )


class GuessesRecord(ctypes.Structure):
    """The `struct guesses` of drafts.c."""

    _fields_ = tuple((each.name, _P_RECORDS) for each in fields(Guessed))


class BlockRecord(ctypes.Structure):
    """The `struct block` of kernels.c."""

    _fields_ = (
        *(
            (name, _P_RECORDS)
            for name in ("attention_norm", "mlp_norm", "qkv", "out", "gate_up", "down", "keys", "values")
        ),
        *((name, _P_RECORDS) for name in ("qkv_bias", "q_norm", "k_norm")),
    )


class BuffersRecord(ctypes.Structure):
    """The `struct buffers` of kernels.c."""

    _fields_ = tuple((name, _P_RECORDS) for name in ("normed", "projected", "queries", "read", "gated"))


RECORDS = {
    "weight": WeightRecord,
    "context": ContextRecord,
    "guesses": GuessesRecord,
    "block": BlockRecord,
    "buffers": BuffersRecord,
}
"""Name of a struct in C -> its record here. `load_library` compares their layouts."""


# ---- checks of arguments ---------------------------------------------------------------------------------

FLOATS = tuple(KINDS)
_INT32, _INT64 = (torch.int32,), (torch.int64,)


def check_weights(
    block: Block, qkv: NativeWeight, out: NativeWeight, gate_up: NativeWeight, down: NativeWeight
) -> None:
    """Check that the output of each matrix product of a block has the width that the next product expects. Also check
    the shapes of the norms, and that all matrices have the same dtype."""
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
    """Check the shapes of the cache. Check also that `width`, the width of qkv, is the sum of the widths of all query,
    key and value heads. The number of key/value heads is read from the shape of the cache."""
    require(keys.ndim == 4, f"keys have {keys.ndim} axes; wanted: 4")
    pool, kv_heads, dim, _ = keys.shape
    expect("keys", keys, (pool, kv_heads, dim, BLOCK_TOKENS), FLOATS)
    expect("values", values, (pool, kv_heads, BLOCK_TOKENS, dim), (keys.dtype,))
    require(dim > 0 and dim % 2 == 0, f"heads of {dim} numbers cannot be rotated in pairs")
    shared = kv_heads > 0 and num_heads > 0 and num_heads % kv_heads == 0
    require(shared, f"{num_heads} query heads cannot share {kv_heads} key/value heads equally")
    wanted = (num_heads + 2 * kv_heads) * dim
    require(width == wanted, f"qkv is {width} wide; {num_heads} + 2 x {kv_heads} heads of {dim} take {wanted}")


def check_head_vectors(block: Block, num_heads: int, kv_heads: int, dim: int) -> None:
    """Check the shapes of the biases, and of the norms of queries and keys. A model may have no biases, and no such
    norms; one norm without the other is refused."""
    require((block.q_norm is None) == (block.k_norm is None), "q_norm and k_norm must be given together")
    if block.qkv_bias is not None:
        expect("qkv_bias", block.qkv_bias, ((num_heads + 2 * kv_heads) * dim,))
    if block.q_norm is not None and block.k_norm is not None:
        expect("q_norm", block.q_norm, (dim,))
        expect("k_norm", block.k_norm, (dim,))


def check_tokens(num: int, tokens: Tokens, angles: Angles, dim: int) -> None:
    """Check the shapes of a batch of `num` tokens, and that tables and angles cover the longest row. `dim`: head
    dimension."""
    expect("positions", tokens.positions, (num,), _INT64)
    expect("rows", tokens.rows, (num,), _INT32)
    require(tokens.tables.ndim == 2, f"tables have {tokens.tables.ndim} axes; wanted: 2")
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
        require(tree.paths.ndim == 2, f"paths have {tree.paths.ndim} axes; wanted: 2")
        expect("paths", tree.paths, (num, tree.paths.shape[1]), _INT64)


def check_draws(num: int, num_temperatures: int, keys: np.ndarray) -> None:
    """Check the shapes of the arguments of `num` draws."""
    require(num_temperatures == num, f"{num_temperatures} temperatures for {num} draws")
    require(keys.dtype == np.uint64, f"keys of noise must be uint64, not {keys.dtype}")
    require(keys.size == num, f"{keys.size} keys of noise for {num} draws")


def check_draft_head(
    head: HeadWeights,
    up: NativeWeight,
    down: NativeWeight,
    out: NativeWeight,
    state: torch.Tensor,
    draft_ids: np.ndarray,
) -> None:
    """Check the shapes and dtypes of the weights, states and draft ids that `unroll` takes, and the range of the
    ids."""
    require(state.ndim == 2, f"state has {state.ndim} axes; wanted: 2")
    rows, width = state.shape
    num_draft_ids = out.out_features
    expect("state", state, (rows, width))
    shapes = [(weight.out_features, weight.in_features) for weight in (up, down, out)]
    wanted = [(2 * width, 2 * width), (width, width), (num_draft_ids, width)]
    require(shapes == wanted, f"the head's weights are {shapes}; wanted: {wanted}")
    require(len({weight.dtype for weight in (up, down, out)}) == 1, "the head's weights have several dtypes")
    expect("embedding", head.embedding, (num_draft_ids + 1, width))
    expect("words", head.words, (1, num_draft_ids), _INT32)
    require(
        draft_ids.dtype == np.int64 and draft_ids.shape == (rows,),
        f"draft ids are {draft_ids.dtype} {draft_ids.shape}; wanted: int64 [{rows}]",
    )
    known = not draft_ids.size or (draft_ids.min() >= 0 and draft_ids.max() <= num_draft_ids)
    require(bool(known), f"draft ids must be 0 to {num_draft_ids}")

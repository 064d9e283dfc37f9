"""The operations of a transformer block besides matrix products and attention: their protocol `BlockKernels`, and their
implementations in plain torch and in C. CUDA and a CPU without a C compiler use the torch implementation. Tests use it
as the reference for the C implementation (`blocks.c`).

Each kernel in C is an autograd function with its backward pass in C. The kernels share torch's OpenMP threads if both
use the GNU runtime (as torch's own packages for Linux do). The gradient of a norm's weight is added directly to
Megatron's float32 `main_grad` if the parameter has one.

Shape suffixes: N tokens (of all rows of a micro-batch, one after another), H hidden size, F features, D head dimension,
P positions.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stages.native.compile import KINDS, NoNativeKernelsError, expect, kind_of, load_library, require


@dataclass(frozen=True)
class RotaryAngles:
    """The rotary embedding's angles for the tokens of a micro-batch."""

    cosines: Tensor
    """float32 [positions, head dimension / 2], like the sines."""
    sines: Tensor
    positions: Tensor
    """int64 [tokens]: the position of each token within its row."""


@dataclass(frozen=True)
class HeadSizes:
    """The layout of `linear_qkv`'s output: for each group of queries that share a key, the group's queries, its key and
    its value."""

    groups: int
    queries_per_group: int
    dim: int


class BlockKernels(Protocol):
    """The operations of a block. All but `accumulate` are differentiable. All compute in float32 and round once if the
    output has a smaller dtype; only `gate` in plain torch also rounds silu(gate)."""

    name: str
    portable: bool
    """True: the model uses Megatron's own linears and embedding, and attention gets the blocks' dtype. False: the model
    uses the linears and the embedding for CPUs, and attention gets float32."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return x / rms(x) * weight over the last axis of float32 x, in `dtype` (RMSNorm, Zhang & Sennrich 2019)."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of [..., 2 F], with the gate's features first (SwiGLU, Shazeer 2020)."""
        ...

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, heads, D], keys and values [N, groups, D], in the dtype that attention takes (see
        `portable`). If `angles` is given, queries and keys are rotated (RoPE, Su et al. 2021; the two numbers of a
        rotated pair are half a head apart)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y in x's dtype."""
        ...

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        """Add `part`, which may have another dtype, to `total`."""
        ...


# ---- plain torch ----------------------------------------------------------------------------------------


class ComposedKernels:
    """The plain torch implementation of `BlockKernels` for CPUs."""

    name = "torch"
    portable = False

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x, weight_H.shape, weight_H.to(x.dtype), eps).to(dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(qkv_NF)
        each_NGXD = qkv_NF.view(num_tokens, sizes.groups, sizes.queries_per_group + 2, sizes.dim)
        each_NGXD = each_NGXD if self.portable else each_NGXD.float()
        queries_NGXD, key_NGD, value_NGD = each_NGXD[:, :, :-2], each_NGXD[:, :, -2], each_NGXD[:, :, -1]
        query_NKD = queries_NGXD.reshape(num_tokens, -1, sizes.dim)
        if angles is not None:
            query_NKD, key_NGD = rotate(query_NKD, angles), rotate(key_NGD, angles)
        return query_NKD, key_NGD, value_NGD

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        total += part


class PortableKernels(ComposedKernels):
    """The plain torch implementation of `BlockKernels` for any device."""

    name = "portable"
    portable = True


def rotate(x_NKD: Tensor, angles: RotaryAngles) -> Tensor:
    """Return the heads `x_NKD` [N, heads, D], rotated by the angles of each token's position. The rotation is computed
    in float32, and returned in x's dtype."""
    cosine_N1D, sine_N1D = (table[angles.positions, None] for table in (angles.cosines, angles.sines))
    a, b = x_NKD.float().chunk(2, -1)
    turned = torch.cat([a * cosine_N1D - b * sine_N1D, b * cosine_N1D + a * sine_N1D], -1)
    return turned.to(x_NKD.dtype)


# ---- in C ------------------------------------------------------------------------------------------------


_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_FLOATS = tuple(KINDS)
_NORM_PARTS = 16
"""Number of partial sums that the C code adds up for the gradient of a norm's weight. It must be equal to the constant
PARTS in blocks.c, since it sizes the memory for these sums."""


class _Heads(ctypes.Structure):
    """The places of the query, key or value heads in the output of `linear_qkv`. The fields are the fields of the
    structure `heads` in blocks.c, where a comment explains them."""

    _fields_ = (
        *((name, _L) for name in ("row", "first", "stride")),
        *((name, ctypes.c_int32) for name in ("per", "count", "dim")),
    )


def load_block_kernels() -> NativeBlockKernels:
    """Return the C kernels, compiled if necessary. Raises NoNativeKernelsError if they cannot be built."""
    library = load_library("blocks", Path(__file__).parent, ("blocks.c",), (), {"heads": _Heads})
    library.norm.argtypes = [_P, _P, _I, _F, _P, _I, _P, _L, _I]
    library.norm_gradient.argtypes = [_P, _I, _P, _P, _I, _P, _P, _P, _P, _L, _I]
    library.gate.argtypes = [_P, _P, _I, _L, _I]
    library.gate_gradient.argtypes = [_P, _P, _P, _I, _L, _I]
    library.take_heads.argtypes = [_P, _I, _Heads, _P, _P, _P, _P, _L]
    library.put_heads.argtypes = [_P, _L, _L, _P, _I, _Heads, _P, _P, _P, _L]
    library.add.argtypes = [_P, _P, _I, _P, _L]
    for name in ("norm", "norm_gradient", "gate", "gate_gradient", "take_heads", "put_heads", "add"):
        getattr(library, name).restype = None
    return NativeBlockKernels(library)


class NativeBlockKernels:
    """The C implementation of `BlockKernels`: float32 and bfloat16, on a CPU."""

    name = "native"
    portable = False

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return _Norm.apply(x, weight_H, eps, dtype, self.library)

    def gate(self, gate_up: Tensor) -> Tensor:
        return _Gate.apply(gate_up, self.library)

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = _SplitHeads.apply(qkv_NF, sizes, angles, self.library)
        return query, key, value

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return _Add.apply(x, y, self.library)

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        if total.dtype is torch.bfloat16:
            total += part
            return
        part = part.contiguous()
        expect("total", total, total.shape)
        expect("part", part, total.shape, _FLOATS)
        self.library.add(total.data_ptr(), part.data_ptr(), kind_of(part.dtype), total.data_ptr(), total.numel())


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype, library: ctypes.CDLL) -> Tensor:
        x = x.contiguous()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        expect("x", x, x.shape)
        expect("weight", weight_H, (width,), _FLOATS)
        # blocks.c has three of the four combinations: with a float32 weight the output is float32
        require(weight_H.dtype != torch.float32 or dtype == torch.float32, f"a norm of float32 in {dtype}")
        out, scales = torch.empty_like(x, dtype=dtype), x.new_empty(rows)
        weight_kind = kind_of(weight_H.dtype)
        library.norm(
            x.data_ptr(), weight_H.data_ptr(), weight_kind, eps, out.data_ptr(), kind_of(dtype), scales.data_ptr(),
            rows, width,
        )  # fmt: skip
        ctx.save_for_backward(x, weight_H, scales)
        ctx.library, ctx.main_grad = library, getattr(weight_H, "main_grad", None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, scales = ctx.saved_tensors
        grad, dx, width = grad.contiguous(), torch.empty_like(x), x.shape[-1]
        parts, total = x.new_empty(_NORM_PARTS, width), None
        if ctx.needs_input_grad[1]:
            adds = ctx.main_grad is not None and ctx.main_grad.dtype is torch.float32
            total = ctx.main_grad if adds else x.new_zeros(width)
            expect("main_grad", total, (width,))
        expect("grad", grad, x.shape, (torch.float32,) if weight_H.dtype == torch.float32 else _FLOATS)
        ctx.library.norm_gradient(
            grad.data_ptr(), kind_of(grad.dtype), x.data_ptr(), weight_H.data_ptr(), kind_of(weight_H.dtype),
            scales.data_ptr(), dx.data_ptr(), None if total is None else total.data_ptr(), parts.data_ptr(),
            len(scales), width,
        )  # fmt: skip
        if total is None or total is ctx.main_grad:
            return dx, None, None, None, None
        if ctx.main_grad is not None:
            ctx.main_grad.add_(total)
            return dx, None, None, None, None
        return dx, total.to(weight_H.dtype), None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, library: ctypes.CDLL) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        expect("gate_up", gate_up, (*gate_up.shape[:-1], 2 * width), _FLOATS)
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        library.gate(gate_up.data_ptr(), out.data_ptr(), kind_of(out.dtype), out.numel() // width, width)
        ctx.save_for_backward(gate_up)
        ctx.library = library
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad, to, width = grad.contiguous(), torch.empty_like(gate_up), gate_up.shape[-1] // 2
        rows, kind = grad.numel() // width, kind_of(gate_up.dtype)
        expect("grad", grad, (*gate_up.shape[:-1], width), (gate_up.dtype,))
        ctx.library.gate_gradient(grad.data_ptr(), gate_up.data_ptr(), to.data_ptr(), kind, rows, width)
        return to, None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None, library: ctypes.CDLL
    ) -> tuple[Tensor, ...]:
        qkv_NF = qkv_NF.contiguous()
        expect("qkv", qkv_NF, (len(qkv_NF), sizes.groups * (sizes.queries_per_group + 2) * sizes.dim), _FLOATS)
        if angles is not None:
            require(sizes.dim % 2 == 0, f"heads of {sizes.dim} numbers cannot be turned in pairs")
            expect("positions", angles.positions, (len(qkv_NF),), (torch.int64,))
            expect("cosines", angles.cosines, (len(angles.cosines), sizes.dim // 2))
            expect("sines", angles.sines, angles.cosines.shape)
        parts = []
        for heads, turned in _layout(sizes, qkv_NF.shape[-1]):
            part = qkv_NF.new_empty(len(qkv_NF), heads.count, sizes.dim, dtype=torch.float32)
            kind, tables = kind_of(qkv_NF.dtype), _addresses(angles if turned else None)
            library.take_heads(qkv_NF.data_ptr(), kind, heads, *tables, part.data_ptr(), len(qkv_NF))
            parts.append(part)
        ctx.sizes, ctx.angles, ctx.library, ctx.shape, ctx.dtype = sizes, angles, library, qkv_NF.shape, qkv_NF.dtype
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        to_NF = torch.empty(ctx.shape, dtype=ctx.dtype)
        for grad, (heads, turned) in zip(grads, _layout(ctx.sizes, ctx.shape[-1]), strict=True):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            fits = grad.shape == (len(to_NF), heads.count, heads.dim) and grad.dtype == torch.float32
            require(fits, f"a gradient of heads is {list(grad.shape)} {grad.dtype}")
            tables = _addresses(ctx.angles if turned else None)
            ctx.library.put_heads(
                grad.data_ptr(), *grad.stride()[:2], to_NF.data_ptr(), kind_of(ctx.dtype), heads, *tables, len(to_NF)
            )
        return to_NF, None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, library: ctypes.CDLL) -> Tensor:
        x, y = x.contiguous(), y.contiguous()
        expect("x", x, x.shape)
        expect("y", y, x.shape, _FLOATS)
        out = torch.empty_like(x)
        library.add(x.data_ptr(), y.data_ptr(), kind_of(y.dtype), out.data_ptr(), x.numel())
        ctx.dtype = y.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.to(ctx.dtype), None


def _layout(sizes: HeadSizes, row: int) -> tuple[tuple[_Heads, bool], ...]:
    """Return (position in a row of `linear_qkv`'s output, True if the rotary embedding applies) for queries, for keys
    and for values. `row`: length of a row."""
    queries, group = sizes.queries_per_group, (sizes.queries_per_group + 2) * sizes.dim
    return (
        (_Heads(row, 0, group, queries, sizes.groups * queries, sizes.dim), True),
        (_Heads(row, queries * sizes.dim, group, 1, sizes.groups, sizes.dim), True),
        (_Heads(row, (queries + 1) * sizes.dim, group, 1, sizes.groups, sizes.dim), False),
    )


def _addresses(angles: RotaryAngles | None) -> tuple[int | None, int | None, int | None]:
    if angles is None:
        return None, None, None
    return angles.cosines.data_ptr(), angles.sines.data_ptr(), angles.positions.data_ptr()


# ---- choice ----------------------------------------------------------------------------------------------

LOG = logging.getLogger("stageline.kernels")

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def choose_kernels(
    asked: Literal["auto", "native", "torch", "portable"], dtype: torch.dtype, device: torch.device
) -> BlockKernels:
    """Return the gang's kernels. On a CPU, unless `asked` is `portable`, rank 0 decides for all ranks, since the last
    bits of a run depend on the choice. The call then blocks until every rank takes part.

    Raises ValueError, naming the key, for kernels that do not support the dtype or the device. Raises
    NoNativeKernelsError if the C kernels were chosen and this machine cannot build them. Under `auto`, rank 0 chooses
    plain torch if its own machine cannot build the C kernels.
    """
    on_cpu = device.type == "cpu"
    fits = on_cpu and dtype in NATIVE_DTYPES
    if asked == "native" and not fits:
        raise ValueError(f"model.kernels = native needs float32 or bfloat16 on a CPU; here {dtype}, {device}")
    if asked == "torch" and not on_cpu:
        raise ValueError(f"model.kernels = torch needs a CPU; here {device}: auto or portable")
    if asked == "portable" or not on_cpu:
        return PortableKernels()
    wanted = [asked != "torch" and fits]
    if wanted[0] and dist.get_rank() == 0:
        try:
            load_block_kernels()
        except NoNativeKernelsError as error:
            if asked == "native":
                raise
            LOG.warning("blocks are computed by plain torch, about twice as slow: %s", error)
            wanted = [False]
    dist.broadcast_object_list(wanted)
    return load_block_kernels() if wanted[0] else ComposedKernels()

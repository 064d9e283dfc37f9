"""The operations between the products of a block: C and plain torch against float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.models import layers as linears
from stages.models.kernels.blocks import (
    BlockKernels,
    ComposedKernels,
    HeadSizes,
    PortableKernels,
    RotaryAngles,
    load_block_kernels,
)
from stages.models.kernels.fused import FusedBlockKernels
from stages.models.numerics import Products

N, H, F_ = 37, 48, 40
SIZES = HeadSizes(groups=2, queries_per_group=3, dim=16)
WIDTH = SIZES.groups * (SIZES.queries_per_group + 2) * SIZES.dim
KERNELS = {
    "torch": ComposedKernels,
    "portable": PortableKernels,
    "fused": FusedBlockKernels,
    "native": load_block_kernels,
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = [pytest.mark.parametrize("name", KERNELS), pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def compare(
    kernel: Callable[..., Any], oracle: Callable[..., Any], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """Outputs and gradients of the inputs against those of the oracle on float64 copies."""
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    found, wanted = kernel(*inputs), oracle(*wide)
    found, wanted = (x if isinstance(x, tuple) else (x,) for x in (found, wanted))
    grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype) for x in found]
    tolerance = DTYPES[dtype]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    of_inputs = torch.autograd.grad(found, inputs, grads)
    expected = torch.autograd.grad(wanted, wide, [g.double() for g in grads])
    for one, other in zip(of_inputs, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def test_norm(name: str, dtype: torch.dtype) -> None:
    kernels = KERNELS[name]()
    inputs = (drawn(N, 1, H), drawn(H, dtype=dtype))
    for out in {dtype, torch.float32}:
        compare(
            lambda x, w, out=out: kernels.norm(x, w, 1e-5, out),
            lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w,
            inputs,
            dtype,
        )


def test_gate(name: str, dtype: torch.dtype) -> None:
    kernels = KERNELS[name]()
    large = drawn(N, 1, 2 * F_, dtype=dtype).detach() * 30  # sigmoid at both of its ends
    for gate_up in (drawn(N, 1, 2 * F_, dtype=dtype), large.requires_grad_()):
        compare(kernels.gate, lambda x: F.silu(x[..., :F_]) * x[..., F_:], (gate_up,), dtype)


def turned(x: Tensor, angles: RotaryAngles) -> Tensor:
    """Pairs (i, i + D / 2) of every head, turned by a matrix of each position."""
    c, s = (table.double()[angles.positions][:, None] for table in (angles.cosines, angles.sines))
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, a * s + b * c], -1)


@pytest.mark.parametrize("with_angles", [True, False])
def test_heads(name: str, dtype: torch.dtype, with_angles: bool) -> None:
    kernels = KERNELS[name]()
    phases = torch.rand(20, SIZES.dim // 2) * 6
    angles = RotaryAngles(phases.cos(), phases.sin(), torch.arange(N) % 20)

    def oracle(qkv: Tensor) -> tuple[Tensor, ...]:
        each = qkv.view(N, SIZES.groups, SIZES.queries_per_group + 2, SIZES.dim)
        query, key, value = each[:, :, :3].flatten(1, 2), each[:, :, 3], each[:, :, 4]
        return (turned(query, angles), turned(key, angles), value) if with_angles else (query, key, value)

    compare(
        lambda qkv: kernels.split_heads(qkv, SIZES, angles if with_angles else None),
        oracle,
        (drawn(N, WIDTH, dtype=dtype),),
        dtype,
    )


def test_sums(name: str, dtype: torch.dtype) -> None:
    kernels: BlockKernels = KERNELS[name]()
    compare(kernels.add, lambda x, y: x + y, (drawn(N, 1, H), drawn(N, 1, H, dtype=dtype)), dtype)
    total, part = torch.randn(300, 200), torch.randn(200, 300).to(dtype).T
    expected = total.double() + part.double()
    kernels.accumulate(total, part)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_weights_go_where_megatron_collects_them(name: str, dtype: torch.dtype) -> None:
    kernels, tolerance = KERNELS[name](), DTYPES[dtype]
    weight, x, grad = (drawn(*shape, dtype=dtype) for shape in ((F_, H), (N, 1, H), (N, 1, F_)))
    alone = torch.autograd.grad(linears.cpu_linear(x, weight, Products.TORCH, kernels), weight, grad)[0]
    weight.main_grad = torch.ones(F_, H)
    with pytest.raises(RuntimeError, match="unused"):  # it is not returned
        torch.autograd.grad(linears.cpu_linear(x, weight, Products.TORCH, kernels), weight, grad)
    torch.testing.assert_close(weight.main_grad - 1, alone.float(), rtol=tolerance, atol=tolerance * 10)


def test_the_embeddings_gradient_is_added_to_the_rows_that_were_read(name: str, dtype: torch.dtype) -> None:
    weight = drawn(9, H, dtype=dtype)
    rows, inside = torch.tensor([[3, 0, 3, 8]]), torch.tensor([[True, True, True, False]])
    out = linears._Embedding.apply(weight, rows, inside)
    assert torch.equal(out[0, 0], weight[3])
    assert not out[0, 3].any()
    grad = drawn(1, 4, H, dtype=dtype).detach()
    weight.main_grad = torch.ones(9, H)
    linears._Embedding.apply(weight, rows, inside).backward(grad)
    wanted = torch.ones(9, H)
    wanted[3] += grad[0, 0].float() + grad[0, 2].float()
    wanted[0] += grad[0, 1].float()
    torch.testing.assert_close(weight.main_grad, wanted)
    assert weight.grad is None

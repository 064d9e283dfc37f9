"""Packed weights and products with them, of plain torch and of the native kernels, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.kernels.packed import NotFiniteError
from stages.engines.embedded.kernels.protocol import Angles, Block, FusedKernels, Kernels, Tokens
from stages.engines.embedded.kernels.reference import TorchKernels
from tests.support.processors import NEEDED, kernels_for, needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
INFINITIES = [float("inf"), float("-inf")]
SIZES = [(1, 1), (20, 36), (50, 33), (96, 176), (97, 2), (192, 576)]
"""(out, in). Tiles have 16 or 48 outputs: less than one, some and a part, whole ones; matrix registers take 32 numbers
of a sum at once, pairs of bfloat16 two: an odd number, a part, whole ones."""


def make_kernels(name: str) -> Iterator[Kernels]:
    """`vectors`: the native ones as they are on a CPU without matrix registers; or as on another processor."""
    if name == "torch":
        yield TorchKernels()
        return
    if name in NEEDED:
        yield kernels_for(name)
        return
    native = load_native_kernels()
    has_them = native.use_matrix_registers(True)
    if name == "vectors":
        if not has_them:
            pytest.skip("this CPU has no matrix registers: vectors are the best it has")
        native.use_matrix_registers(False)
    yield native
    native.use_matrix_registers(True)


NATIVE = [pytest.param(name, marks=needs_compiler) for name in ("best", "vectors", *NEEDED)]


@pytest.fixture(params=["torch", *NATIVE])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    yield from make_kernels(request.param)


@pytest.fixture(params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    yield from make_kernels(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_unpack_is_the_inverse_of_pack(kernels: Kernels, size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = randn(*size)
    assert torch.equal(kernels.unpack(kernels.pack({0: weight}, dtype)), weight.to(dtype))
    assert torch.equal(kernels.unpack(kernels.pack({0: weight.to(dtype)}, dtype)), weight.to(dtype))


@pytest.mark.parametrize("given", [torch.float16, torch.float64, torch.bfloat16])
def test_any_dtype_can_be_packed(kernels: Kernels, given: torch.dtype) -> None:
    weight = randn(50, 33).to(given)
    for dtype in DTYPES:
        assert torch.equal(kernels.unpack(kernels.pack({0: weight}, dtype)), weight.float().to(dtype))


def test_a_weight_that_is_not_contiguous(kernels: Kernels) -> None:
    weight = randn(33, 50).t()
    assert torch.equal(kernels.unpack(kernels.pack({0: weight}, torch.float32)), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_stacked_and_replaced(kernels: Kernels, dtype: torch.dtype) -> None:
    """Parts that begin and end within a tile; the weight they replace rows of stays what it was."""
    parts = {0: randn(50, 33), 50: randn(1, 33), 51: randn(70, 33)}
    whole = torch.cat(list(parts.values())).to(dtype)
    packed = kernels.pack(parts, dtype)
    assert torch.equal(kernels.unpack(packed), whole)
    for start, part in parts.items():
        new = randn(*part.shape, seed=1)
        expected = whole.clone()
        expected[start : start + len(part)] = new.to(dtype)
        replaced = kernels.pack({start: new}, dtype, old=packed)
        assert torch.equal(kernels.unpack(replaced), expected)
        x = randn(3, 33).to(dtype)
        assert torch.equal(
            kernels.linear(x, replaced, dtype), kernels.linear(x, kernels.pack({0: expected}, dtype), dtype)
        )
    assert torch.equal(kernels.unpack(packed), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("place", "value"),
    [*(((out, at), float("nan")) for out, at in [(0, 0), (49, 32), (20, 15)]), *(((20, 15), x) for x in INFINITIES)],
)
def test_the_infinite_part_is_named(kernels: Kernels, place: tuple[int, int], value: float, dtype: torch.dtype) -> None:
    good, bad = randn(50, 33), randn(50, 33)
    bad[place] = value
    with pytest.raises(NotFiniteError) as caught:
        kernels.pack({0: good, 50: bad, 100: good}, dtype)
    assert caught.value.start == 50


def test_a_number_too_large_for_bfloat16_is_not_finite(kernels: Kernels) -> None:
    weight = randn(50, 33)
    weight[3, 4] = torch.finfo(torch.float32).max
    kernels.pack({0: weight}, torch.float32)
    with pytest.raises(NotFiniteError):
        kernels.pack({0: weight}, torch.bfloat16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_product_is_that_of_float64(kernels: Kernels, rows: int, size: tuple[int, int]) -> None:
    """A sum of n products in float32 is off by at most about n 2^-24 times the sum of their magnitudes; bfloat16 rounds
    the result once more, to 8 bits. `wide`, it does not. Other numbers of rows have the same bits (below)."""
    weight, x = randn(*size), randn(rows, size[1], seed=1)
    for dtype in DTYPES:
        a, b = x.to(dtype).double(), weight.to(dtype).double().t()
        bound = (size[1] + 1) * 2**-24 * (a.abs() @ b.abs()) + 1e-30
        wide = kernels.linear(x.to(dtype), kernels.pack({0: weight}, dtype, wide=True), torch.float32)
        assert wide.dtype == torch.float32
        assert ((wide - a @ b).abs() <= bound).all()
        own = kernels.linear(x.to(dtype), kernels.pack({0: weight}, dtype), dtype)
        assert own.dtype == dtype
        assert ((own - a @ b).abs() <= bound + (dtype == torch.bfloat16) * 2**-8 * (a @ b).abs() * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 101])
def test_a_row_has_its_bits_in_any_batch(kernels: Kernels, width: int, dtype: torch.dtype, two_threads: None) -> None:
    """At numbers of rows around the borders of tiles, at places among them, with one thread and two (oneDNN's threads
    split the rows)."""
    out, most = 240, 70
    packed, x = kernels.pack({0: randn(out, width)}, dtype), randn(most, width, seed=1).to(dtype)
    whole = kernels.linear(x, packed, dtype)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 48, 64, 69, 70):
            for start in {0, (most - rows) // 2, most - rows}:
                part = slice(start, start + rows)
                assert torch.equal(kernels.linear(x[part].contiguous(), packed, dtype), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_are_cut_without_a_trace(native: Kernels, dtype: torch.dtype, two_threads: None) -> None:
    """More numbers than a tile is taken through at once, an odd count of them: the cut changes no bit either."""
    weight, x = randn(60, 8193), randn(20, 8193, seed=1).to(dtype)
    packed = native.pack({0: weight}, dtype, wide=True)
    got = native.linear(x, packed, torch.float32)
    torch.testing.assert_close(got.double(), x.double() @ weight.to(dtype).double().t(), atol=2e-3, rtol=0)
    for rows in (1, 8, 9, 17):
        assert torch.equal(native.linear(x[:rows].contiguous(), packed, torch.float32), got[:rows])


@pytest.mark.parametrize("features", [(), ("qkv_bias",), ("q_norm", "k_norm"), ("qkv_bias", "q_norm", "k_norm")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_a_block_equal_plain_torch(native: Kernels, dtype: torch.dtype, features: tuple[str, ...]) -> None:
    """In one call what plain torch does in several; the result is added. Under bfloat16 plain torch rounds in between,
    by 2^-9 of numbers of about 1. `features`: what only some models have."""
    plain = TorchKernels()
    assert isinstance(native, FusedKernels)
    assert not isinstance(plain, FusedKernels)
    heads, kv_heads, dim, hidden, ffn, num = 4, 2, 16, 50, 70, 9
    norm, x = randn(hidden, seed=4).abs(), randn(num, hidden)
    weights = [randn((heads + 2 * kv_heads) * dim, hidden) / 8, randn(hidden, heads * dim, seed=1) / 8]
    weights += [randn(2 * ffn, hidden, seed=2) / 8, randn(hidden, ffn, seed=3) / 8]
    ours, theirs = ([k.pack({0: w}, dtype) for w in weights] for k in (native, plain))
    widths = {"qkv_bias": (heads + 2 * kv_heads) * dim, "q_norm": dim, "k_norm": dim}
    own = {name: randn(widths[name], seed=seed).abs() for seed, name in enumerate(features)}

    def finished(qkv: torch.Tensor) -> torch.Tensor:
        whole = (qkv.float() + own.get("qkv_bias", 0)).unflatten(1, (-1, dim))
        for name, part in (("q_norm", whole[:, :heads]), ("k_norm", whole[:, heads : heads + kv_heads])):
            if name in own:
                part /= (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() / own[name]
        return whole.flatten(1).to(dtype)

    angles = Angles(cos=randn(64, dim // 2), sin=randn(64, dim // 2, seed=1))
    tokens = Tokens(
        ids=torch.zeros(num, dtype=torch.int64),
        positions=torch.tensor([0, 1, 2, 3, 17, 18, 19, 5, 20]),
        rows=torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 3], dtype=torch.int32),
        tables=torch.tensor([[1, 0], [2, 3], [4, 0], [5, 6]], dtype=torch.int32),
        longest=21,
    )
    cache = randn(8, kv_heads, dim, 16), randn(8, kv_heads, 16, dim, seed=1)
    cache_too = cache[0].clone(), cache[1].clone()
    close = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 2**-6}

    h = plain.add_norm(x.clone(), None, norm, 1e-5, dtype)
    read = plain.attend(finished(plain.linear(h, theirs[0], dtype)), angles, tokens, *cache_too)
    expected = x + plain.linear(read, theirs[1], dtype)
    apart, inside = torch.zeros_like(x), x.clone()
    block = Block(norm, *ours[:2], norm, *ours[2:], **own)
    native.attention(x, block, 1e-5, angles, tokens, *cache, into=apart)
    native.attention(inside, block, 1e-5, angles, tokens, *cache, into=inside)
    torch.testing.assert_close(inside, expected, **close)
    torch.testing.assert_close(x + apart, inside, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cache[0], cache_too[0], **close)

    h = plain.add_norm(x.clone(), None, norm, 1e-5, dtype)
    expected = x + plain.linear(plain.gate(plain.linear(h, theirs[2], dtype)), theirs[3], dtype)
    apart, inside = torch.zeros_like(x), x.clone()
    native.mlp(x, block, 1e-5, into=apart)
    native.mlp(inside, block, 1e-5, into=inside)
    torch.testing.assert_close(inside, expected, **close)
    torch.testing.assert_close(x + apart, inside, atol=1e-6, rtol=1e-6)

    other = Block(norm * 0.5, *ours[:2], norm, *ours[2:], **own)
    halves, whole, blocks = x.clone(), x.clone(), (block, other)
    layers = [(cache[0].clone(), cache[1].clone()) for _ in blocks]
    layers_too = [(keys.clone(), values.clone()) for keys, values in layers]
    for each, layer in zip(blocks, layers, strict=True):
        native.attention(halves, each, 1e-5, angles, tokens, *layer, into=halves)
        native.mlp(halves, each, 1e-5, into=halves)
    native.run_blocks(whole, blocks, 1e-5, angles, tokens, layers_too)
    assert torch.equal(whole, halves)
    assert all(
        torch.equal(a, b) for one, two in zip(layers, layers_too, strict=True) for a, b in zip(one, two, strict=True)
    )
    native.run_blocks(whole, blocks[::-1], 1e-5, angles, tokens, layers_too)  # what it keeps is of those blocks only
    native.attention(halves, other, 1e-5, angles, tokens, *layers[0], into=halves)
    native.mlp(halves, other, 1e-5, into=halves)
    native.attention(halves, block, 1e-5, angles, tokens, *layers[1], into=halves)
    native.mlp(halves, block, 1e-5, into=halves)
    assert torch.equal(whole, halves)

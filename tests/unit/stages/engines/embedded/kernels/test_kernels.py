"""The two implementations of the kernels against each other, and the native ones against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.engines.embedded.kernels.cpu.native import NativeKernels, load_native_kernels
from stages.engines.embedded.kernels.protocol import Angles, Kernels, Tokens, TreePaths
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.rows import DraftTree
from stages.engines.embedded.sampling import gumbel, noise_keys
from tests.support.processors import NEEDED, kernels_for, needs_compiler

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=["native", *NEEDED])
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return load_native_kernels() if request.param == "native" else kernels_for(request.param)


@pytest.fixture(scope="module", params=["torch", "native", *NEEDED])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    return load_native_kernels() if request.param == "native" else kernels_for(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(native: NativeKernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.randn(5, 36, generator=generator), torch.randn(5, 36, generator=generator).to(dtype)
    weight = torch.rand(36, generator=generator)
    after = x.double() + delta.double()
    expected = after / (after.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = native.add_norm(x, delta, weight, 1e-5, dtype)
    torch.testing.assert_close(x.double(), after, atol=1e-6, rtol=0)
    rounding = 2**-7 if dtype == torch.bfloat16 else 0  # a tie may fall to either side
    torch.testing.assert_close(out.double(), expected.to(dtype).double(), atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate(native: NativeKernels, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(7, 2 * 41, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        native.gate(gate_up).double(), expected, atol=1e-30, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_equals_plain_torch(native: NativeKernels, dtype: torch.dtype, cache: torch.dtype, dim: int) -> None:
    """A pass of everything: the end of a prompt in two blocks, a single new token after 40, two rows that share."""
    heads, kv_heads, num_blocks = 6, 2, 9
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    positions = [*range(9, 20), 40, 17, 18, 18]
    rows = [0] * 11 + [1] + [2] * 2 + [3]
    tables = [[3, 1, 0], [2, 5, 4], [6, 7, 0], [6, 8, 0]]
    tokens = Tokens(
        ids=torch.zeros(len(rows), dtype=torch.int64),
        positions=torch.tensor(positions),
        rows=torch.tensor(rows, dtype=torch.int32),
        tables=torch.tensor(tables, dtype=torch.int32),
        longest=41,
    )
    angles = Angles(cos=randn(64, dim // 2), sin=randn(64, dim // 2))
    keys, values = randn(num_blocks, kv_heads, dim, 16).to(cache), randn(num_blocks, kv_heads, 16, dim).to(cache)
    keys_too, values_too = keys.clone(), values.clone()
    qkv = randn(len(rows), (heads + 2 * kv_heads) * dim).to(dtype)
    expected = TorchKernels().attend(qkv, angles, tokens, keys_too, values_too)
    got = native.attend(qkv, angles, tokens, keys, values)
    exact, rounded = {"atol": 1e-5, "rtol": 1e-5}, {"atol": 1e-2, "rtol": 2**-7}
    torch.testing.assert_close(got, expected, **exact if dtype == cache == torch.float32 else rounded)
    torch.testing.assert_close(keys, keys_too, **exact if cache == torch.float32 else rounded)
    torch.testing.assert_close(values, values_too, atol=0, rtol=0)


@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(6, 2, 8), (4, 4, 64), (8, 1, 80), (5, 1, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_guesses_read_their_path(kernels: Kernels, dtype: torch.dtype, num_heads: int, kv_heads: int, dim: int) -> None:
    """A tree of guesses over the end of a block: each is read as if its path had been fed alone, bit for bit. 64
    numbers of a head are taken at once: fewer, as many, more. Heads that share keys and values are read together, 4 or
    6 at once: alone, some, and more than either."""
    start = 13
    tree = DraftTree((0,) * 6, (-1, 0, 1, 0, -1, 3))
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    angles = Angles(cos=randn(64, dim // 2), sin=randn(64, dim // 2))
    cache = randn(5, kv_heads, dim, 16).to(dtype), randn(5, kv_heads, 16, dim).to(dtype)
    qkv = randn(len(tree), (num_heads + 2 * kv_heads) * dim)
    tables = torch.tensor([[3, 1]], dtype=torch.int32)

    def attend(guesses: list[int], positions: list[int], tree_paths: TreePaths | None) -> torch.Tensor:
        tokens = Tokens(
            ids=torch.zeros(len(guesses), dtype=torch.int64),
            positions=torch.tensor(positions),
            rows=torch.zeros(len(guesses), dtype=torch.int32),
            tables=tables,
            longest=max(positions) + 1,
            tree_paths=tree_paths,
        )
        return kernels.attend(qkv[guesses], angles, tokens, cache[0].clone(), cache[1].clone())

    positions = [start + depth for depth in tree.depths]
    paths = [[start + guess for guess in tree.path_to(each)] for each in range(len(tree))]
    tree_paths = TreePaths(
        cells=torch.arange(start, start + len(tree)),
        starts=torch.full((len(tree),), start),
        paths=torch.tensor([path + [0] * (3 - len(path)) for path in paths]),
    )
    together = attend(list(range(len(tree))), positions, tree_paths)
    for guess in range(len(tree)):
        path = tree.path_to(guess)
        alone = attend(path, [start + depth for depth in range(len(path))], None)
        assert torch.equal(together[guess], alone[-1])


@pytest.mark.parametrize("vocab", [96, 5000, 49152])
def test_choose_equals_plain_torch(native: NativeKernels, vocab: int) -> None:
    """Temperature 0 among others, banned tokens, a vocabulary that is no multiple of anything."""
    scales = torch.tensor([0.1, 1.0, 3.0, 10.0, 30.0]).repeat(8)[:, None]
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0)) * scales
    logits[:, ::7] = float("-inf")
    temperatures = [0.0, 1.0, 0.7, 1.3] * 10
    keys = noise_keys(1, 2, np.arange(40), 5)
    tokens, logprobs = native.choose(logits.clone(), temperatures, keys)
    expected, expected_logprobs = TorchKernels().choose(logits.clone(), temperatures, keys)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-6)


def test_noise_is_the_same_function(native: NativeKernels) -> None:
    """One token is raised to just below, or just above, the winner of pure noise; the choice must follow."""
    vocab, rows = 4096, 16
    keys = noise_keys(3, 1, np.arange(rows), 0)
    noise = gumbel(keys, vocab, torch.device("cpu"))
    top = noise.topk(2)
    for margin in (-1e-4, 1e-4):
        logits = torch.zeros(rows, vocab)
        gap = top.values[:, 0] - top.values[:, 1]
        logits[range(rows), top.indices[:, 1]] = gap + margin
        expected = top.indices[:, 1 if margin > 0 else 0]
        assert native.choose(logits, [1.0] * rows, keys)[0].tolist() == expected.tolist()


def test_nan_logits_give_a_nan_logprob(native: NativeKernels) -> None:
    """The engine stops on it; it must not be overlooked."""
    logits = torch.zeros(2, 100)
    logits[1, 40] = float("nan")
    _, logprobs = native.choose(logits, [1.0, 1.0], noise_keys(1, 1, np.arange(2), 1))
    assert logprobs.isfinite().tolist() == [True, False]

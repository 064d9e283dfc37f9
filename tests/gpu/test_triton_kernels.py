"""Triton's kernels against the same functions in plain torch, on random inputs of even and odd sizes.

On a CUDA device, or without one in Triton's interpreter (`TRITON_INTERPRET=1`; `make test` runs it so, see
tests/integration/test_triton_interpreted.py), which checks what the kernels compute but not that they compile
(test_triton_compiles.py does), nor what happens when programs run side by side.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, NO_BLOCK, blocks_for
from stages.engines.embedded.kernels.protocol import Angles, NoTritonKernelsError, Tokens
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.sampling import ban, noise_keys
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not CUDA and not INTERPRETED, reason="no CUDA device, and TRITON_INTERPRET is not 1"),
]
PLAIN = TorchKernels()
SPLIT = 256 if CUDA else 64
"""`triton_kernels.SPLIT`, smaller in the interpreter, which is far slower: contexts around its multiples are where the
kernels could go wrong."""
TILE = 64 if CUDA else 32


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            let_the_interpreter_multiply_bfloat16(patch)
        module = importlib.import_module("stages.engines.embedded.kernels.cuda.triton_kernels")
        if CUDA:
            assert (module.SPLIT, module._TILE) == (SPLIT, TILE)
        patch.setattr(module, "SPLIT", SPLIT)
        patch.setattr(module, "_TILE", TILE)
        yield module.load_triton_kernels(DEVICE)


def let_the_interpreter_multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """It keeps bfloat16 as 16-bit integers and (Triton 3.6 to 3.9) multiplies those."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    patch.setattr(builder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size).to(DEVICE, dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance for numbers around 1. bfloat16 keeps 8 bits."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 36), (3, 576), (5, 2048)])
def test_add_norm(kernels: Any, dtype: torch.dtype, rows: int, width: int) -> None:
    x, delta, weight = randn(rows, width), randn(rows, width, dtype=dtype), randn(width)
    for change in (None, delta):
        mine, plain = x.clone(), x.clone()
        got = kernels.add_norm(mine, change, weight, 1e-5, dtype)
        expected = PLAIN.add_norm(plain, change, weight, 1e-5, dtype)
        assert got.dtype == dtype
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)
        torch.testing.assert_close(got, expected, **tolerance(dtype))


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 56), (3, 1536), (2, 2500)])
def test_gate(kernels: Any, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype)
    got = kernels.gate(gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), PLAIN.gate(gate_up.float()), **tolerance(dtype))


def scattered(lengths: Sequence[int], pool: int) -> torch.Tensor:
    """A table of blocks in random places for each row."""
    blocks = (torch.randperm(pool - 1) + 1).to(torch.int32).tolist()
    tables = torch.full((len(lengths), blocks_for(max(lengths))), NO_BLOCK, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for i in range(blocks_for(length)):
            tables[row, i] = blocks.pop()
    return tables


def pass_tokens(chunks: Sequence[tuple[int, int]], pool: int, independent: bool) -> Tokens:
    """Rows whose tokens at positions start .. stop - 1 are fed."""
    positions = [position for start, stop in chunks for position in range(start, stop)]
    rows = [row for row, (start, stop) in enumerate(chunks) for _ in range(start, stop)]
    return Tokens(
        ids=torch.zeros(len(rows), dtype=torch.int64, device=DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        rows=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        tables=scattered([stop for _, stop in chunks], pool).to(DEVICE),
        longest=max(positions) + 1,
        independent=independent,
    )


def angles(positions: int, dim: int) -> Angles:
    rotation = torch.arange(positions)[:, None] * (1.0 / 5000.0 ** (torch.arange(0, dim, 2) / dim))
    return Angles(cos=rotation.cos().to(DEVICE), sin=rotation.sin().to(DEVICE))


SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 8), (9, 3, 64), (4, 4, 24), (8, 1, 128)], ids=lambda n: str(n)
)
DECODES = [(p, p + 1) for p in (0, 1, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70)]
MIXED = [(0, 7), (14, 18), (SPLIT - 1, SPLIT + 2), (5, 6)]


@DTYPES
@SHAPES
@pytest.mark.parametrize("case", ["decode", "mixed", "short"])
def test_attend(kernels: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, case: str) -> None:
    """`decode`: one token per row, keys written while others are read; `mixed`: prompts, drafts and single tokens."""
    chunks = {"decode": DECODES, "mixed": MIXED, "short": DECODES[:4]}[case]
    pool = 1 + sum(blocks_for(stop) for _, stop in chunks)
    tokens = pass_tokens(chunks, pool, independent=case != "mixed")
    qkv = randn(len(tokens.ids), (heads + 2 * kv_heads) * dim, dtype=dtype)
    keys = randn(pool, kv_heads, dim, BLOCK_TOKENS, dtype=dtype)
    values = randn(pool, kv_heads, BLOCK_TOKENS, dim, dtype=dtype)
    my_keys, my_values = keys.clone(), values.clone()
    rotation = angles(tokens.longest, dim)
    got = kernels.attend(qkv, rotation, tokens, my_keys, my_values)
    expected = PLAIN.attend(qkv, rotation, tokens, keys, values)
    assert got.dtype == dtype
    assert (got - expected).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()
    # of bfloat16, one place of the last of its 8 bits: what lies between two of them may be rounded to either
    near = {"atol": 1e-5, "rtol": 0.0} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    torch.testing.assert_close(got, expected, **near)
    torch.testing.assert_close(my_keys, keys, **tolerance(dtype))
    torch.testing.assert_close(my_values, values, rtol=0, atol=0)


@DTYPES
def test_a_tokens_attention_does_not_depend_on_its_company(kernels: Any, dtype: torch.dtype) -> None:
    """The same bits alone, among others, decoded or as part of a longer chunk, and however long the longest may be."""
    heads, kv_heads, dim, pool = 6, 2, 32, 128
    tokens = pass_tokens(DECODES, pool, independent=True)
    qkv = randn(len(DECODES), (heads + 2 * kv_heads) * dim, dtype=dtype)
    keys = randn(pool, kv_heads, dim, BLOCK_TOKENS, dtype=dtype)
    values = randn(pool, kv_heads, BLOCK_TOKENS, dim, dtype=dtype)
    rotation = angles(4 * SPLIT, dim)

    def attend(wanted: Sequence[int], longest: int, independent: bool) -> torch.Tensor:
        index = torch.tensor(wanted, device=DEVICE)
        some = Tokens(
            ids=tokens.ids[index],
            positions=tokens.positions[index],
            rows=tokens.rows[index],
            tables=tokens.tables,
            longest=longest,
            independent=independent,
        )
        return kernels.attend(qkv[index], rotation, some, keys.clone(), values.clone())

    together = attend(range(len(DECODES)), tokens.longest, True)
    assert torch.equal(attend(range(len(DECODES)), tokens.longest, False), together)
    assert torch.equal(attend(range(len(DECODES)), 4 * SPLIT, True), together)
    for i, (start, stop) in enumerate(DECODES):
        assert torch.equal(attend([i], stop, True)[0], together[i]), f"position {start}"


def test_tokens_that_fill_up_a_pass_write_nothing(kernels: Any) -> None:
    tokens = Tokens(
        ids=torch.zeros(3, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(3, dtype=torch.int64, device=DEVICE),
        rows=torch.arange(3, dtype=torch.int32, device=DEVICE),
        tables=torch.full((3, 4), NO_BLOCK, dtype=torch.int32, device=DEVICE),
        longest=64,
        independent=True,
    )
    keys, values = torch.zeros(4, 2, 8, 16, device=DEVICE), torch.zeros(4, 2, 16, 8, device=DEVICE)
    out = kernels.attend(randn(3, 80), angles(64, 8), tokens, keys, values)
    assert out.isfinite().all()
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("vocab", [96, 4096, 5000, 9000])
def test_choose(kernels: Any, vocab: int) -> None:
    """Temperatures of all kinds; the tokens are those of `noise`, the log-probs those of float64."""
    rows = 7
    logits = randn(rows, vocab).mul_(4)
    temperatures = [1.0, 0.7, 0.0, 1.3, 0.0, 1.0, 0.25]
    keys = noise_keys(3, 1, np.arange(rows), 17)
    tokens, logprobs = kernels.choose(logits.clone(), temperatures, keys)
    expected, _ = PLAIN.choose(logits.clone(), temperatures, keys)
    assert tokens.tolist() == expected.tolist()
    divisors = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)[:, None]
    exact = (logits.cpu().double() / divisors).log_softmax(-1)[range(rows), tokens.tolist()]
    torch.testing.assert_close(logprobs.cpu().double(), exact, rtol=0, atol=1e-5)


def test_choose_without_banned_tokens(kernels: Any) -> None:
    """Also where a whole chunk of the vocabulary is banned, and where one token is left."""
    rows, vocab = 4, 4099
    logits = randn(rows, vocab)
    logits[3, 4:] = float("-inf")
    banned = [(), (int(logits[1].argmax()),), (4096, 4097, 4098), (0, 1, 3)]
    keys = noise_keys(0, 1, np.arange(rows), 5)
    places = torch.full((rows, 3), -1, dtype=torch.int32)
    for row, tokens in enumerate(banned):
        places[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    halves = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(DEVICE)
    for temperature in (0.0, 0.9):
        heat = torch.full((rows,), temperature, device=DEVICE)
        got, logprobs = kernels.choose_on_device(logits, heat, halves, places.to(DEVICE))
        without = logits.clone()
        ban(without, banned)
        expected, expected_logprobs = PLAIN.choose(without, [temperature] * rows, keys)
        assert got.tolist() == expected.tolist()
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
        assert (got[3].item(), logprobs[3].item()) == (2, 0.0)


def test_logits_that_are_not_finite_show_in_the_logprob(kernels: Any) -> None:
    logits = randn(2, 5000)
    logits[1, 4500] = float("nan")
    _, logprobs = kernels.choose(logits, [1.0, 1.0], noise_keys(0, 1, np.arange(2), 5))
    assert logprobs.isfinite().tolist() == [True, False]


@pytest.mark.skipif(CUDA, reason="for machines without a GPU")
def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("stages.engines.embedded.kernels.cuda.triton_kernels")
    monkeypatch.setattr(module.knobs.runtime, "interpret", False)
    with pytest.raises(NoTritonKernelsError, match="TRITON_INTERPRET=1 only"):
        module.load_triton_kernels(DEVICE)


def test_an_engine_draws_the_same_tokens_with_them() -> None:
    """A whole model: prompts that share blocks, padded decode passes, new weights."""
    prompts = [tuple(range(3, 3 + length)) for length in ((20, 18, 1) if CUDA else (18, 17, 1))]
    num_new = 5 if CUDA else 2
    settings = SamplingConfig(max_new_tokens=num_new, min_new_tokens=num_new, temperature=0.9)
    found = []
    for kind in ("torch", "triton"):
        config = EngineConfig(max_rows=3, embedded=EmbeddedConfig(kernels=kind))
        with closing(build_embedded(RANDOM_TINY, config, max_seq=32, threads=1, device=DEVICE)) as engine:
            assert engine.numerics["kernels"] == kind
            rows = []
            for version in (0, 1):
                requests = [Request(i, 5, version, prompt, version, settings) for i, prompt in enumerate(prompts)]
                rows += sorted(engine.generate(requests), key=lambda completion: completion.row)
                norm = torch.full((engine._runner._spec.hidden_size,), 0.5)
                engine.load_weights(version + 1, {"model.norm.weight": norm})
            found.append(rows)
    for plain, triton in zip(*found, strict=True):
        np.testing.assert_array_equal(triton.tokens, plain.tokens)
        np.testing.assert_allclose(triton.logprobs, plain.logprobs, atol=1e-4)

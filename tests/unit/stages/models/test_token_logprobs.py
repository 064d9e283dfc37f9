"""The blockwise output layer against a softmax over whole logits in float64, and what it must never hold in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stages.models import parallel, token_logprobs
from stages.models.config import LayoutConfig
from stages.models.kernels.blocks import ComposedKernels
from stages.models.numerics import Products
from stages.models.protocol import Rank
from stages.models.token_logprobs import EXCLUDED, Distribution
from tests.support.collectives import run_ranks

TORCH = Products.TORCH
N, H, V = 9, 16, 100
PLAIN = Distribution(temperature=1.0, suppressed=(), eos=(), min_new_tokens=0)
KERNELS = ComposedKernels()
ALL = Distribution(temperature=0.7, suppressed=(0, 31, 32, 64), eos=(33, 99), min_new_tokens=2)
BLOCK, NOTHING, EVERYTHING = 32, 0, 1 << 40


@contextlib.contextmanager
def joined(directory: Path, rank: int = 0, size: int = 1) -> Iterator[None]:
    parallel.join(Rank(rank, size, f"file://{directory}/rendezvous", 1), LayoutConfig(tensor=size), 0)
    try:
        yield
    finally:
        parallel.leave()


@pytest.fixture
def blocks_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens in four blocks, the last of them short."""
    monkeypatch.setattr(token_logprobs, "MIN_BLOCK", BLOCK)
    monkeypatch.setattr(token_logprobs, "BLOCK_BYTES", {"cpu": 0})


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, tokens, index in the response): tokens at both sides of every block's edge, and of TP's."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=generator) for n in (N, V))
    tokens = torch.tensor([1, 30, 63, 65, 95, 96, 98, 50, 49])
    return hidden, weight.to(dtype), tokens, torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])


def oracle(
    hidden: Tensor, weight: Tensor, tokens: Tensor, index: Tensor, distribution: Distribution
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in float64."""
    logits = hidden.double() @ weight.double().T / distribution.temperature
    logits[:, list(distribution.suppressed)] = -torch.inf
    logits[np.ix_((index < distribution.min_new_tokens).nonzero()[:, 0], list(distribution.eos))] = -torch.inf
    logp = logits.log_softmax(-1)
    finite = logp.masked_fill(logp.isinf(), 0)
    return logp.gather(1, tokens[:, None])[:, 0], -(finite.exp() * finite).masked_fill(logp.isinf(), 0).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor], entropy: bool) -> tuple[Tensor, ...]:
    """Return the gradients of a loss that weights every token differently."""
    weights = torch.linspace(-1, 2, N, dtype=outputs[0].dtype)
    loss = (weights * outputs[0]).sum() + ((weights.flip(0) * outputs[1]).sum() if entropy else 0)
    return torch.autograd.grad(loss, of)


@pytest.mark.usefixtures("blocks_of_32")
@pytest.mark.parametrize("kept", [NOTHING, N * (2 * BLOCK + 8) * 4, EVERYTHING])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("distribution", [PLAIN, ALL])
@pytest.mark.parametrize("products", Products)
def test_logprobs_entropies_and_gradients_are_those_of_whole_logits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    entropy: Any,
    distribution: Distribution,
    products: Products,
) -> None:
    """This holds for any number of blocks that are kept for the backward pass: none, the first two of four (there is
    room for the short last one, too), all."""
    monkeypatch.setattr(token_logprobs, "KEPT_BYTES", kept)
    hidden, weight, tokens, index = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    with joined(tmp_path):
        found = token_logprobs.token_logprobs(
            hidden, weight, tokens, index, distribution, products, KERNELS, entropy=entropy
        )
        found_gradients = gradients(found, (hidden, weight), entropy == "gradient")
    expected = oracle(hidden, weight, tokens, index, distribution)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-5)
    if entropy == "none":
        assert not found[1].any()
    else:
        torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=1e-5)
    assert found[1].requires_grad == (entropy == "gradient")
    wanted = gradients(expected, (hidden, weight), entropy == "gradient")
    for one, other in zip(found_gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("blocks_of_32")
def test_what_is_kept_or_asked_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's bits hang on neither the budget, nor on whether a pass computes entropies (`reference` does not)."""
    hidden, weight, tokens, index = inputs()
    hidden.requires_grad_()
    results = []
    with joined(tmp_path):
        for kept, entropy in ((NOTHING, "value"), (EVERYTHING, "none")):
            monkeypatch.setattr(token_logprobs, "KEPT_BYTES", kept)
            found = token_logprobs.token_logprobs(hidden, weight, tokens, index, ALL, TORCH, KERNELS, entropy=entropy)
            results.append((found[0], *torch.autograd.grad(found[0].sum(), (hidden,))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("blocks_of_32")
def test_a_second_backward_makes_the_logits_again(tmp_path: Path) -> None:
    hidden, weight, tokens, index = inputs()
    hidden.requires_grad_()
    with joined(tmp_path):
        found, _ = token_logprobs.token_logprobs(hidden, weight, tokens, index, ALL, TORCH, KERNELS, entropy="value")
        first, second = (torch.autograd.grad(found.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("blocks_of_32")
def test_bfloat16_rounds_operands_and_not_logits(tmp_path: Path) -> None:
    hidden, weight, tokens, index = inputs(dtype=torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    with joined(tmp_path):
        found = token_logprobs.token_logprobs(hidden, weight, tokens, index, ALL, TORCH, KERNELS, entropy="gradient")
        found_gradients = gradients(found, (hidden, weight), True)
    expected = oracle(hidden.bfloat16(), weight, tokens, index, ALL)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    wanted = gradients(expected, (hidden, weight), True)
    assert [g.dtype for g in found_gradients] == [torch.float32, torch.bfloat16]
    for one, other in zip(found_gradients, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=2**-6 * float(other.abs().max()))


def test_a_micro_batch_without_a_sampled_token_has_gradients_of_zero(tmp_path: Path) -> None:
    """A data-parallel rank without a row takes part in the reduction all the same."""
    hidden, weight, tokens, index = inputs()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    with joined(tmp_path):
        found, _ = token_logprobs.token_logprobs(
            hidden, weight, tokens[:0], index[:0], ALL, TORCH, KERNELS, entropy="value"
        )
        of_hidden, of_weight = torch.autograd.grad(found.sum(), (hidden, weight))
    assert of_hidden.shape == (0, H)
    assert not of_weight.any()


class LargestTensor(TorchDispatchMode):
    """Owns nothing but its place on torch's stack of modes: notes the most elements of any tensor made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.usefixtures("blocks_of_32")
def test_logits_never_exist_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_logprobs, "KEPT_BYTES", NOTHING)
    rows = 200
    hidden, weight = torch.randn(rows, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    tokens = torch.arange(rows) % V
    with joined(tmp_path), LargestTensor() as largest:
        found = token_logprobs.token_logprobs(hidden, weight, tokens, tokens, ALL, TORCH, KERNELS, entropy="gradient")
        torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, weight))
    assert rows * BLOCK <= largest.elements < rows * V / 3


def check_vocabulary_parallel_rank(rank: int, directory: Path) -> None:
    """Runs in a process of its own: half the vocabulary, in blocks of 32 and 18 tokens."""
    token_logprobs.MIN_BLOCK, token_logprobs.BLOCK_BYTES = BLOCK, {"cpu": 0}
    hidden, weight, tokens, index = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    half = slice(rank * V // 2, (rank + 1) * V // 2)
    part = weight.detach()[half].clone().requires_grad_()
    with joined(directory, rank, 2):
        found = token_logprobs.token_logprobs(hidden, part, tokens, index, ALL, TORCH, KERNELS, entropy="gradient")
        of_hidden, of_part = gradients(found, (hidden, part), True)
    expected = oracle(hidden, weight, tokens, index, ALL)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    wanted = gradients(expected, (hidden, weight), True)
    torch.testing.assert_close(of_hidden, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_part, wanted[1][half], rtol=1e-5, atol=1e-5)


def test_two_ranks_with_half_the_vocabulary_each_agree_with_whole_logits(tmp_path: Path) -> None:
    run_ranks(check_vocabulary_parallel_rank, 2, tmp_path)


def test_an_excluded_token_has_probability_zero(tmp_path: Path) -> None:
    hidden, weight, _, index = inputs()
    with joined(tmp_path):
        found, _ = token_logprobs.token_logprobs(
            hidden, weight, torch.full((N,), 31), index, ALL, TORCH, KERNELS, entropy="none"
        )
    assert (found.exp() == 0).all()
    assert (found < EXCLUDED / 2).all()

"""The draft head's steps: in plain torch against float64 loops, and in one native call against plain torch."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.draft_head import unroll
from stages.engines.kernels import DraftingKernels, HeadWeights, Kernels
from stages.engines.native_kernels import load_native_kernels
from stages.engines.noise import gumbel, noise_keys, token_words
from stages.engines.torch_kernels import TorchKernels

ROWS, DEPTH, C, R = 5, 3, 24, 40
TEMPERATURES = [0.0, 1.0, 0.5, 0.0, 2.0]
BANNED: list[tuple[int, ...]] = [(), (0, 1, 2), (), *[()] * 9, (7,), (), (8, 39)]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """up, down, out, embedding."""
    scale = C**-0.5
    return (
        randn(2 * C, 2 * C, seed=0) * scale,
        randn(C, C, seed=1) * scale,
        randn(R, C, seed=2),
        randn(R + 1, C, seed=3),
    )


def inputs(depth: int = DEPTH) -> dict[str, Any]:
    return {
        "state": randn(ROWS, C, seed=4),
        "slots": np.array([0, 3, R, 5, 39], np.int64),
        "depth": depth,
        "temperatures": TEMPERATURES,
        "keys": noise_keys(7, 0, np.arange(ROWS)[:, None], np.arange(depth)),
        "banned": BANNED,
    }


def run(kernels: Kernels, dtype: torch.dtype, given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    up, down, out, embedding = weights()
    packed = [kernels.pack({0: weight}, dtype, wide=True) for weight in (up, down, out)]
    head = HeadWeights(*packed, embedding, token_words(R, torch.device("cpu")))
    if isinstance(kernels, DraftingKernels):
        return kernels.unroll(head, **given)
    return unroll(kernels, head, **given)


def oracle() -> tuple[np.ndarray, np.ndarray]:
    """Row by row and position by position, in float64."""
    up, down, out, embedding = (weight.double() for weight in weights())
    given = inputs()
    guessed, margins = np.zeros((ROWS, DEPTH), np.int64), np.zeros((ROWS, DEPTH))
    for row in range(ROWS):
        s, last = given["state"][row].double(), int(given["slots"][row])
        for position in range(DEPTH):
            rms = (s.square().mean() + torch.finfo(torch.float32).eps).sqrt()
            gate, other = (up @ torch.cat([s / rms, embedding[last]])).chunk(2)
            s = s + down @ (gate / (1 + (-gate).exp()) * other)
            noise = gumbel(given["keys"][row, position : position + 1], R, torch.device("cpu"))[0].double()
            scores = out @ s + TEMPERATURES[row] * noise
            for slot in BANNED[row * DEPTH + position]:
                scores[slot] = -torch.inf
            best = scores.topk(2)
            last = int(best.indices[0])
            guessed[row, position], margins[row, position] = last, best.values[0] - best.values[1]
    return guessed, margins


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "native" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return load_native_kernels() if request.param == "native" else TorchKernels()


def test_guesses_are_those_of_the_formula(kernels: Kernels) -> None:
    guessed, margins = run(kernels, torch.float32, inputs())
    expected, apart = oracle()
    assert apart.min() > 1e-3  # so that rounding decides nothing
    np.testing.assert_array_equal(guessed, expected)
    np.testing.assert_allclose(margins, apart, atol=1e-4)


def test_what_a_row_cannot_get_is_not_guessed(kernels: Kernels) -> None:
    given = inputs()
    free = [()] * (ROWS * DEPTH)
    first, _ = run(kernels, torch.float32, given | {"banned": free})
    banned = [(int(slot),) if i % DEPTH == 0 else () for i, slot in enumerate(first.ravel())]
    guessed, _ = run(kernels, torch.float32, given | {"banned": banned})
    assert (guessed[:, 0] != first[:, 0]).all()


def test_the_state_that_was_given_is_left_alone(kernels: Kernels) -> None:
    given = inputs()
    before = given["state"].clone()
    run(kernels, torch.bfloat16 if isinstance(kernels, DraftingKernels) else torch.float32, given)
    assert torch.equal(given["state"], before)

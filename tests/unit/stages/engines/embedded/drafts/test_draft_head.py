"""The draft head's steps: in plain torch against float64 loops, and in one native call against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.embedded.drafts.draft_head import unroll
from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.kernels.protocol import DraftingKernels, Guessed, HeadWeights, Kernels
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.sampling import gumbel, noise_keys, token_words
from tests.support.processors import KERNELS

ROWS, DEPTH, BRANCHES, C, R = 5, 3, 3, 24, 40
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


def inputs(depth: int = DEPTH, branches: int = BRANCHES) -> dict[str, Any]:
    return {
        "state": randn(ROWS, C, seed=4),
        "draft_ids": np.array([0, 3, R, 5, 39], np.int64),
        "depth": depth,
        "branches": branches,
        "temperatures": TEMPERATURES,
        "keys": noise_keys(7, 0, np.arange(ROWS)[:, None], np.arange(depth)),
        "banned": BANNED,
    }


def run(kernels: Kernels, dtype: torch.dtype, given: dict[str, Any]) -> Guessed:
    up, down, out, embedding = weights()
    packed = [kernels.pack({0: weight}, dtype, wide=True) for weight in (up, down, out)]
    head = HeadWeights(*packed, embedding, token_words(R, torch.device("cpu")))
    if isinstance(kernels, DraftingKernels):
        return kernels.unroll(head, **given)
    return unroll(kernels, head, **given)


def oracle(branches: int) -> Guessed:
    """Row by row, position by position and guess by guess, in float64."""
    up, down, out, embedding = (weight.double() for weight in weights())
    given = inputs()
    shape = (ROWS, DEPTH, branches)
    found = Guessed(*np.zeros((3, *shape), np.int64), gaps=np.zeros(shape))
    for row in range(ROWS):
        lines = [(0.0, given["state"][row].double(), int(given["draft_ids"][row]))]
        for position in range(DEPTH):
            noise = gumbel(given["keys"][row, position : position + 1], R, torch.device("cpu"))[0].double()
            guesses = []
            for parent, (behind, s, last) in enumerate(lines):
                rms = (s.square().mean() + torch.finfo(torch.float32).eps).sqrt()
                gate, other = (up @ torch.cat([s / rms, embedding[last]])).chunk(2)
                s = s + down @ (gate / (1 + (-gate).exp()) * other)
                scores = out @ s + TEMPERATURES[row] * noise
                for draft_id in BANNED[row * DEPTH + position]:
                    scores[draft_id] = -torch.inf
                best = scores.topk(4)
                for rank in range(4):
                    gap = float(best.values[0] - best.values[rank or 1])
                    total = behind + (gap if rank else 0.0)
                    guesses.append((total, parent, rank, gap, s, int(best.indices[rank])))
            lines = []
            for i, (total, parent, rank, gap, s, draft_id) in enumerate(sorted(guesses, key=lambda g: g[0])[:branches]):
                found.draft_ids[row, position, i], found.parents[row, position, i] = draft_id, parent
                found.ranks[row, position, i], found.gaps[row, position, i] = rank, gap
                lines.append((total, s, draft_id))
    return found


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_native_kernels() if request.param == "native" else TorchKernels()


@pytest.mark.parametrize("branches", [1, BRANCHES])
def test_guesses_are_those_of_the_formula(kernels: Kernels, branches: int) -> None:
    guessed, expected = run(kernels, torch.float32, inputs(branches=branches)), oracle(branches)
    for name in ("draft_ids", "parents", "ranks"):
        np.testing.assert_array_equal(getattr(guessed, name), getattr(expected, name))
    np.testing.assert_allclose(guessed.gaps, expected.gaps, atol=1e-4)
    assert (expected.parents.max(), expected.ranks.max()) > (0, 0) or branches == 1


def test_there_may_be_fewer_guesses_than_wanted(kernels: Kernels) -> None:
    """All draft_ids but two are banned at every position: 2 guesses behind one, 4 behind two."""
    banned = [tuple(draft_id for draft_id in range(R) if draft_id not in (5, 6))] * (ROWS * DEPTH)
    guessed = run(kernels, torch.float32, inputs(branches=6) | {"banned": banned})
    there = guessed.ranks >= 0
    assert there.sum(-1).tolist() == [[2, 4, 6]] * ROWS
    assert set(guessed.draft_ids[there].tolist()) == {5, 6}
    assert np.take_along_axis(there[:, :-1], guessed.parents[:, 1:], -1)[there[:, 1:]].all()


def test_what_a_row_cannot_get_is_not_guessed(kernels: Kernels) -> None:
    given = inputs(branches=1)
    free = [()] * (ROWS * DEPTH)
    first = run(kernels, torch.float32, given | {"banned": free}).draft_ids
    banned = [(int(draft_id),) if i % DEPTH == 0 else () for i, draft_id in enumerate(first.ravel())]
    guessed = run(kernels, torch.float32, given | {"banned": banned}).draft_ids
    assert (guessed[:, 0] != first[:, 0]).all()


def test_the_state_that_was_given_is_left_alone(kernels: Kernels) -> None:
    given = inputs()
    before = given["state"].clone()
    run(kernels, torch.bfloat16 if isinstance(kernels, DraftingKernels) else torch.float32, given)
    assert torch.equal(given["state"], before)

"""Checks of the arguments of the trainer's C kernels: each of these would have been read or written past."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stages.models.kernels.blocks import HeadSizes, RotaryAngles, load_block_kernels
from tests.support.processors import needs_compiler

N, H, F_ = 37, 48, 40
SIZES = HeadSizes(groups=2, queries_per_group=3, dim=16)
WIDTH = SIZES.groups * (SIZES.queries_per_group + 2) * SIZES.dim


def drawn(*shape: int) -> Tensor:
    return torch.zeros(*shape).requires_grad_()


@needs_compiler
def test_what_does_not_fit_is_refused_before_c_reads_it() -> None:
    kernels, short = load_block_kernels(), RotaryAngles(torch.zeros(20, 8), torch.zeros(20, 8), torch.arange(N - 1))
    calls: dict[str, Callable[[], object]] = {
        r"weight is \[47\]": lambda: kernels.norm(drawn(N, H), drawn(H - 1), 1e-5, torch.float32),
        "x is .* torch.bfloat16": lambda: kernels.norm(drawn(N, H).bfloat16(), drawn(H), 1e-5, torch.float32),
        "a norm of float32 in torch.bfloat16": lambda: kernels.norm(drawn(N, H), drawn(H), 1e-5, torch.bfloat16),
        "gate_up is": lambda: kernels.gate(drawn(N, 2 * F_ + 1)),
        "qkv is": lambda: kernels.split_heads(drawn(N, WIDTH - 1), SIZES, None),
        r"positions is \[36\]": lambda: kernels.split_heads(drawn(N, WIDTH), SIZES, short),
        "y is": lambda: kernels.add(drawn(N, H), drawn(N, H - 1)),
        "total is .* torch.float16": lambda: kernels.accumulate(torch.zeros(3).half(), torch.zeros(3)),
        "part is": lambda: kernels.accumulate(torch.zeros(3), torch.zeros(2)),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"native kernels: {message}"):
            call()
    weight = drawn(H)
    weight.main_grad = torch.zeros(H - 1)
    with pytest.raises(ValueError, match=r"main_grad is \[47\]"):
        kernels.norm(drawn(N, H), weight, 1e-5, torch.float32).sum().backward()

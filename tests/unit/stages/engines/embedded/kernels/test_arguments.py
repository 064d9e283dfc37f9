"""Checks of the arguments of the C kernels: each of these would have read or written past an array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stages.engines.embedded.kernels.cpu.native import NativeKernels, load_native_kernels
from stages.engines.embedded.kernels.protocol import Angles, Block, HeadWeights, Tokens
from stages.engines.embedded.sampling import token_words
from tests.support.processors import needs_compiler

pytestmark = needs_compiler

N, C, F, HEADS, KV_HEADS, D, POOL = 3, 24, 20, 4, 2, 6, 5


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    return load_native_kernels()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def tokens(**changes: Any) -> Tokens:
    given = {
        "ids": zeros(N, dtype=torch.int64),
        "positions": torch.arange(N),
        "rows": zeros(N, dtype=torch.int32),
        "tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "longest": 20,
    }
    return Tokens(**given | changes)


ANGLES = Angles(cos=zeros(32, D // 2), sin=zeros(32, D // 2))
KEYS, VALUES = zeros(POOL, KV_HEADS, D, 16), zeros(POOL, KV_HEADS, 16, D)
WIDTH = (HEADS + 2 * KV_HEADS) * D


def make_block(native: NativeKernels, **changes: Any) -> Block:
    def weight(out: int, width: int) -> Any:
        return native.pack({0: zeros(out, width)}, torch.float32)

    made = Block(
        attention_norm=zeros(C),
        qkv=weight(WIDTH, C),
        out=weight(C, HEADS * D),
        mlp_norm=zeros(C),
        gate_up=weight(2 * F, C),
        down=weight(C, F),
    )
    return replace(made, **{name: weight(*it) if isinstance(it, tuple) else it for name, it in changes.items()})


BAD_TOKENS = {
    "positions of int32": ({"positions": torch.arange(N, dtype=torch.int32)}, "positions is .* torch.int32"),
    "too few positions": ({"positions": torch.arange(N - 1)}, r"positions is \[2\]"),
    "rows of int64": ({"rows": torch.arange(N)}, "rows is .* torch.int64"),
    "transposed tables": ({"tables": torch.ones(4, 2, dtype=torch.int32).T}, "tables is .* not contiguous"),
    "narrow tables": ({"tables": torch.ones(1, 1, dtype=torch.int32)}, "longest row has 20 positions, tables hold 16"),
    "more positions than angles": ({"longest": 33, "tables": torch.ones(1, 3, dtype=torch.int32)}, "angles of 32"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_tokens(native: NativeKernels, changes: dict[str, Any], message: str) -> None:
    given = tokens(**changes)
    with pytest.raises(ValueError, match=message):
        native.attend(zeros(N, WIDTH), ANGLES, given, KEYS, VALUES)
    with pytest.raises(ValueError, match=message):
        native.run_blocks(zeros(N, C), (make_block(native),), 1e-5, ANGLES, given, [(KEYS, VALUES)])
    with pytest.raises(ValueError, match=message):
        native.attention(zeros(N, C), make_block(native), 1e-5, ANGLES, given, KEYS, VALUES, zeros(N, C))


BAD_HEADS = {
    "4 heads on 3": (zeros(POOL, 3, D, 16), zeros(POOL, 3, 16, D), (4 + 6) * D, "4 query heads cannot share 3"),
    "a width of no heads": (KEYS, VALUES, WIDTH + 1, "qkv is 49 wide"),
    "odd heads": (zeros(POOL, 2, 5, 16), zeros(POOL, 2, 16, 5), 8 * 5, "heads of 5 numbers"),
    "blocks of 8": (zeros(POOL, 2, D, 8), zeros(POOL, 2, 8, D), WIDTH, "keys is"),
    "values as keys": (KEYS, KEYS, WIDTH, "values is"),
    "values of bfloat16": (KEYS, VALUES.bfloat16(), WIDTH, "values is .* torch.bfloat16"),
    "keys of float16": (KEYS.half(), VALUES.half(), WIDTH, "keys is .* torch.float16"),
    "fewer values": (KEYS, VALUES[1:], WIDTH, "values is"),
}


@pytest.mark.parametrize(("keys", "values", "width", "message"), BAD_HEADS.values(), ids=BAD_HEADS)
def test_heads(native: NativeKernels, keys: torch.Tensor, values: torch.Tensor, width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.attend(zeros(N, width), ANGLES, tokens(), keys, values)


BAD_BLOCKS = {
    "out of another width": ({"out": (C + 1, HEADS * D)}, "out gives 25 numbers"),
    "down of another width": ({"down": (C, F + 1)}, "gate_up gives 40 numbers, down takes half of 42"),
    "a norm of bfloat16": ({"attention_norm": zeros(C).bfloat16()}, "attention_norm is"),
    "a short norm": ({"mlp_norm": zeros(C - 1)}, "mlp_norm is"),
    "a short bias": ({"qkv_bias": zeros(WIDTH - 1)}, "qkv_bias is"),
    "one head norm alone": ({"q_norm": zeros(D)}, "q_norm and k_norm"),
    "a short head norm": ({"q_norm": zeros(D), "k_norm": zeros(D - 1)}, "k_norm is"),
    "qkv of other heads": ({"qkv": (WIDTH - D, C)}, "qkv is 42 wide"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_blocks(native: NativeKernels, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.run_blocks(zeros(N, C), (make_block(native, **changes),), 1e-5, ANGLES, tokens(), [(KEYS, VALUES)])


def test_every_layer_of_the_cache(native: NativeKernels) -> None:
    blocks, layers = (make_block(native),) * 2, [(KEYS, VALUES), (KEYS[1:], VALUES[1:])]
    with pytest.raises(ValueError, match="keys is"):
        native.run_blocks(zeros(N, C), blocks, 1e-5, ANGLES, tokens(), layers)


STATES = {"of bfloat16": zeros(N, C).bfloat16(), "transposed": zeros(C, N).T, "too wide": zeros(N, C + 1)}


@pytest.mark.parametrize("x", STATES.values(), ids=STATES)
def test_the_residual_stream(native: NativeKernels, x: torch.Tensor) -> None:
    block = make_block(native)
    calls: list[Callable[[], object]] = [
        lambda: native.run_blocks(x, (block,), 1e-5, ANGLES, tokens(), [(KEYS, VALUES)]),
        lambda: native.attention(x, block, 1e-5, ANGLES, tokens(), KEYS, VALUES, zeros(N, C)),
        lambda: native.attention(zeros(N, C), block, 1e-5, ANGLES, tokens(), KEYS, VALUES, x),
        lambda: native.mlp(x, block, 1e-5, zeros(N, C)),
        lambda: native.mlp(zeros(N, C), block, 1e-5, x),
        lambda: native.add_norm(x, None, zeros(C), 1e-5, torch.float32),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"native kernels: (x|into|weight) is"):
            call()


def test_small_functions(native: NativeKernels) -> None:
    weight = native.pack({0: zeros(5, C)}, torch.float32)
    keys = np.zeros(N, np.uint64)
    calls: dict[str, Callable[[], object]] = {
        "rows 1 to 6 of a weight of 5": lambda: native.pack({1: zeros(5, C)}, torch.float32),
        r"a part is \[5, 23\]": lambda: native.pack({0: zeros(5, C - 1)}, torch.float32, old=weight),
        "x is": lambda: native.linear(zeros(N, C + 1), weight, torch.float32),
        "not in torch.float16": lambda: native.linear(zeros(N, C), weight, torch.float16),
        "weight is": lambda: native.add_norm(zeros(N, C), None, zeros(C - 1), 1e-5, torch.float32),
        "delta is": lambda: native.add_norm(zeros(N, C), zeros(N, C - 1), zeros(C), 1e-5, torch.float32),
        "gate_up is": lambda: native.gate(zeros(N, 7)),
        "logits is": lambda: native.choose(zeros(N, C).bfloat16(), [1.0] * N, keys),
        "2 temperatures for 3 draws": lambda: native.choose(zeros(N, C), [1.0] * 2, keys),
        "2 keys of noise for 3 draws": lambda: native.choose(zeros(N, C), [1.0] * N, keys[:2]),
        "uint64, not int64": lambda: native.choose(zeros(N, C), [1.0] * N, keys.astype(np.int64)),
        "words is": lambda: native.choose_part(zeros(N, 8), [1.0] * N, keys, 10, 16),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_the_draft_head(native: NativeKernels) -> None:
    num_ids, width, rows, depth = 9, 4, 2, 3

    def weight(out: int, taken: int) -> Any:
        return native.pack({0: zeros(out, taken)}, torch.float32)

    head = HeadWeights(
        up=weight(2 * width, 2 * width),
        down=weight(width, width),
        out=weight(num_ids, width),
        embedding=zeros(num_ids + 1, width),
        words=token_words(num_ids, torch.device("cpu")),
    )
    given: dict[str, Any] = {
        "head": head,
        "state": zeros(rows, width),
        "draft_ids": np.array([0, num_ids]),
        "depth": depth,
        "branches": 2,
        "temperatures": [1.0] * rows,
        "keys": np.zeros((rows, depth), np.uint64),
        "banned": [()] * (rows * depth),
    }
    assert native.unroll(**given).draft_ids.shape == (rows, depth, 2)
    bad: dict[str, dict[str, Any]] = {
        "draft ids must be 0 to 9": {"draft_ids": np.array([0, num_ids + 1])},
        "draft ids are int32": {"draft_ids": np.array([0, 1], np.int32)},
        "embedding is": {"head": replace(head, embedding=zeros(num_ids, width))},
        "words is": {"head": replace(head, words=token_words(num_ids - 1, torch.device("cpu")))},
        "the head's weights are": {"head": replace(head, down=weight(width + 1, width))},
        "state is": {"state": zeros(width, rows).T},
        "temperatures for 2 draws": {"temperatures": [1.0]},
        "keys of noise are": {"keys": np.zeros((rows, depth + 1), np.uint64)},
        "lists of banned draft ids": {"banned": [()] * rows},
        "banned draft ids out of range": {"banned": [(num_ids,)] + [()] * (rows * depth - 1)},
        "guesses among 9 draft ids": {"branches": num_ids},
    }
    for message, changes in bad.items():
        with pytest.raises(ValueError, match=message):
            native.unroll(**given | changes)

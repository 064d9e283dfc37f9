"""Padding, grouping by size and replay of captured passes, without a GPU: nothing is captured, every replay computes.
Numbers are compared with the same passes run eagerly, on a CPU, where a token's are the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.embedded.batch import Draws, Pass
from stages.engines.embedded.cache import BLOCK_TOKENS, NO_BLOCK
from stages.engines.embedded.kernels.cuda.graphs import BANNED, SIZES, CapturedPasses, Run, reads_no_new_key, size_for
from stages.engines.embedded.kernels.protocol import DeviceKernels, Tokens
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.runner import LocalRunner
from stages.engines.embedded.sampling.draw import ban
from stages.engines.embedded.sampling.noise import noise_keys
from stages.models.hf_files import RANDOM_TINY

CPU = torch.device("cpu")
MAX_SEQ = 64


@dataclass(frozen=True)
class OnDevice(TorchKernels):
    """What `DeviceKernels` asks for, by the plain functions."""

    name: str = "on device"

    def choose_on_device(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, banned: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ban(logits, [tuple(token for token in tokens if token >= 0) for tokens in banned.tolist()])
        return self.choose(logits, temperatures.tolist(), np.ascontiguousarray(keys.numpy()).view(np.uint64)[:, 0])


class Counting:
    """In the place of a capture: counts captures and replays."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, run: Run) -> Run:
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRunner]:
    """Its passes of the right kind are padded."""
    monkeypatch.setattr("stages.engines.embedded.runner.choose_kernels", lambda engine, device: OnDevice())
    with closing(LocalRunner(RANDOM_TINY, EngineConfig(slots=16), max_seq=MAX_SEQ, device=CPU)) as runner:
        yield runner


def decode(num_rows: int, position: int, banned: dict[int, tuple[int, ...]] | None = None) -> Pass:
    """One token per row; row i holds blocks 1 + 4 i and following."""
    rows = np.arange(num_rows)
    return Pass(
        ids=3 + rows + position,
        positions=np.full(num_rows, position, np.int64),
        rows=rows.astype(np.int32),
        tables=(1 + 4 * rows[:, None] + np.arange(1 + position // BLOCK_TOKENS)).astype(np.int32),
        drawn=rows,
        keys=noise_keys(0, 1, rows, position + 1),
        temperatures=[float(row % 3) for row in rows],
        banned=[(banned or {}).get(row, ()) for row in rows],
    )


def run(runner: LocalRunner, pass_: Pass) -> Draws:
    runner.submit(pass_)
    return runner.collect()


def test_padded_passes_draw_what_eager_ones_draw(runner: LocalRunner) -> None:
    """Every number of rows up to 13, over positions that reach a second block; afterwards drafts: several tokens of a
    row. What one pass leaves in the buffers must not show in the next, so sizes shrink and grow."""
    assert isinstance(OnDevice(), DeviceKernels)
    settings = EngineConfig(slots=16, embedded=EmbeddedConfig(kernels="torch"))
    with closing(LocalRunner(RANDOM_TINY, settings, max_seq=MAX_SEQ, device=CPU)) as plain:
        for position, num_rows in enumerate([13, 13, 5, 1, 2, 9, 4, 13, 3, 7, 8, 6, 10, 11, 12, 13, 13, 2, 13]):
            pass_ = decode(num_rows, position, {1: (5, 9), 2: (int(position),)})
            got, expected = run(runner, pass_), run(plain, pass_)
            np.testing.assert_array_equal(got.tokens, expected.tokens)
            np.testing.assert_array_equal(got.logprobs, expected.logprobs)
        drafts = Pass(
            ids=np.array([7, 8, 9, 10, 11], np.int64),
            positions=np.array([19, 20, 21, 19, 20], np.int64),
            rows=np.array([0, 0, 0, 1, 1], np.int32),
            tables=np.array([[1, 2], [5, 6]], np.int32),
            drawn=np.arange(5),
            keys=noise_keys(0, 1, np.array([0, 0, 0, 1, 1]), np.arange(5)),
            temperatures=[1.0] * 5,
            banned=[()] * 5,
        )
        np.testing.assert_array_equal(run(runner, drafts).tokens, run(plain, drafts).tokens)


def test_a_refit_shows_in_the_next_replay(runner: LocalRunner) -> None:
    pass_ = decode(3, 0)
    before = run(runner, pass_)
    name = "model.norm.weight"
    runner.swap(runner.prepare({name: torch.full((runner._shape.hidden_size,), 0.25)}))
    assert run(runner, pass_).logprobs.tolist() != before.logprobs.tolist()


def captured(capture: Counting) -> tuple[CapturedPasses, list[Tokens]]:
    """With a computation that draws, after each token, its position (and 0.5)."""
    seen: list[Tokens] = []

    def compute(tokens: Tokens, drawing: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tokens)
        return tokens.positions, torch.full((len(tokens.ids),), 0.5)

    return CapturedPasses(compute, MAX_SEQ, CPU, capture), seen


def test_one_capture_for_each_size_and_none_for_the_context() -> None:
    capture = Counting()
    passes, seen = captured(capture)
    for position in range(MAX_SEQ):
        draws = passes.run(decode(3 + position % 2, position))
        assert draws.tokens.tolist() == [position] * (3 + position % 2)
        assert draws.logprobs.tolist() == [0.5] * (3 + position % 2)
    assert (capture.num_captures, capture.num_replays) == (1, MAX_SEQ)
    assert {(len(tokens.ids), tokens.longest) for tokens in seen} == {(4, MAX_SEQ)}
    passes.run(decode(5, 0))
    assert passes.captured == [(4, True), (8, True)]
    passes.clear()
    assert passes.captured == []
    passes.run(decode(5, 0))
    assert capture.num_captures == 3


def test_tokens_that_fill_up_have_no_block() -> None:
    passes, seen = captured(Counting())
    passes.run(decode(4, 20))
    passes.run(decode(3, 7))
    tokens = seen[-1]
    assert tokens.positions.tolist() == [7, 7, 7, 0]
    assert tokens.tables[3, 0] == NO_BLOCK
    assert tokens.tables[:3, 0].tolist() == [1, 5, 9]


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 4), (13, 16), (65, 96), (256, 256)])
def test_sizes(num_tokens: int, size: int) -> None:
    assert size_for(num_tokens) == size


def test_which_passes_are_taken() -> None:
    passes, _ = captured(Counting())
    assert passes.takes(decode(SIZES[-1], 0))
    assert not passes.takes(decode(SIZES[-1] + 1, 0))
    assert passes.takes(decode(2, 0, {1: tuple(range(BANNED))}))
    assert not passes.takes(decode(2, 0, {1: tuple(range(BANNED + 1))}))
    prompt = decode(2, 0)
    undrawn = Pass(
        prompt.ids, prompt.positions, prompt.rows, prompt.tables, prompt.drawn[:1], prompt.keys[:1], [1.0], [()]
    )
    assert not passes.takes(undrawn)


def test_rows_that_read_a_block_which_the_pass_writes_are_not_apart() -> None:
    """Row 1 shares row 0's first block; that matters only while row 0 still writes to it."""
    pass_ = decode(2, 20)
    assert reads_no_new_key(pass_)
    pass_.tables[1, 0] = pass_.tables[0, 0]
    assert reads_no_new_key(pass_)
    pass_.positions[0] = 15
    assert not reads_no_new_key(pass_)

"""Padding, grouping by size and replay of captured batches, without a GPU: nothing is captured, every replay computes.
Numbers are compared with the same batches run eagerly, on a CPU, where a token's are the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.embedded.batch import Batch, Draws
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, NO_BLOCK
from stages.engines.embedded.kernels.cuda.graphs import BANNED, SIZES, CapturedBatches, Run, reads_no_new_key, size_for
from stages.engines.embedded.kernels.protocol import DeviceKernels, Tokens
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.runner import LocalRunner
from stages.engines.embedded.sampling import ban, noise_keys
from stages.models.spec import RANDOM_TINY

CPU = torch.device("cpu")
MAX_SEQ = 64


@dataclass(frozen=True)
class OnDevice(TorchKernels):
    """The requests of `DeviceKernels`, answered by the plain functions."""

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
    """A runner that pads batches of the right kind."""
    monkeypatch.setattr("stages.engines.embedded.runner.choose_kernels", lambda engine, device: OnDevice())
    with closing(LocalRunner(RANDOM_TINY, EngineConfig(max_rows=16), max_seq=MAX_SEQ, device=CPU)) as runner:
        yield runner


def decode(num_rows: int, position: int, banned: dict[int, tuple[int, ...]] | None = None) -> Batch:
    """One token per row; row i holds blocks 1 + 4 i and following."""
    rows = np.arange(num_rows)
    return Batch(
        ids=3 + rows + position,
        positions=np.full(num_rows, position, np.int64),
        rows=rows.astype(np.int32),
        tables=(1 + 4 * rows[:, None] + np.arange(1 + position // BLOCK_TOKENS)).astype(np.int32),
        drawn=rows,
        keys=noise_keys(0, 1, rows, position + 1),
        temperatures=[float(row % 3) for row in rows],
        banned=[(banned or {}).get(row, ()) for row in rows],
    )


def run(runner: LocalRunner, batch: Batch) -> Draws:
    runner.submit(batch)
    return runner.collect()


def test_padded_batches_draw_what_eager_ones_draw(runner: LocalRunner) -> None:
    """Every number of rows up to 13, over positions that reach a second block; afterwards drafts: several tokens of a
    row. What one batch leaves in the buffers must not show in the next, so sizes shrink and grow."""
    assert isinstance(OnDevice(), DeviceKernels)
    settings = EngineConfig(max_rows=16, embedded=EmbeddedConfig(kernels="torch"))
    with closing(LocalRunner(RANDOM_TINY, settings, max_seq=MAX_SEQ, device=CPU)) as plain:
        for position, num_rows in enumerate([13, 13, 5, 1, 2, 9, 4, 13, 3, 7, 8, 6, 10, 11, 12, 13, 13, 2, 13]):
            batch = decode(num_rows, position, {1: (5, 9), 2: (int(position),)})
            got, expected = run(runner, batch), run(plain, batch)
            np.testing.assert_array_equal(got.tokens, expected.tokens)
            np.testing.assert_array_equal(got.logprobs, expected.logprobs)
        drafts = Batch(
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
    batch = decode(3, 0)
    before = run(runner, batch)
    name = "model.norm.weight"
    runner.swap(runner.prepare({name: torch.full((runner._spec.hidden_size,), 0.25)}))
    assert run(runner, batch).logprobs.tolist() != before.logprobs.tolist()


def captured(capture: Counting) -> tuple[CapturedBatches, list[Tokens]]:
    """Captured batches of a computation that draws, after each token, its position (and 0.5)."""
    seen: list[Tokens] = []

    def compute(tokens: Tokens, drawing: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tokens)
        return tokens.positions, torch.full((len(tokens.ids),), 0.5)

    return CapturedBatches(compute, MAX_SEQ, CPU, capture), seen


def test_one_capture_for_each_size_and_none_for_the_context() -> None:
    capture = Counting()
    batches, seen = captured(capture)
    for position in range(MAX_SEQ):
        tokens, logprobs = batches.run(decode(3 + position % 2, position))
        assert tokens.tolist() == [position] * (3 + position % 2)
        assert logprobs.tolist() == [0.5] * (3 + position % 2)
    assert (capture.num_captures, capture.num_replays) == (1, MAX_SEQ)
    assert {(len(tokens.ids), tokens.longest) for tokens in seen} == {(4, MAX_SEQ)}
    batches.run(decode(5, 0))
    assert batches.captured == [(4, True), (8, True)]
    batches.clear()
    assert batches.captured == []
    batches.run(decode(5, 0))
    assert capture.num_captures == 3


def test_tokens_that_fill_up_have_no_block() -> None:
    batches, seen = captured(Counting())
    batches.run(decode(4, 20))
    batches.run(decode(3, 7))
    tokens = seen[-1]
    assert tokens.positions.tolist() == [7, 7, 7, 0]
    assert tokens.tables[3, 0] == NO_BLOCK
    assert tokens.tables[:3, 0].tolist() == [1, 5, 9]


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 4), (13, 16), (65, 96), (256, 256)])
def test_sizes(num_tokens: int, size: int) -> None:
    assert size_for(num_tokens) == size


def test_which_batches_are_taken() -> None:
    batches, _ = captured(Counting())
    assert batches.takes(decode(SIZES[-1], 0))
    assert not batches.takes(decode(SIZES[-1] + 1, 0))
    assert batches.takes(decode(2, 0, {1: tuple(range(BANNED))}))
    assert not batches.takes(decode(2, 0, {1: tuple(range(BANNED + 1))}))
    prompt = decode(2, 0)
    undrawn = Batch(
        prompt.ids, prompt.positions, prompt.rows, prompt.tables, prompt.drawn[:1], prompt.keys[:1], [1.0], [()]
    )
    assert not batches.takes(undrawn)


def test_rows_that_read_a_block_which_the_batch_writes_are_not_independent() -> None:
    """Row 1 shares row 0's first block; that matters only while row 0 still writes to it."""
    batch = decode(2, 20)
    assert reads_no_new_key(batch)
    batch.tables[1, 0] = batch.tables[0, 0]
    assert reads_no_new_key(batch)
    batch.positions[0] = 15
    assert not reads_no_new_key(batch)

"""Rows that are scored before their shard is complete: by the rewards that allow it, once, and with the same scores."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.workers.early_rows import ACCEPT, EarlyScorer, RowSender
from pipeline.workers.orders import SEND_ROWS
from stages.models.hf_files import ByteTokenizer
from stages.rewards.protocol import Part, Reward, RewardFailed, Sample, Scored
from stages.score import samples_of, score
from storage.address import Address
from storage.records import Rollout, Scores
from tests.support.sampled_rows import rollout_of

SHARD, OTHER = Address("generate", 3, 1), Address("generate", 3, 0)
NOTHING: list[dict[str, Any]] = [{}] * 4


@dataclass
class Lengths(Reward):
    """Scores a row by its length, and keeps which rows it was asked for. Waits for `go` in each call."""

    early: bool = True
    fails: bool = False
    deterministic: bool = True
    calls: list[list[int]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        self.calls.append([sample.row for sample in samples])
        self.begun.set()
        self.go.wait()
        if self.fails:
            raise RewardFailed("no")
        lengths = [float(len(sample.response_ids)) for sample in samples]
        return Scored({"long": lengths}, None, {"halved": [length / 2 for length in lengths]})


def rollout(last: int = 9) -> Rollout:
    """Four rows of 2 tokens of a prompt and 1 to 4 of a response. `last`: the last token of row 40."""
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6) + 65
    mask = np.array([[0, 0, *[1] * n, *[0] * (4 - n)] for n in range(1, 5)], np.bool_)
    tokens[0, 2] = last
    return rollout_of(np.where(mask | (np.arange(6) < 2), tokens, 0), mask, row=np.arange(40, 44))


@contextmanager
def opened(*rewards: Lengths, calls: int = 1) -> Iterator[tuple[EarlyScorer, list[Part]]]:
    parts = [Part(f"part{i}", 1.0 + i, reward) for i, reward in enumerate(rewards)]
    scorer = EarlyScorer(lambda _: parts, lambda rows: samples_of(ByteTokenizer(), rows, [{}] * rows.num_rows), calls)
    try:
        yield scorer, parts
    finally:
        for reward in rewards:
            reward.go.set()
        scorer.close()


def scored(scorer: EarlyScorer, parts: list[Part], rows: Rollout) -> Scores:
    with scorer.scores_of(SHARD) as early:
        return score(parts, ByteTokenizer(), rows, NOTHING, None, early)


def test_a_row_is_asked_for_once_and_scores_do_not_depend_on_when() -> None:
    early, late, whole = Lengths(), Lengths(early=False), rollout()
    late.go.set()
    with opened(early, late) as (scorer, parts):
        assert scorer.accept(SHARD, whole.rows(slice(2, 3)))
        early.begun.wait()
        assert scorer.accept(SHARD, whole.rows(slice(0, 1)))  # waits, and is dropped when the shard is scored
        threading.Timer(0, early.go.set).start()
        found = scored(scorer, parts, whole)
    assert early.calls in ([[42], [40, 41, 43]], [[42], [40], [41, 43]])
    assert late.calls == [[40, 41, 42, 43]]
    plain = score(parts, ByteTokenizer(), whole, NOTHING)
    assert found.arrays().keys() == plain.arrays().keys() == {
        "scores", "scores.part0.long", "scores.part0.halved", "scores.part1.long", "scores.part1.halved",
    }  # fmt: skip
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array)


def test_a_row_that_was_sampled_again_is_scored_again() -> None:
    reward = Lengths()
    reward.go.set()
    with opened(reward) as (scorer, parts):
        scorer.accept(SHARD, rollout(last=7).rows(slice(0, 1)))
        scorer.accept(OTHER, rollout().rows(slice(1, 2)))  # a row of another shard
        while not {40, 41} <= {row for call in reward.calls for row in call}:
            reward.begun.wait()
        reward.calls.clear()
        scored(scorer, parts, rollout())
    assert reward.calls == [[40, 41, 42, 43]]


def test_a_failure_is_reported_by_the_node_that_waits_for_the_call() -> None:
    reward = Lengths(fails=True)
    with opened(reward) as (scorer, parts):
        scorer.accept(SHARD, rollout().rows(slice(0, 1)))
        reward.begun.wait()
        with ThreadPoolExecutor(1) as node:
            asked = node.submit(scored, scorer, parts, rollout())
            while not scorer._nodes:
                time.sleep(0.001)
            reward.go.set()
            with pytest.raises(RewardFailed, match="'part0': no"):
                asked.result()
        assert reward.calls == [[40]]
        reward.fails = False
        np.testing.assert_array_equal(scored(scorer, parts, rollout()).scores, [1, 2, 3, 4])


def test_as_many_calls_run_at_once_as_the_rewards_allow() -> None:
    reward = Lengths()
    with opened(reward, calls=2) as (scorer, parts):
        for row in range(3):
            scorer.accept(Address("generate", 3, row), rollout().rows(slice(row, row + 1)))
            while len(reward.calls) < min(row + 1, 2):
                time.sleep(0.001)
        assert not scorer._may_call()
        reward.go.set()
        scored(scorer, parts, rollout())
    assert reward.calls[:2] == [[40], [41]]


def test_rows_are_refused_if_no_reward_is_early() -> None:
    with opened(Lengths(early=False)) as (scorer, _):
        assert not scorer.accept(SHARD, rollout().rows(slice(0, 1)))


def test_rows_are_sent_when_their_order_is_there_and_until_they_are_refused() -> None:
    """Rows that are finished before the order arrives wait for it. Those of a shard without an order are forgotten."""
    sent: list[tuple[str, Address, int]] = []

    def rpc(target: str) -> Any:
        async def accept(shard: bytes, row: bytes) -> bool:
            sent.append((target, pickle.loads(shard), int(pickle.loads(row).row[0])))
            return target == "wants"

        return SimpleNamespace(**{ACCEPT: accept})

    async def play() -> None:
        loop, handlers = asyncio.get_running_loop(), dict[str, Callable[..., Any]]()
        worker: Any = SimpleNamespace(loop=SimpleNamespace(add_callback=loop.call_soon), rpc=rpc, handlers=handlers)
        sender, rows = RowSender(worker), [rollout().rows(slice(i, i + 1)) for i in range(4)]

        async def settle() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        sender.send(SHARD, rows[0])
        await settle()
        assert sent == []
        await handlers[SEND_ROWS](shard=pickle.dumps(SHARD), target="wants")
        sender.send(SHARD, rows[1])
        await settle()
        assert sent == [("wants", SHARD, 40), ("wants", SHARD, 41)]
        await handlers[SEND_ROWS](shard=pickle.dumps(SHARD), target="refuses")  # its scores run elsewhere now
        for row in rows[2:]:
            sender.send(SHARD, row)
            await settle()
        assert sent[2:] == [("refuses", SHARD, 42)]
        sender.send(OTHER, rows[0])
        sender.forget(OTHER)
        await settle()
        await handlers[SEND_ROWS](shard=pickle.dumps(OTHER), target="wants")
        await settle()
        assert len(sent) == 3

    asyncio.run(play())

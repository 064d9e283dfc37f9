"""Rows and blocks without any model: who runs, who waits, who shares, and that no block is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stages.engines.embedded.cache import BlockPool, KVCache
from stages.engines.embedded.kernels.blocks import NO_BLOCK
from stages.engines.embedded.rows import Row, chain
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS, Chunk, Scheduler
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from tests.support.engines import row_of


def make_row(number: int, prompt: tuple[int, ...], new: int = 100) -> Row:
    return row_of(Request(number, 1, 1, prompt, 0, SamplingConfig(new)))


def make_scheduler(num_slots: int, num_blocks: int, rows: list[Row], depth: int = 1) -> Scheduler:
    scheduler = Scheduler(num_slots, BlockPool(num_blocks), depth)
    scheduler.waiting.extend(rows)
    return scheduler


def fed(scheduler: Scheduler) -> dict[int, tuple[int, int]]:
    """Row -> (start, count) of the next pass; every row that samples gets token 7."""
    chunks = scheduler.plan()
    for chunk in chunks:
        if chunk.samples:
            chunk.row.append(7, 0.0, 0)
    return {chunk.row.request.row: (chunk.start, chunk.count) for chunk in chunks}


def test_prompts_then_one_token_each() -> None:
    scheduler = make_scheduler(2, 10, [make_row(i, tuple(range(20 * i, 20 * i + 5 + i))) for i in range(3)])
    assert fed(scheduler) == {0: (0, 5), 1: (0, 6)}
    assert fed(scheduler) == {0: (5, 1), 1: (6, 1)}
    scheduler.retire(scheduler.running[0])
    assert fed(scheduler) == {1: (7, 1), 2: (0, 7)}
    assert scheduler.pool.num_used == 2


def test_long_prompt_leaves_room_for_those_that_decode() -> None:
    long = tuple(range(BATCH_PROMPT_TOKENS + 30))
    scheduler = make_scheduler(2, 100, [make_row(0, (1, 2)), make_row(1, long)])
    assert fed(scheduler) == {0: (0, 2), 1: (0, BATCH_PROMPT_TOKENS - 2)}
    assert fed(scheduler) == {0: (2, 1), 1: (BATCH_PROMPT_TOKENS - 2, 32)}


def test_a_row_waits_until_its_prompt_and_one_more_block_for_each_other_fit() -> None:
    """Three blocks: row 0 takes one; row 1 would take the other two, and be sent back when row 0 needs its second."""
    scheduler = make_scheduler(3, 3, [make_row(0, tuple(range(15))), make_row(1, tuple(range(50, 70)))])
    assert fed(scheduler) == {0: (0, 15)}


def test_youngest_is_sent_back_and_resumed_first() -> None:
    """Four blocks: the older row has three of them when the younger needs its second one."""
    old, young, third = make_row(0, tuple(range(31))), make_row(1, (5, 6)), make_row(2, (9,))
    scheduler = make_scheduler(2, 4, [old, young, third])
    assert fed(scheduler) == {0: (0, 31), 1: (0, 2)}
    for _ in range(17):
        fed(scheduler)
    assert (len(old.blocks), len(young.blocks), scheduler.num_preemptions) == (3, 0, 1)
    assert list(scheduler.waiting) == [young, third]
    assert len(young.tokens) == 17
    scheduler.retire(old)
    assert fed(scheduler) == {1: (0, 17), 2: (0, 1)}


def test_a_row_alone_always_goes_on() -> None:
    scheduler = make_scheduler(4, 4, [make_row(i, tuple(range(10 * i, 10 * i + 9)), new=55) for i in range(4)])
    finished = 0
    for _ in range(1000):
        if scheduler.idle:
            break
        fed(scheduler)
        for row in [row for row in scheduler.running if row.num_left == 0]:
            scheduler.retire(row)
            finished += 1
    assert finished == 4
    assert (scheduler.pool.num_free, scheduler.num_preemptions > 0) == (4, True)


def test_shared_blocks_are_counted_and_freed() -> None:
    pool = BlockPool(5)
    tokens = list(range(40))
    mine = [pool.take(), pool.take(), pool.take()]
    assert NO_BLOCK not in mine
    pool.publish(mine, tokens)
    assert pool.match(tokens) == mine[:2]
    assert pool.match([*tokens[:20], 99, *tokens[21:]]) == mine[:1]
    assert pool.match(tokens[:15]) == []
    pool.release(mine)
    assert pool.num_free == 3  # the third is free, the other two are held by the matches
    pool.release(mine[:2])
    pool.release(mine[:1])
    assert (pool.num_free, pool.peak_used) == (5, 3)


def test_blocks_that_nobody_holds_are_known_until_they_are_needed() -> None:
    pool = BlockPool(4)
    first, second = list(range(32)), list(range(100, 116))
    mine = [pool.take(), pool.take()]
    pool.publish(mine, first)
    pool.release(mine)
    other = [pool.take()]
    pool.publish(other, second)
    pool.release(other)
    assert (pool.num_free, pool.num_used) == (4, 0)

    assert pool.match(first) == mine  # now used last
    pool.release(mine)
    taken = [pool.take(), pool.take()]  # one that never held anything; then the longest unused
    assert set(taken).isdisjoint(mine)
    assert pool.match(second) == []
    taken.append(pool.take())
    assert taken[2] == mine[1]  # the end of a prompt goes before its beginning
    assert pool.match(first) == mine[:1]
    with pytest.raises(IndexError, match="all 4 blocks are held"):
        pool.take()


def test_a_block_given_to_another_prompt_takes_its_continuations_along() -> None:
    """Its number gets other tokens, and continuations of the old tokens must not be found behind the new ones."""
    pool = BlockPool(2)
    mine = [pool.take(), pool.take()]
    pool.publish(mine, list(range(32)))
    pool.release(mine[:1])  # the end is still held
    reused = pool.take()
    assert reused == mine[0]
    pool.publish([reused], list(range(50, 66)))
    assert pool.match([*range(50, 66), *range(16, 32)]) == [reused]


def test_forgotten_blocks_are_not_shared() -> None:
    pool = BlockPool(4)
    mine = [pool.take()]
    pool.publish(mine, list(range(16)))
    pool.forget()
    assert pool.match(list(range(16))) == []
    pool.release(mine)
    assert pool.num_free == 4
    pool.publish(mine, list(range(16)))
    pool.forget()
    assert (pool.num_free, pool.match(list(range(16)))) == (4, [])


def test_drafts_never_send_a_row_back() -> None:
    """One block left, two rows on the edge of theirs: the older gets it, and its drafts; the younger is sent back only
    for the older's own tokens."""
    scheduler = make_scheduler(1, 2, [row := make_row(0, tuple(range(15)))])
    fed(scheduler)
    chunk = scheduler.plan({row: chain([1] * 30)})[0]
    assert (chunk.start, chunk.count, len(chunk.drafts)) == (15, 1, 16)
    assert scheduler.num_preemptions == 0


def end(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        if chunk.samples:
            chunk.row.append(7, 0.0, 0)
    scheduler.returned(chunks)


def numbers(chunks: list[Chunk]) -> list[int]:
    return [chunk.row.request.row for chunk in chunks]


def test_passes_under_way_share_the_rows() -> None:
    """Seven rows on three passes: at most three each; a row is in one pass at a time; when rows finish, those left are
    shared anew, and none is left out of a round."""
    rows = [make_row(i, (i, 50 + i)) for i in range(7)]
    scheduler = make_scheduler(8, 30, rows, depth=3)
    passes = [scheduler.plan() for _ in range(3)]
    assert [numbers(chunks) for chunks in passes] == [[0, 1, 2], [3, 4, 5], [6]]
    assert scheduler.plan() == []
    end(scheduler, passes[0])
    again = scheduler.plan()
    assert numbers(again) == numbers(passes[0])
    for chunks in (passes[1], passes[2], again):
        end(scheduler, chunks)
    for row in rows[:2]:
        scheduler.retire(row)
    rounds = [scheduler.plan() for _ in range(3)]
    assert [numbers(chunks) for chunks in rounds] == [[2, 3], [4, 5], [6]]


def test_no_block_is_taken_from_a_pass_under_way() -> None:
    """Four blocks, two rows that each need a third one: the older gets none while the younger is under way, and waits
    for it to end instead of being sent back; then it sends the younger back."""
    old, young = make_row(0, tuple(range(31))), make_row(1, tuple(range(40, 70)))
    scheduler = make_scheduler(2, 5, [old, young], depth=2)
    scheduler.pool.take()  # held by somebody else: admission wants one more than there is
    first = scheduler.plan()
    scheduler.running.append(scheduler.waiting.popleft())
    second = scheduler.plan()
    assert [numbers(first), numbers(second)] == [[0], [1]]
    end(scheduler, first)
    end(scheduler, third := scheduler.plan())
    assert (numbers(third), len(old.tokens), len(old.blocks)) == ([0], 33, 2)
    assert scheduler.plan() == []
    assert (len(young.blocks), scheduler.num_preemptions) == (2, 0)
    end(scheduler, second)
    assert numbers(scheduler.plan()) == [0]
    assert (young.blocks, scheduler.num_preemptions, list(scheduler.waiting)) == ([], 1, [young])


def test_an_abandoned_row_leaves_when_its_pass_is_over() -> None:
    rows = [make_row(i, (i, 9)) for i in range(2)]
    scheduler = make_scheduler(2, 9, rows, depth=2)
    first = scheduler.plan()
    for row in rows:
        row.call.abandoned.set()
    assert scheduler.drop_abandoned() == [rows[1]]
    end(scheduler, first)
    assert scheduler.drop_abandoned() == [rows[0]]
    assert (scheduler.idle, scheduler.pool.num_free) == (True, 9)


CPU = torch.device("cpu")


def test_copied_keys_and_values_are_where_they_belong() -> None:
    """Against the layout that `KVCache` documents: keys [P, K, D, 16], values [P, K, 16, D]; 37 positions of 3 blocks
    that lie in another order there."""
    torch.manual_seed(0)
    here, there = (KVCache(3, 6, 2, 8, torch.float32, CPU) for _ in range(2))
    for keys, values in here.layers:
        keys.normal_()
        values.normal_()
    copied = here.read([5, 1, 4], 37)
    assert copied.shape == (3, 2, 2, 37, 8)
    there.write([2, 6, 3], copied)
    for layer in range(3):
        for position in (0, 15, 16, 36):
            block, place = [5, 1, 4][position // 16], position % 16
            other = [2, 6, 3][position // 16]
            keys, values = here.layers[layer]
            np.testing.assert_array_equal(copied[layer, 0, :, position], keys[block, :, :, place])
            np.testing.assert_array_equal(copied[layer, 1, :, position], values[block, :, place])
            new_keys, new_values = there.layers[layer]
            assert torch.equal(new_keys[other, :, :, place], keys[block, :, :, place])
            assert torch.equal(new_values[other, :, place], values[block, :, place])
    assert not there.layers[0][0][3, :, :, 5:].any()
    assert not any(part[[0, 1, 4, 5]].any() for layer in there.layers for part in layer)

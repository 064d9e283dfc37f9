"""Decoding in flight, against a loop that counts pass by pass, and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pipeline.plan.decode import Decoded, DecodeSpeed, RowQueue, decode, decode_speed
from pipeline.plan.links import Link
from stages.models.spec import read_spec

SPEED = DecodeSpeed(
    max_rows=4, max_context=1e9, weights_s=1.0, context_s=0.001, token_s=0.0, attention_s=0.0, tokens_per_pass=1.0
)


def pass_by_pass(speed: DecodeSpeed, prompt: int, lengths: Sequence[int]) -> Decoded:
    """Compute every pass by itself, with its mean context; `decode` has the closed form."""
    waiting, flight = list(lengths), list[list[int]]()  # of each row: its length, its tokens so far
    weights = context_s = arithmetic = prefill = calls = 0.0
    while waiting or flight:
        while waiting and len(flight) < speed.max_rows:
            flight.append([waiting.pop(0), 0])
            prefill += prompt * (speed.token_s + prompt / 2 * speed.attention_s)
        context = sum(prompt + done + 0.5 for _, done in flight)
        computed = len(flight) * speed.token_s + context * speed.attention_s
        if computed > speed.weights_s + context * speed.context_s:
            arithmetic += computed
        else:
            weights += speed.weights_s
            context_s += context * speed.context_s
        calls += 1 + len(flight) * speed.row_calls
        for row in flight:
            row[1] += 1
        flight = [row for row in flight if row[1] < row[0]]
    return Decoded(weights, context_s, arithmetic, prefill, 0.0, calls)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("token_s", [0.0, 5.0], ids=["memory limits", "arithmetic limits"])
def test_rows_in_flight_against_a_loop_over_passes(seed: int, token_s: float) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 30))]
    speed = replace(SPEED, max_rows=draw.randint(1, 8), token_s=token_s, attention_s=1e-4, row_calls=0.1)
    found, expected = decode(speed, 7, lengths), pass_by_pass(speed, 7, lengths)
    assert vars(found) == pytest.approx(vars(expected))


def test_the_tail_keeps_the_engine_busy() -> None:
    """Three rows of 10 tokens and one of 100: 100 passes, as if it were alone."""
    assert decode(SPEED, 0, [10, 10, 10, 100]).calls == 100
    assert decode(SPEED, 0, [100]).weights == decode(SPEED, 0, [10, 10, 10, 100]).weights


def test_a_row_waits_for_a_place() -> None:
    assert decode(replace(SPEED, max_rows=2), 0, [10, 20, 15]).calls == 25, "the third begins when the first has ended"
    assert decode(replace(SPEED, max_context=40), 0, [10, 20, 15]).calls == 25, "or when its keys fit"


def test_nothing_to_decode() -> None:
    assert decode(SPEED, 5, []) == Decoded()


def ends(queue: RowQueue) -> list[tuple[object, float]]:
    """Run a queue to its end; return each shard and its time."""
    found: list[tuple[object, float]] = []
    while (at := queue.next_end()) is not None:
        found += [(shard, at) for shard, _ in queue.finish()]
    return found


def test_shards_are_one_queue_of_rows() -> None:
    """Four places and passes of 1 s: the rows of b join as those of a end, at 10 and 20."""
    queue = RowQueue(replace(SPEED, context_s=0.0), 0)
    queue.add("a", [10, 10, 20, 20], 0.0)
    queue.add("b", [5, 30], 0.0)
    assert ends(queue) == [("a", 20.0), ("b", 40.0)]


def test_a_shard_that_comes_late_finds_the_rows_as_they_are() -> None:
    """Passes of a second for each row. Alone until 4 s, `a` has 6 tokens left; then each takes 2 s a token."""
    queue = RowQueue(replace(SPEED, weights_s=0.0, context_s=0.0, token_s=1.0), 0)
    queue.add("a", [10], 0.0)
    assert queue.next_end() == 10.0
    queue.add("b", [10], 4.0)
    assert ends(queue) == [("a", pytest.approx(16.0)), ("b", pytest.approx(20.0))]


@pytest.mark.parametrize("seed", range(5))
def test_looking_ahead_and_stopping_between_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    plain, stopped = (RowQueue(replace(SPEED, max_rows=3), 5) for _ in range(2))
    lengths = [draw.randint(1, 30) for _ in range(12)]
    for queue in (plain, stopped):
        queue.add("a", lengths[:6], 0.0)
    for at in (1.0, 2.5, 7.25):
        stopped.next_end()
        stopped.pause(0.0, at)
    for queue in (plain, stopped):
        queue.add("b", lengths[6:], 8.0)
    for (one, early), (other, late) in zip(ends(plain), ends(stopped), strict=True):
        assert one == other
        assert early == pytest.approx(late, rel=1e-2), "a stretch has the context of its middle"


def test_a_shard_that_is_dropped_makes_room() -> None:
    queue = RowQueue(replace(SPEED, max_rows=1, context_s=0.0), 0)
    queue.add("a", [10], 0.0)
    queue.add("b", [10], 0.0)
    assert queue.drop("a", 4.0).calls == pytest.approx(10), "as if it had stayed"
    assert ends(queue) == [("b", 14.0)]


def test_speculation_saves_passes() -> None:
    found = decode(replace(SPEED, tokens_per_pass=2.0), 0, [10, 40])
    assert found.calls == 20


def test_drafts_pay_while_memory_limits_a_pass() -> None:
    """A row gains 2 tokens for the arithmetic of 4, 0.2 s each; weights take 1 s. One row: 1 s a pass, as without.
    Two rows: 1.6 s for 4 tokens, against 1 s for 2. Four rows: 3.2 s for 8, against 1 s for 4."""
    plain = replace(SPEED, token_s=0.2, context_s=0.0)
    drafted = replace(plain, tokens_per_pass=2.0, drafts_per_pass=3.0)
    seconds = [[decode(speed, 0, rows).roofline for speed in (plain, drafted)] for rows in ([10], [10, 10], [10] * 4)]
    assert seconds == [pytest.approx(pair) for pair in ([10, 5], [10, 8], [10, 16])]


TINY = read_spec("random:tiny")


def speed_of(**changed: float) -> DecodeSpeed:
    values = {"tensor": 1, "pipeline": 1, "groups": 1} | changed
    return decode_speed(
        TINY,
        flops=1e9,
        bytes_per_s=1e9,
        number_bytes=4,
        max_rows=8,
        kv_bytes=1e6,
        link=Link(1e-6, 1e9),
        **{name: int(value) for name, value in values.items()},
    )


def test_a_pass_by_hand() -> None:
    """Four blocks of 64 x (64 + 32 + 32) + 64 x 64 + 3 x 64 x 176, an output layer of 256 x 64; 2 heads of 16 keys."""
    matrices = 4 * (64 * 128 + 64 * 64 + 3 * 64 * 176) + 256 * 64
    speed = speed_of()
    assert speed.weights_s == pytest.approx(4 * matrices / 1e9)
    assert speed.token_s == pytest.approx(2 * matrices / 1e9)
    assert speed.context_s == pytest.approx(4 * 2 * 4 * 32 / 1e9)
    assert speed.attention_s == pytest.approx(4 * 4 * 64 / 1e9)
    assert speed.max_context == pytest.approx(1e6 / (4 * 2 * 4 * 32))
    assert speed.output_s == pytest.approx(2 * 256 * 64 / 1e9)
    assert speed.links_s(8) == 0


def test_a_prefill_computes_the_output_layer_once() -> None:
    """100 tokens: their products with the blocks, attention to 50 tokens on average, and one token's logits."""
    blocks = 4 * (64 * 128 + 64 * 64 + 3 * 64 * 176)
    operations = 100 * (2 * blocks + 50 * 4 * 4 * 64) + 2 * 256 * 64
    assert decode(speed_of(), 100, [1]).prefill == pytest.approx(operations / 1e9)


def test_ranks_that_hold_the_same_heads_have_room_for_fewer_tokens() -> None:
    """Two key-value heads of 16 numbers in four blocks: of four ranks, each has a quarter of the budget for a head."""
    assert speed_of(tensor=2).max_context == pytest.approx(1e6 / (4 * 2 * 4 * 2 * 16))
    assert speed_of(tensor=4).max_context == pytest.approx(1e6 / 4 / (4 * 2 * 4 * 16))
    assert speed_of(pipeline=2, groups=2).max_context == pytest.approx(speed_of().max_context)


def test_tensor_parallel_ranks_divide_all_but_shared_heads() -> None:
    one, two, four = speed_of(), speed_of(tensor=2), speed_of(tensor=4)
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.token_s == pytest.approx(one.token_s / 4)
    assert two.context_s == pytest.approx(one.context_s / 2)
    assert four.context_s == pytest.approx(one.context_s / 2), "two key-value heads: two ranks read the same one"
    assert two.links_s(1) == pytest.approx(8 * (2e-6 + 64 * 4 / 1e9)), "8 all-reduces of a row of 64 numbers"


def test_pipeline_stages_work_side_by_side_with_a_group_each() -> None:
    """A group's token takes both stages: its rows' arithmetic is half as many rows, in the same time together."""
    one, two, alone = speed_of(), speed_of(pipeline=2, groups=2), speed_of(pipeline=2, groups=1)
    assert two.weights_s == pytest.approx(one.weights_s), "each stage reads its half, twice as often"
    assert two.token_s == pytest.approx(one.token_s / 2)
    assert alone.token_s == pytest.approx(one.token_s), "a single group uses one stage at a time"

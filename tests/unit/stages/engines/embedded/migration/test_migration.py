"""Rows that continue in another engine have the same bits as at home, whatever happens, and nobody waits for ever. No
test depends on a clock or on luck: a `Gate` lets an engine run an exact number of batches."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.engines.config import SpeculationConfig
from stages.engines.embedded.migration import MigratedRow, MigratingEngine, key_of
from stages.engines.protocol import Request, RequestError, RowsLost
from stages.engines.row_loads import COPY_POSITIONS, EngineLoad, MigrationRequest
from stages.models.config import SamplingConfig
from tests.support.engines import assert_same_bits, by_row
from tests.support.migrating_engines import (
    Gate,
    at_home,
    build,
    carry,
    copy_parts,
    deliver,
    engines,
    give,
    pause_after,
    requests,
)
from tests.support.processors import KERNELS
from tests.support.waiting import until

# ---- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("batches", [1, 9])
def test_migrated_rows_have_the_bits_of_those_that_stay(kernels: str, with_cache: bool, batches: int) -> None:
    """Two of five move while they decode; among them one that shares prompt blocks with one that stays. Keys and values
    that came along are not computed again."""
    rows = requests()
    with engines(2, kernels=kernels) as (source, target):
        results, gate = pause_after(source, batches, rows)
        migrated = give(source, gate, rows[2:4], with_cache)
        assert [(m.request.row, len(m.tokens)) for m in migrated] == [(2, batches + 1), (3, batches + 1)]
        assert all((m.cache is not None) == with_cache for m in migrated)
        carry(source, target, migrated)
        assert_same_bits(by_row(results), at_home(rows, kernels))
        fed = sum(len(m.request.tokens) + len(m.tokens) for m in migrated)
        given, taken = source.stats(), target.stats()
        assert (given.rows, given.rows_given, taken.rows, taken.rows_taken) == (3, 2, 2, 2)
        assert taken.prompt_tokens == (0 if with_cache else fed)
        assert (source._scheduler.pool.num_used, target._scheduler.pool.num_used) == (0, 0)


def test_rows_that_have_not_begun_move_too() -> None:
    """Queued, half prefilled or admitted: nothing of them is lost."""
    rows = requests()
    with engines(2, max_rows=2) as (source, target):
        results, gate = pause_after(source, 0, rows)
        migrated = give(source, gate, rows)
        assert [len(m.tokens) for m in migrated] == [1, 1, 0, 0, 0]
        assert [m.cache is not None for m in migrated] == [True, True, False, False, False]
        assert source.num_calls_migrated == 1
        carry(source, target, migrated)
        assert_same_bits(by_row(results), at_home(rows))
        assert source.num_calls_migrated == 0


def test_migrated_twice() -> None:
    """Through an engine that only hands on."""
    rows = requests(3)
    with engines(3) as (first, second, third):
        results, gate = pause_after(first, 3, rows)
        migrated = give(first, gate, rows)
        second_gate = Gate(second)
        incoming = second.migrate_in(migrated)
        second_gate.let(5)
        again = give(second, second_gate, rows)
        assert [len(m.tokens) for m in again] == [4 + 6] * 3
        assert (second.num_calls_migrated, second.stats().rows_given) == (1, 3)
        carry(second, third, again)
        deliver(incoming, first)
        assert_same_bits(by_row(results), at_home(rows))


@pytest.mark.usefixtures("longest_drafts")
def test_migrated_with_drafts_under_way() -> None:
    """Drafts leave keys of wrong guesses behind the row's own: they must not travel."""
    speculation = SpeculationConfig(drafter="ngram", max_tokens=5)
    rows = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=0.3)) for r in requests(4, new=60)
    ]
    with engines(2, speculation=speculation) as (source, target):
        results, gate = pause_after(source, 12, rows)
        migrated = give(source, gate, rows)
        assert not source.drafts._drafters[0]._indexes  # type: ignore[attr-defined]
        carry(source, target, migrated)
        assert_same_bits(by_row(results), at_home(rows))
        assert sum(source.stats().drafted_tokens.values()) > 0
        assert sum(target.stats().drafted_tokens.values()) > 0


def test_preempted_where_it_came_to() -> None:
    """The target has memory for 64 blocks and 14 rows of its own that want them: incoming are the youngest, are sent
    back, and are fed again."""
    rows, own = requests(6, new=50), requests(14, new=60)
    own = [dataclasses.replace(r, row=100 + r.row) for r in own]
    with closing(build(kv_budget_mb=16)) as source, closing(build(max_rows=24, kv_budget_mb=1)) as target:
        results, gate = pause_after(source, 3, rows)
        migrated = give(source, gate, rows)
        theirs, target_gate = pause_after(target, 2, own)
        deliver(target_gate.call(target.migrate_in, migrated), source)
        assert_same_bits(by_row(results), at_home(rows))
        assert_same_bits(by_row(theirs), at_home(own))
        assert target.stats().preemptions > 0
        assert target._scheduler.pool.num_used == 0


def test_without_a_free_slot_they_wait() -> None:
    rows, own = requests(3), [dataclasses.replace(r, row=100 + r.row) for r in requests(2)]
    with closing(build()) as source, closing(build(max_rows=2)) as target:
        results, gate = pause_after(source, 3, rows)
        migrated = give(source, gate, rows)
        theirs, target_gate = pause_after(target, 2, own)
        incoming = target_gate.call(target.migrate_in, migrated, batches=1)
        assert len(target._scheduler.running) == 2
        target_gate.open()
        deliver(incoming, source)
        assert_same_bits(by_row(results), at_home(rows))
        assert_same_bits(by_row(theirs), at_home(own))


# ---- what the source does meanwhile -------------------------------------------------------------------------------


def test_the_source_refits_sleeps_and_serves_others_meanwhile() -> None:
    rows = requests(3)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 3, rows)
        migrated = give(source, gate, rows)
        source.load_weights(1, {"model.norm.weight": torch.full((64,), 2.0)})
        source.sleep()
        source.wake()
        others = by_row(source.generate(requests(2, new=5, version=1)))
        assert {v for c in others.values() for v in c.versions.tolist()} == {1}
        carry(source, target, migrated)
        assert_same_bits(by_row(results), at_home(rows))


def test_given_back_rows_go_on_at_home() -> None:
    """The target died with them: their source has all that it needs."""
    rows = requests(4)
    with engines(1) as (source,):
        results, gate = pause_after(source, 5, rows)
        migrated = give(source, gate, rows[:3])
        assert source.tickets_awaited([m.ticket for m in migrated]) == {m.ticket for m in migrated}
        source.give_back([m.ticket for m in migrated])
        assert_same_bits(by_row(results), at_home(rows))
        assert source.tickets_awaited([m.ticket for m in migrated]) == set()
        source.give_back([m.ticket for m in migrated])
        source.deliver(migrated[0].ticket, at_home(rows[:1])[0])  # it was not dead after all: too late
        assert source.stats().rows == 4


def test_given_back_after_a_refit_is_an_error_and_no_token() -> None:
    rows = requests(3)
    with engines(1) as (source,):
        results, gate = pause_after(source, 5, rows)
        migrated = give(source, gate, rows)
        source.load_weights(1, {})
        source.give_back([m.ticket for m in migrated])
        with pytest.raises(RowsLost, match=r"row 0 came back unfinished, and version 0 .* version 1 is resident"):
            next(results)
        assert len(by_row(source.generate(requests(2, version=1)))) == 2


def test_a_row_that_is_nearly_done_stays() -> None:
    rows = requests(3)
    with engines(1) as (source,):
        results, gate = pause_after(source, 5, rows)
        asked = [MigrationRequest(key_of(r), False, left) for r, left in zip(rows, (33, 34, 35), strict=True)]
        migrated = gate.call(source.migrate_out, asked)  # 6 of 40 tokens are sampled when it is asked
        assert [m.request.row for m in migrated] == [0, 1]
        source.give_back([m.ticket for m in migrated])
        assert_same_bits(by_row(results), at_home(rows))


# ---- two phases ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with positions for 2,048 tokens."""
    folder = tmp_path_factory.mktemp("long")
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_a_long_row_stands_still_for_two_passes_at_most(long_model: str) -> None:
    """1,900 tokens travel in parts while the row continues to decode. When it is taken out, only its last part is left
    (less than a block, and the tokens sampled since). The target is busy with rows of its own, and gets it after the
    batch under way."""
    sampling = SamplingConfig(60, 60)
    row = Request(0, 1, 2, tuple(3 + i * i % 90 for i in range(1880)), 0, sampling)
    own = Request(7, 1, 2, (5, 6, 7), 0, sampling)
    with engines(2, path=long_model, max_seq=1960, kv_budget_mb=16) as (source, target):
        expected = by_row(source.generate([row]))
        theirs = by_row(target.generate([own]))
        results, gate = pause_after(source, 20, [row])
        busy, target_gate = pause_after(target, 2, [own])
        before = len(source._scheduler.running[0].tokens)
        part = None
        while part is None or part.stop - part.start == COPY_POSITIONS:
            part = gate.call(source.copy_out, key_of(row), 0 if part is None else part.stop, batches=1)
            assert part is not None
            if part.cache is not None:
                assert target_gate.call(target.write_in, part, batches=1) > 0
        parts = -(-1900 // COPY_POSITIONS)
        assert len(source._scheduler.running[0].tokens) - before == parts, "it has gone on decoding at each part"
        [moved] = give(source, gate, [row], after=[part])
        assert moved.num_copied == part.stop > 1880
        assert moved.cache is not None
        assert moved.cache.shape[3] <= 16 + 2, "the rest is small"
        target.stats()  # counts from here on
        incoming = target_gate.call(target.migrate_in, [moved], batches=1)
        assert target.stats().decode_steps <= 2
        assert target._scheduler.running[-1].num_cached == moved.num_tokens > 1900, "it is in the next batch"
        target_gate.open()
        deliver(incoming, source)
        assert_same_bits(by_row(results), expected)
        assert_same_bits(by_row(busy), theirs)
        assert target.stats().prompt_tokens == 0, "nothing was computed again"
        assert (source._scheduler.pool.num_used, target._scheduler.pool.num_used) == (0, 0)


def test_a_row_that_ends_while_it_is_copied_leaves_nothing_behind() -> None:
    rows = requests(2, new=20)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 17, rows)
        part = copy_parts(source, gate, target, rows[1])
        assert part.cache is not None
        gate.open()
        assert_same_bits(by_row(results), at_home(rows))
        assert source.copy_out(part.key, part.stop) is None
        assert source.migrate_out([MigrationRequest(part.key, True)], {part.key: part}) == []
        assert target._scheduler.pool.num_used == part.stop // 16
        with pytest.raises(RuntimeError, match="1 rows are arriving"):
            target.sleep()
        target.drop_parts(part.key)
        assert target._scheduler.pool.num_used == 0
        target.sleep()


def test_a_row_that_is_preempted_while_it_is_copied_migrates_all_the_same() -> None:
    """Its keys are gone at its source and would be computed again, with the same bits, so the parts stay right."""
    rows = requests(2, new=60)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 30, rows)
        part = copy_parts(source, gate, target, rows[1])

        def give_preempted() -> list[MigratedRow]:
            with source.between_batches():
                source._scheduler._drop_blocks(source._scheduler.running[1])
                return source.migrate_out([MigrationRequest(part.key, True)], {part.key: part})

        [moved] = gate.call(give_preempted)
        assert moved.cache is None
        carry(source, target, [moved])
        assert_same_bits(by_row(results), at_home(rows))


def test_a_row_stays_if_the_weights_change_while_it_is_copied() -> None:
    rows = requests(2, new=30)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 17, rows)
        part = dataclasses.replace(copy_parts(source, gate, target, rows[1]), version=1)
        assert give(source, gate, rows[1:], after=[part]) == []
        assert_same_bits(by_row(results), at_home(rows))


def test_parts_of_older_weights_are_dropped_when_their_row_arrives() -> None:
    rows = requests(2, new=30)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 17, rows)
        part = copy_parts(source, gate, target, rows[1])
        target._stored[part.key].version = 1  # as if the target had loaded other weights since
        carry(source, target, give(source, gate, rows[1:]))
        assert_same_bits(by_row(results), at_home(rows))


def test_refused_are_parts_that_do_not_fit() -> None:
    """All parts of the row are dropped then."""
    rows = requests(2)
    with closing(build()) as source, closing(build(kv_budget_mb=1)) as target:
        _, gate = pause_after(source, 20, rows)
        part = copy_parts(source, gate, target, rows[1])
        assert part.cache is not None
        target.drop_parts(part.key)
        cases: list[tuple[dict[str, object], str]] = [
            ({"version": 3}, "row 1 brings keys and values of version 3; version 0 is resident"),
            ({"start": 16}, "row 1 brings keys and values from position 16 on; 0 are here"),
            ({"cache": part.cache[:1]}, "row 1 brings keys and values of shape"),
            ({"cache": part.cache[:, :, :, :5]}, "row 1 brings keys and values of shape"),
            ({"cache": np.concatenate([part.cache] * 64, axis=3)}, "row 1 finds no free memory"),
        ]
        for change, message in cases:
            with pytest.raises(RequestError, match=message):
                target.write_in(dataclasses.replace(part, **change))  # type: ignore[arg-type]
            assert target._scheduler.pool.num_used == 0
        [moved] = give(source, gate, rows[1:], after=[part])
        with pytest.raises(RequestError, match=rf"row 1 brings keys and values from position {part.stop} on; 0 are"):
            target.migrate_in([moved])
        source.give_back([moved.ticket])


# ---- whoever goes away --------------------------------------------------------------------------------------------


def test_rows_without_a_caller_do_not_move() -> None:
    rows = requests(4)
    with engines(1) as (source,):
        gate = Gate(source)
        staying = source.generate(rows[2:])
        leaving = source.generate([dataclasses.replace(rows[0], sampling=SamplingConfig(1)), rows[1]])
        gate.let(3)
        next(leaving)
        leaving.close()  # type: ignore[attr-defined]
        migrated = give(source, gate, rows)
        assert [m.request.row for m in migrated] == [2, 3]
        source.give_back([m.ticket for m in migrated])
        assert_same_bits(by_row(staying), {i: c for i, c in at_home(rows).items() if i > 1})


def test_a_caller_that_goes_away_meanwhile_frees_both_sides() -> None:
    rows = requests(4)
    with engines(2) as (source, target):
        gate = Gate(source)
        staying = source.generate(rows[2:])
        leaving = source.generate([dataclasses.replace(rows[0], sampling=SamplingConfig(1)), *rows[:2]])
        gate.let(3)
        migrated = give(source, gate, rows[:3])
        next(leaving)
        leaving.close()  # type: ignore[attr-defined]
        target_gate = Gate(target)
        incoming = target.migrate_in(migrated)
        target_gate.let(2)
        kept = source.tickets_awaited([m.ticket for m in migrated])
        assert kept == {m.ticket for m in migrated if m.request.row == 2}
        incoming.drop({m.ticket for m in migrated} - kept)
        target_gate.open()
        deliver(incoming, source)
        assert_same_bits(by_row(staying), at_home(rows[2:]))
        target.load_weights(1, {})  # drains: nothing that was dropped is still waited for
        assert target.stats().rows == 1
        assert target._scheduler.pool.num_used == 0


def test_closed_incoming_rows_are_dropped() -> None:
    """The source died: nobody takes what its rows become."""
    rows = requests(3)
    with engines(2) as (source, target):
        _, gate = pause_after(source, 3, rows)
        target_gate = Gate(target)
        incoming = target.migrate_in(give(source, gate, rows))
        target_gate.let(1)
        incoming.close()
        target_gate.open()
        target.load_weights(1, {})
        assert (target.stats().rows, target._scheduler.pool.num_used) == (0, 0)


def test_an_engine_that_stops_notifies_those_who_wait_for_rows_elsewhere() -> None:
    rows = requests(3)
    with engines(2) as (source, target):
        results, gate = pause_after(source, 3, rows)
        migrated = give(source, gate, rows)
        target_gate = Gate(target)
        incoming = target.migrate_in(migrated)
        target_gate.let(1)
        with ThreadPoolExecutor(1) as thread:
            closing_target = thread.submit(target.close)
            target_gate.open()
            closing_target.result(timeout=60)
        with pytest.raises(RuntimeError, match="stopped"):
            list(incoming)
        source.close()
        with pytest.raises(RuntimeError, match="stopped"):
            list(results)
        source.give_back([m.ticket for m in migrated])
        with pytest.raises(RuntimeError, match="stopped"):
            source.migrate_out([])


# ---- refusals -----------------------------------------------------------------------------------------------------


def some_moved(source: MigratingEngine) -> list[MigratedRow]:
    rows = requests(2)
    _, gate = pause_after(source, 3, rows)
    return give(source, gate, rows)


def test_refused_are_rows_that_cannot_go_on_here() -> None:
    with engines(2) as (source, target):
        good, bad = some_moved(source)
        cases: list[tuple[dict[str, object], str]] = [
            ({"version": 3}, "row 1 goes on with version 3 of the weights; version 0 is resident"),
            ({"cache": bad.cache[:2]}, "row 1 brings keys and values of shape"),
            ({"cache": np.concatenate([bad.cache] * 9, axis=3)}, "row 1 brings keys and values of shape"),
            ({"logprobs": bad.logprobs[:1]}, "row 1 arrives with 4 tokens of 40"),
            ({"request": dataclasses.replace(bad.request, tokens=(9,) * 120)}, r"row 1 takes 120 prompt \+ 40 new"),
        ]
        for change, message in cases:
            with pytest.raises(RequestError, match=message):
                target.migrate_in([good, dataclasses.replace(bad, **change)])  # type: ignore[arg-type]
        assert target._scheduler.idle, "all or none"
        target.sleep()
        with pytest.raises(RuntimeError, match="asleep"):
            target.migrate_in([good])
        target.wake()
        assert [ticket for ticket, _ in target.migrate_in([good, bad])] == [good.ticket, bad.ticket]


# ---- what is reported ---------------------------------------------------------------------------------------------


def watched(engine: MigratingEngine, lengths: list[int]) -> list[EngineLoad]:
    """Run rows that end after so many tokens, and return what the engine reports of them."""
    reports: list[EngineLoad] = []
    engine.watch_load(reports.append)
    until(lambda: len(reports) == 1)
    rows = [Request(i, 1, 2, (5, 6, 7 + i), 0, SamplingConfig(n, n)) for i, n in enumerate(lengths)]
    assert len(by_row(engine.generate(rows))) == len(rows)
    until(lambda: len(reports) > 1 and not reports[-1].rows)
    return reports


def test_the_last_rows_are_reported_one_by_one() -> None:
    """The cost of a pass is known as soon as passes over 5, 4 and 3 rows were timed."""
    with engines(1) as (engine,):
        reports = watched(engine, [4, 8, 12, 16, 20])
    assert [len(here.rows) for here in reports] == [0, 5, 4, 3, 3, 2, 1, 0]
    assert [here.cost is not None for here in reports] == [False] * 4 + [True] * 4
    here = reports[5]
    assert (here.version, here.max_rows, here.position_bytes) == (0, 8, 2 * 4 * 2 * 16 * 4)
    assert [row.key for row in here.rows] == [(1, 2, 3), (1, 2, 4)]
    assert [row.left for row in here.rows] == [4, 8]
    assert all(row.cached == row.tokens - 1 for row in here.rows)
    assert here.pass_s > 0
    assert here.prefill_s > 0


def test_many_rows_are_reported_by_the_eighth() -> None:
    """There are 40 rows, and one of them ends in each of 40 passes."""
    with engines(1, max_rows=40, kv_budget_mb=16) as (engine,):
        reports = watched(engine, list(range(2, 42)))
    numbers = [len(here.rows) for here in reports]
    assert numbers == [0, 40, 35, 31, 28, 25, 22, 20, 18, 16, 14, *range(13, -1, -1)]


def test_rows_that_migrate_are_reported_at_once() -> None:
    """One row of 20 is less than an eighth."""
    rows = requests(20, new=30)
    with engines(2, max_rows=20, kv_budget_mb=16) as (source, target):
        heard: dict[str, list[int]] = {"source": [], "target": []}
        source.watch_load(lambda load: heard["source"].append(len(load.rows)))
        target.watch_load(lambda load: heard["target"].append(len(load.rows)))
        results, gate = pause_after(source, 3, rows)
        migrated = give(source, gate, rows[:1])
        until(lambda: 19 in heard["source"])
        carry(source, target, migrated)
        assert_same_bits(by_row(results), at_home(rows))
        until(lambda: heard["target"] == [0, 1, 0])


def test_rows_whose_tokens_are_given_are_nobody_elses() -> None:
    """Canaries are to say what this engine makes of them: whoever orders moves does not hear of them."""
    reports: list[EngineLoad] = []
    with engines(1) as (engine,):
        engine.watch_load(reports.append)
        until(lambda: len(reports) == 1)
        drawn, given = requests(2, new=8)
        given = dataclasses.replace(given, forced=(7,) * 8)
        assert len(by_row(engine.generate([drawn, given]))) == 2
        until(lambda: len(reports) == 3)
        assert [[row.key for row in here.rows] for here in reports] == [[], [(1, 2, 0)], []]


def test_rows_of_a_deep_model_move(tmp_path: Path) -> None:
    """A cache of the demo model's shape (30 layers, 3 key/value heads of 64), in a model that is small otherwise."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=36,
        intermediate_size=32,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rows = requests(2, new=8)
    with engines(2, path=str(tmp_path), kv_budget_mb=64) as (source, target):
        expected = by_row(source.generate(rows))
        results, gate = pause_after(source, 3, rows)
        moved = give(source, gate, rows)
        assert [one.cache.shape[:3] for one in moved if one.cache is not None] == [(30, 2, 3)] * 2
        carry(source, target, moved)
        assert_same_bits(by_row(results), expected)

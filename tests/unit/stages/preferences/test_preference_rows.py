"""Rows, pairs and groups from judgements: nothing twice, nothing lost, the same on every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stages.models.hf_files import ByteTokenizer, Tokenizer
from stages.preferences.data import JudgedRows, draw_pairs, epoch_groups, step_groups, tokenise_judgements
from storage.config import PreferencesConfig
from storage.preferences import JudgedPair, Judgement, PreferencesError, RatedText

BYTES = ByteTokenizer()
EOS = BYTES.eos_ids[0]
TEXTS = [RatedText(f"line {n}", f"text {n}", n / 4, 0.1) for n in range(40)]


def config(**changes: Any) -> PreferencesConfig:
    return PreferencesConfig(url="x.jsonl", **changes)


def judged(judgements: list[Judgement], tokenizer: Tokenizer = BYTES, **changes: Any) -> JudgedRows:
    return tokenise_judgements(judgements, tokenizer, config(**changes), seed=0)


def rows_of(found: JudgedRows) -> list[bytes]:
    return [bytes(row[:length]) for row, length in zip(found.rows.tokens.tolist(), found.rows.lengths, strict=True)]


def test_a_response_of_several_pairs_is_one_row() -> None:
    """a > b, a > c, b > c of one prompt: three rows; the same response to another prompt is another row."""
    pairs = [("p", "a", "b"), ("p", "a", "c"), ("p", "b", "c"), ("q", "a", "z")]
    found = judged([JudgedPair(f"line {n}", *pair) for n, pair in enumerate(pairs)])
    assert rows_of(found) == [bytes([*text, EOS]) for text in (b"pa", b"pb", b"pc", b"qa", b"qz")]
    assert (found.pairs.better.tolist(), found.pairs.worse.tolist()) == ([0, 0, 1, 3], [1, 2, 2, 4])
    assert found.units.tolist() == [0, 0, 0, 1, 1]
    groups = {tuple(group.rows): len(group.pairs) for group in epoch_groups(found, config(), seed=0, epoch=0)}
    assert groups == {(0, 1, 2): 3, (3, 4): 1}


def test_a_chat_is_read_as_the_policy_would_continue_it() -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    found = judged([JudgedPair("line 1", messages, "4", "5")], format="chat")
    assert rows_of(found)[0] == b"user: 2+2?\nassistant: 4" + bytes([EOS])


class WithBeginning(ByteTokenizer):
    """One that begins every text with a token of its own, as Llama's does."""

    def encode(self, text: str) -> list[int]:
        return [1, *super().encode(text)]


def test_a_beginning_is_there_once() -> None:
    found = judged([JudgedPair("line 1", "p", "a", "b")], WithBeginning())
    assert rows_of(found)[0] == bytes([1, *b"pa", EOS])


@pytest.mark.parametrize("too_long", ["error", "skip"])
def test_a_long_row(too_long: str) -> None:
    pairs: list[Judgement] = [JudgedPair("line 1", "p", "a", "b"), JudgedPair("line 2", "q", "a", "b" * 9)]
    if too_long == "skip":
        assert len(judged(pairs, max_tokens=8, too_long="skip").pairs) == 1
        return
    with pytest.raises(PreferencesError, match=r"data\.max_tokens: given 8; line 2 has 11 tokens"):
        judged(pairs, max_tokens=8)


def test_texts_that_differ_in_no_token_are_refused() -> None:
    with pytest.raises(PreferencesError, match=r"data\.chosen: line 1: both responses are the same tokens"):
        judged([JudgedPair("line 1", "p", "a\x00", "a")])


def test_an_epoch_has_every_text_once_and_its_pairs_differ_enough() -> None:
    found = judged([*TEXTS], kind="ratings", group_texts=8)
    groups = epoch_groups(found, config(kind="ratings", group_texts=8), seed=3, epoch=1)
    assert sorted(row for group in groups for row in group.rows) == [*range(40)]
    for group in groups:
        gaps = found.ratings[group.rows][:, None] - found.ratings[group.rows]
        assert len(group.pairs) == (gaps >= 1).sum() > 0
        assert (found.ratings[group.pairs.better] - found.ratings[group.pairs.worse] >= 1).all()
    again = epoch_groups(found, config(kind="ratings", group_texts=8), seed=3, epoch=1)
    other = epoch_groups(found, config(kind="ratings", group_texts=8), seed=3, epoch=2)
    assert all(np.array_equal(a.rows, b.rows) for a, b in zip(groups, again, strict=True))
    assert any(not np.array_equal(a.rows, b.rows) for a, b in zip(groups, other, strict=True))


def test_drawn_pairs_are_all_where_they_are_few_and_alike_where_they_are_many() -> None:
    """Ties, gaps of just the least, rows in any order: the pairs of a double loop; and over many draws each of them is
    drawn as often (27.3 times in 100 draws of 3 of 11, a standard deviation of 4.5)."""
    ratings = np.array([1.0, 3.0, 2.0, 0.5, 3.0, 1.5])
    loop = {(i, j) for i in range(6) for j in range(6) if ratings[i] - ratings[j] >= 1}
    found = draw_pairs(ratings, 1.0, 1000, 0)
    assert {*zip(found.better.tolist(), found.worse.tolist(), strict=True)} == loop
    assert len(found) == len(loop) == 11
    counts = dict.fromkeys(loop, 0)
    for seed in range(100):
        some = draw_pairs(ratings, 1.0, 3, seed)
        for pair in zip(some.better.tolist(), some.worse.tolist(), strict=True):
            counts[pair] += 1
    assert sum(counts.values()) == 300
    assert all(abs(count - 300 / 11) < 4 * 4.5 for count in counts.values())


def test_measured_pairs_are_drawn_among_all() -> None:
    every = judged([*TEXTS], kind="ratings", min_gap=2.0)
    some = judged([*TEXTS], kind="ratings", min_gap=2.0, held_out_pairs=50)
    pairs = {*zip(every.pairs.better.tolist(), every.pairs.worse.tolist(), strict=True)}
    drawn = {*zip(some.pairs.better.tolist(), some.pairs.worse.tolist(), strict=True)}
    assert (len(pairs), len(drawn)) == (32 * 33 // 2, 50)
    assert drawn <= pairs


def test_no_pair_is_refused() -> None:
    with pytest.raises(PreferencesError, match=r"data\.min_gap: given 100"):
        judged([*TEXTS], kind="ratings", min_gap=100)


def test_steps_hold_whole_groups() -> None:
    found = judged([*TEXTS], kind="ratings")
    groups = epoch_groups(found, config(kind="ratings", group_texts=8), seed=0, epoch=0)
    steps = step_groups(groups, 12)
    assert [len(step) for step in steps] == [2, 2, 1]
    assert [group for step in steps for group in step] == groups

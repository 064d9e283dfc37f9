"""Rows of a report by hand-computed numbers: what a token and a row come to, which rows are shown, as which text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pipeline.observe.curves import even_indices, round_or_none
from pipeline.observe.report.comparison import worst_mismatches
from pipeline.observe.report.samples import SampleBudget, choose_samples, shorten, token_texts
from pipeline.observe.rows import StageRows
from stages.models.hf_files import ByteTokenizer
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Scores, Values
from tests.support.sampled_rows import rollout_of


def step_rows(
    *, policy: bool = True, critic: bool = True, step: int = 3, scores: tuple[float, ...] = (0.25, -0.5)
) -> StageRows:
    """Two rows: prompt "ab", responses "cd" and "e" (of which the second was cut)."""
    mask = np.array([[0, 0, 1, 1], [0, 0, 1, 0]], bool)
    rollout = rollout_of(
        [[97, 98, 99, 100], [97, 98, 101, 0]], mask, row=np.array([4, 5]), finish_reason=np.array([0, 1], np.int8),
        sampler_logprobs=np.array([[0, 0, -1, -2], [0, 0, -0.5, 0]], np.float32),
        token_versions=np.array([[-1, -1, 2, 3], [-1, -1, 2, -1]], np.int32),
    )  # fmt: skip
    ours = np.array([[0, 0, -1.25, -2], [0, 0, -1.5, 0]], np.float32)
    values = np.array([[0, 0, 0.5, 0.75], [0, 0, 0.25, 0]], np.float32)
    return StageRows(
        step=step,
        shard=0,
        rollout=rollout,
        scores=Scores(np.array(scores, np.float32)),
        reference=ReferenceLogprobs(np.array([[0, 0, -1.5, -1.5], [0, 0, -1, 0]], np.float32)),
        policy=PolicyLogprobs(ours, np.zeros_like(ours)) if policy else None,
        values=Values(values, np.zeros(2, np.float32)) if critic else None,
        advantages=Advantages(np.zeros_like(ours), np.array([[0, 0, 1, -1], [0, 0, 2, 0]], np.float32), ours, mask),
    )


def decode(tokens: Sequence[int]) -> str:
    return ByteTokenizer().decode(tokens, skip_special=False)


def test_what_a_token_comes_to() -> None:
    rows = step_rows()
    assert rows.log_ratio == pytest.approx(np.array([[0, 0, 0.25, -0.5], [0, 0, -0.5, 0]]))
    assert rows.kl == pytest.approx([-0.25, -0.5])
    assert rows.mismatch == pytest.approx(np.array([[0, 0, -0.25, 0], [0, 0, -1, 0]]))


def test_without_recomputed_log_probs_the_samplers_are_taken_and_there_is_no_mismatch() -> None:
    rows = step_rows(policy=False)
    assert rows.log_ratio == pytest.approx(np.array([[0, 0, 0.5, -0.5], [0, 0, 0.5, 0]]))
    assert rows.mismatch is None
    assert worst_mismatches([rows], decode) is None


def test_a_shown_row() -> None:
    shown = choose_samples([step_rows()], 1, decode, SampleBudget())
    first, second = shown.rows
    assert (shown.of_rows, shown.read_steps, shown.of_steps) == (2, 1, 1)
    assert (first.step, first.row, first.prompt, first.tokens) == (3, 4, "ab", ["c", "d"])
    assert (first.score, first.kl, first.length, first.cut, first.versions) == (0.25, -0.25, 2, False, "2-3")
    assert (first.log_ratio, first.mismatch) == ([0.25, -0.5], [-0.25, 0.0])
    assert (first.values, first.advantages) == ([0.5, 0.75], [1.0, -1.0])
    assert (second.tokens, second.cut, second.versions) == (["e"], True, "2")


def test_few_of_many_rows_are_even_and_the_extremes_are_among_them() -> None:
    """100 steps of 2 rows: the highest score is in a row that an even sample of 10 would miss."""
    read = [step_rows(step=i, scores=(0.1, 0.9 if i == 37 else 0.2)) for i in range(100)]
    shown = choose_samples(read, 50_000, decode, SampleBudget(rows=16))
    assert (len(shown.rows), shown.of_rows) == (16, 100_000)
    assert [row.step for row in shown.rows if row.extreme == "highest score"] == [37]
    even = [row.step for row in shown.rows if not row.extreme]
    assert even == sorted(even)
    assert even[-1] >= 90


def test_long_responses_are_cut_and_there_are_fewer_of_them() -> None:
    shown = choose_samples([step_rows(step=i) for i in range(100)], 100, decode, SampleBudget(tokens=20, row_tokens=1))
    assert {len(row.tokens) for row in shown.rows} == {1}
    assert max(row.length for row in shown.rows) == 2
    assert len(shown.rows) == 20


def test_worst_mismatches_by_size() -> None:
    found = worst_mismatches([step_rows(), step_rows(step=5)], decode, max_count=3)
    assert [(m.step, m.row, m.position, m.token) for m in found] == [(3, 5, 0, "e"), (5, 5, 0, "e"), (3, 4, 0, "c")]
    assert (found[0].sampler, found[0].policy) == (-0.5, -1.5)
    assert [m.staleness for m in found] == [1, 3, 1]


def torn(text: str) -> tuple[Callable[[Sequence[int]], str], list[int]]:
    return decode, list(text.encode())


@pytest.mark.parametrize("text", ["plain", "naïve 日本", "\x02\x00", ""])
def test_pieces_are_the_whole_text(text: str) -> None:
    decoder, tokens = torn(text)
    found = token_texts(decoder, tokens)
    assert "".join(found) == text
    assert len(found) == len(tokens)


def test_a_character_of_several_tokens_belongs_to_its_last() -> None:
    assert token_texts(*torn("aé€")) == ["a", "", "é", "", "", "€"]


def test_bytes_that_are_no_text_end_nowhere() -> None:
    """A random model samples them: each must not wait for the rest of the response."""
    found = token_texts(decode, [0xE2, 0x28, 0xFF, 0xFF, 0xFF, 0xFF, 0x61])
    assert len(found) == 7
    assert found[-1].endswith("a")


def test_words_whose_text_depends_on_the_one_before() -> None:
    """Sentencepiece: no space before the first token of what is decoded."""
    words = {1: "a", 2: "b", 3: "c"}
    assert token_texts(lambda tokens: " ".join(words[t] for t in tokens), [1, 2, 3]) == ["a", " b", " c"]


def test_numbers_are_short_and_finite() -> None:
    assert [round_or_none(x) for x in (0.1234567, float("nan"), float("inf"), None)] == [0.12346, None, None, None]


@pytest.mark.parametrize(
    ("total", "most", "expected"), [(3, 5, [0, 1, 2]), (10, 4, [0, 3, 6, 9]), (9, 1, [8]), (0, 3, []), (4, 0, [])]
)
def test_evenly(total: int, most: int, expected: list[int]) -> None:
    assert even_indices(total, most) == expected


def test_the_middle_of_a_long_prompt_is_left_out_and_that_is_said() -> None:
    assert shorten("x" * 10, 10) == "x" * 10
    found = shorten("a" * 600 + "b" * 3000 + "c" * 600, 1200)
    assert found == "a" * 600 + " […3,000 characters left out…] " + "c" * 600

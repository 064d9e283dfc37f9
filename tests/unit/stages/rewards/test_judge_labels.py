"""Pairs from verdicts, for the training of a reward model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from stages.rewards.judges.labels import Candidates, comparable_pairs, label_pairs
from stages.rewards.judges.rubric import Answer, Question, Rubric, make_rubric


def rubric(against: str | None) -> Rubric:
    text = "{prompt}|{response}" if against is None else "{prompt}|{first}|{second}"
    return make_rubric(text, None, None, 0.0, against, None, delimit=False)


def by_length(questions: Sequence[Question]) -> list[Answer]:
    """Prefers the longer; cannot read a question mark; of like lengths prefers what is shown first. Grades lengths."""

    def one(text: str) -> str:
        _, *shown = text.split("|")
        if "?" in text:
            return "?"
        if len(shown) == 1:
            return str(len(shown[0]))
        return "A" if len(shown[0]) >= len(shown[1]) else "B"

    return [Answer(one(question.messages[-1]["content"])) for question in questions]


def candidates(*responses: str) -> Candidates:
    return Candidates("p", "p", list(responses))


def test_pairs_leave_out_what_cannot_be_compared() -> None:
    pairs, dropped = comparable_pairs(candidates("a", " a", "", "b"), 0, 0, None)
    assert pairs == [(0, 3), (1, 3)]
    assert dropped == Counter(blank=3, equal=1)
    assert comparable_pairs(candidates("a"), 0, 0, None) == ([], Counter(alone=1))


def test_drawn_pairs_depend_on_seed_and_prompt_alone() -> None:
    many = candidates(*map(str, range(8)))
    drawn = [comparable_pairs(many, number, seed, 5)[0] for number, seed in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert all(len(set(pairs)) == 5 for pairs in drawn)
    assert drawn[0] == drawn[1]
    assert drawn[0] not in drawn[2:]


def test_a_pairwise_judge_names_the_better_with_both_orders_verdicts() -> None:
    """A judge that says A to both orders has made a tie; two of a prompt are asked for together with another's."""
    first, second = candidates("aaa", "a", "bb", "cc"), candidates("?", "x", "xx")
    asked = [(first, [(0, 1), (1, 2), (2, 3)]), (second, [(0, 1), (1, 2)])]
    (rows, dropped), (others, left) = label_pairs(rubric("group"), by_length, asked, 0.0, "m")
    assert rows == [
        {
            "prompt": "p",
            "chosen": chosen,
            "rejected": "a",
            "margin": 1.0,
            "judge": "m",
            "verdicts": {"chosen_shown_first": 1.0, "chosen_shown_last": 1.0},
        }
        for chosen in ("aaa", "bb")
    ]
    assert dropped == Counter(ties=1)
    assert [row["chosen"] for row in others] == ["xx"]
    assert left == Counter(unparsed=1)


def test_orders_are_told_apart_whichever_response_was_chosen() -> None:
    def leaning(questions: Sequence[Question]) -> list[Answer]:
        """The first gets 0.9 where the longer stands there, else 0.3."""

        def one(text: str) -> tuple[tuple[str, float], ...]:
            _, first, second = text.split("|")
            a, b = (0.9, 0.1) if len(first) > len(second) else (0.3, 0.7)
            return (("A", math.log(a)), ("B", math.log(b)))

        return [Answer("", one(question.messages[-1]["content"])) for question in questions]

    for order in ([(0, 1)], [(1, 0)]):
        ((rows, _),) = label_pairs(rubric("group"), leaning, [(candidates("long", "s"), order)], 0.0, "m")
        assert rows[0]["chosen"] == "long"
        assert rows[0]["margin"] == pytest.approx(0.6)
        assert rows[0]["verdicts"] == {
            "chosen_shown_first": pytest.approx(0.9),
            "chosen_shown_last": pytest.approx(0.7),
        }


def test_a_graded_judge_grades_each_response_once() -> None:
    asked: list[str] = []

    def ask(questions: Sequence[Question]) -> list[Answer]:
        asked.extend(question.messages[-1]["content"] for question in questions)
        return by_length(questions)

    ((rows, dropped),) = label_pairs(
        rubric(None), ask, [(candidates("a", "bbbb", "cc", "?"), [(0, 1), (0, 2), (0, 3)])], 2.0, "m"
    )
    assert sorted(asked) == ["p|?", "p|a", "p|bbbb", "p|cc"]
    assert [(row["chosen"], row["margin"], row["verdicts"]) for row in rows] == [
        ("bbbb", 3.0, {"chosen": 4.0, "rejected": 1.0})
    ]
    assert dropped == Counter(ties=1, unparsed=1)

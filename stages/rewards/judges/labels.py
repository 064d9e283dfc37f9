"""From a judge's verdicts to a preference set: rows of prompt, chosen and rejected response, as the training of a
reward model reads them. Pure, but for the asking.

    candidates of a prompt ──► pairs ──► judge, both orders (or a grade each) ──► label, or why there is none

May import numpy and stages.rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from stages.rewards.judges.rubric import Rubric
from stages.rewards.judges.verdicts import Ask, compare, grade
from stages.rewards.protocol import Sample

TIE, UNPARSED, EQUAL, BLANK, ALONE = "ties", "unparsed", "equal", "blank", "alone"
"""Why a pair has no label: margin too small, an answer that counts for nothing, the same text twice, an empty text;
and a prompt with one response has no pair."""


@dataclass(frozen=True)
class Candidates:
    """A prompt and some responses to it."""

    prompt: str | list[dict[str, str]]
    """A text, or chat messages."""
    text: str
    """The prompt as plain rewards see it."""
    responses: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    """The prompt's own fields."""


def pairs_of(
    candidates: Candidates, number: int, seed: int, most: int | None
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Pairs of responses that can be compared, by their numbers: all of them, or `most` that are drawn; and how many
    cannot be. `number`: of the prompt in its source."""
    dropped = Counter({ALONE: 1} if len(candidates.responses) < 2 else {})
    usable: list[tuple[int, int]] = []
    for one, other in combinations(range(len(candidates.responses)), 2):
        texts = candidates.responses[one].strip(), candidates.responses[other].strip()
        if not all(texts):
            dropped[BLANK] += 1
        elif texts[0] == texts[1]:
            dropped[EQUAL] += 1
        else:
            usable.append((one, other))
    if most is not None and len(usable) > most:
        chosen = np.random.default_rng([seed, number]).choice(len(usable), most, replace=False)
        usable = [usable[place] for place in np.sort(chosen)]
    return usable, dropped


def label(
    rubric: Rubric,
    ask: Ask,
    asked: Sequence[tuple[Candidates, Sequence[tuple[int, int]]]],
    min_margin: float,
    judge: str,
) -> list[tuple[list[dict[str, Any]], Counter[str]]]:
    """Of each prompt its labelled pairs, and how many were dropped and why. The judge is asked for all at once.

    The margin is the difference of two grades; of a pairwise judge |w - l| of the shares w and l = 1 - w that each
    response has, in the mean over both orders. A pair is a tie unless it is above `min_margin`.
    """
    verdicts = _graded(rubric, ask, asked) if rubric.against is None else _compared(rubric, ask, asked)
    found = []
    for (candidates, pairs), of_prompt in zip(asked, verdicts, strict=True):
        rows: list[dict[str, Any]] = []
        dropped: Counter[str] = Counter()
        for (one, other), pair in zip(pairs, of_prompt, strict=True):
            if pair is None:
                dropped[UNPARSED] += 1
                continue
            gap, named = pair
            if abs(gap) <= min_margin:
                dropped[TIE] += 1
                continue
            chosen, rejected = (one, other) if gap > 0 else (other, one)
            rows.append(
                {
                    "prompt": candidates.prompt,
                    "chosen": candidates.responses[chosen],
                    "rejected": candidates.responses[rejected],
                    "margin": round(abs(gap), 6),
                    "judge": judge,
                    "verdicts": named(chosen == one),
                }
            )
        found.append((rows, dropped))
    return found


def _sample(candidates: Candidates, response: str, number: int) -> Sample:
    chat = candidates.prompt if isinstance(candidates.prompt, list) else []
    messages = (*chat, {"role": "assistant", "content": response}) if chat else ()
    return Sample(candidates.text, response, extra=candidates.extra, row=number, messages=messages)


def _graded(rubric: Rubric, ask: Ask, asked: Sequence[tuple[Candidates, Sequence[tuple[int, int]]]]) -> list[list[Any]]:
    """Of every pair (gap of the grades, how they are written down), or None."""
    places = [(number, response) for number, (_, pairs) in enumerate(asked) for response in sorted({*sum(pairs, ())})]
    samples = [_sample(asked[n][0], asked[n][0].responses[response], n) for n, response in places]
    grades = dict(zip(places, grade(rubric, ask, samples), strict=True))

    def pair(number: int, one: int, other: int) -> Any:
        first, second = grades[number, one], grades[number, other]
        if first is None or second is None:
            return None
        in_order = {True: (first, second), False: (second, first)}
        return first - second, lambda chosen_first: dict(
            zip(("chosen", "rejected"), in_order[chosen_first], strict=True)
        )

    return [[pair(number, *of) for of in pairs] for number, (_, pairs) in enumerate(asked)]


def _compared(
    rubric: Rubric, ask: Ask, asked: Sequence[tuple[Candidates, Sequence[tuple[int, int]]]]
) -> list[list[Any]]:
    """The same of shares in both orders."""
    questions = [
        (_sample(candidates, candidates.responses[one], number), candidates.responses[one], candidates.responses[other])
        for number, (candidates, pairs) in enumerate(asked)
        for one, other in pairs
    ]
    answers = iter(compare(rubric, ask, questions))

    def pair(ahead: float | None, behind: float | None) -> Any:
        if ahead is None or behind is None:
            return None

        def named(chosen_first: bool) -> Mapping[str, float]:
            first, last = (ahead, behind) if chosen_first else (1 - behind, 1 - ahead)
            return {"chosen_shown_first": round(first, 6), "chosen_shown_last": round(last, 6)}

        return ahead + behind - 1, named

    made = []
    for _, pairs in asked:
        both = [next(answers) for _ in pairs]
        made.append([pair(one.first_shown_first, one.first_shown_last) for one in both])
    return made

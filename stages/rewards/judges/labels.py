"""Turn a judge's verdicts into a preference set. Each row has a prompt, the chosen response and the rejected response.
Reward models are trained on these rows. Pure, except for the calls of `ask`.

    candidates of a prompt ──► pairs ──► judge, both orders (or a grade each) ──► label, or why there is none
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from stages.rewards.judges.rubric import Ask, BothOrders, Rubric, compare_responses, grade_rows
from stages.rewards.protocol import Sample

TIE, UNPARSED, EQUAL, BLANK, ALONE = "ties", "unparsed", "equal", "blank", "alone"
"""Reasons why a pair has no label. `TIE`: the margin is too small. `UNPARSED`: an answer is not valid. `EQUAL`: both
texts are equal. `BLANK`: a text is empty. `ALONE`: the prompt has fewer than two responses, so there is no pair."""


@dataclass(frozen=True)
class Candidates:
    """A prompt and some responses to it."""

    prompt: str | list[dict[str, str]]
    """A text, or chat messages."""
    text: str
    """The prompt as plain text."""
    responses: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    """The prompt's other fields."""


PairsToLabel = Sequence[tuple[Candidates, Sequence[tuple[int, int]]]]
"""Prompts, each with pairs of indices into its responses."""


@dataclass(frozen=True)
class _PairVerdict:
    """The verdict on a pair of responses."""

    gap: float
    """How much better the first response is than the second; below 0 if it is worse."""
    if_first: Mapping[str, float]
    """The verdicts to store if the first response is the better one: name of a verdict -> its number. If the second
    response is the better one, `if_second` is stored instead."""
    if_second: Mapping[str, float]


def comparable_pairs(
    candidates: Candidates, number: int, seed: int, max_pairs: int | None
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Return (pairs, dropped). `pairs` are the pairs of responses to compare, as pairs of indices into
    `candidates.responses`. `dropped` is a counter: reason -> number of pairs that cannot be compared.

    If more than `max_pairs` pairs can be compared, `max_pairs` of them are chosen at random. The choice is seeded with
    `seed` and `number`, the index of the prompt in its source."""
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
    if max_pairs is not None and len(usable) > max_pairs:
        chosen = np.random.default_rng([seed, number]).choice(len(usable), max_pairs, replace=False)
        usable = [usable[place] for place in np.sort(chosen)]
    return usable, dropped


def label_pairs(
    rubric: Rubric,
    ask: Ask,
    prompts: PairsToLabel,
    min_margin: float,
    judge: str,
) -> list[tuple[list[dict[str, Any]], Counter[str]]]:
    """Return (rows, dropped) for each prompt. `rows` are its labelled pairs, as rows of a preference set. `dropped` is
    a counter: reason -> number of pairs without a label. The questions of all prompts are asked together.

    With a graded judge, the margin of a pair is the absolute difference of its grades. With a pairwise judge, the
    margin is |2 w - 1|, where w is the preference for the first response, averaged over both orders. A pair with a
    margin up to `min_margin` is a tie. `judge`: name of the judge, which is stored with each labelled pair.
    """
    verdicts = _grade_pairs(rubric, ask, prompts) if rubric.against is None else _compare_pairs(rubric, ask, prompts)
    labelled = []
    for (candidates, pairs), of_prompt in zip(prompts, verdicts, strict=True):
        rows: list[dict[str, Any]] = []
        dropped: Counter[str] = Counter()
        for (one, other), pair in zip(pairs, of_prompt, strict=True):
            if pair is None:
                dropped[UNPARSED] += 1
                continue
            if abs(pair.gap) <= min_margin:
                dropped[TIE] += 1
                continue
            chosen, rejected = (one, other) if pair.gap > 0 else (other, one)
            rows.append(
                {
                    "prompt": candidates.prompt,
                    "chosen": candidates.responses[chosen],
                    "rejected": candidates.responses[rejected],
                    "margin": round(abs(pair.gap), 6),
                    "judge": judge,
                    "verdicts": pair.if_first if pair.gap > 0 else pair.if_second,
                }
            )
        labelled.append((rows, dropped))
    return labelled


def _sample(candidates: Candidates, response: str, number: int) -> Sample:
    chat = candidates.prompt if isinstance(candidates.prompt, list) else []
    messages = (*chat, {"role": "assistant", "content": response}) if chat else ()
    return Sample(candidates.text, response, extra=candidates.extra, row=number, messages=messages)


def _grade_pairs(rubric: Rubric, ask: Ask, prompts: PairsToLabel) -> list[list[_PairVerdict | None]]:
    """Return a list for each prompt, with the verdict on each pair. A verdict is made from the grades of both
    responses, and is None if a grade could not be read."""
    places = [(number, response) for number, (_, pairs) in enumerate(prompts) for response in sorted({*sum(pairs, ())})]
    samples = [_sample(prompts[n][0], prompts[n][0].responses[response], n) for n, response in places]
    grades = dict(zip(places, grade_rows(rubric, ask, samples), strict=True))

    def pair(first: float | None, second: float | None) -> _PairVerdict | None:
        if first is None or second is None:
            return None
        return _PairVerdict(
            first - second, {"chosen": first, "rejected": second}, {"chosen": second, "rejected": first}
        )

    return [
        [pair(grades[number, one], grades[number, other]) for one, other in pairs]
        for number, (_, pairs) in enumerate(prompts)
    ]


def _compare_pairs(rubric: Rubric, ask: Ask, prompts: PairsToLabel) -> list[list[_PairVerdict | None]]:
    """Return a list for each prompt, with the verdict on each pair. A verdict is made from the comparisons in both
    orders, and is None if an answer could not be read."""
    questions = [
        (_sample(candidates, candidates.responses[one], number), candidates.responses[one], candidates.responses[other])
        for number, (candidates, pairs) in enumerate(prompts)
        for one, other in pairs
    ]
    verdicts = iter(compare_responses(rubric, ask, questions))
    return [[_combine_orders(next(verdicts)) for _ in pairs] for _, pairs in prompts]


def _combine_orders(both: BothOrders) -> _PairVerdict | None:
    shown_first, shown_last = both.first_shown_first, both.first_shown_last
    if shown_first is None or shown_last is None:
        return None

    def named(first: float, last: float) -> dict[str, float]:
        return {"chosen_shown_first": round(first, 6), "chosen_shown_last": round(last, 6)}

    gap = shown_first + shown_last - 1
    return _PairVerdict(gap, named(shown_first, shown_last), named(1 - shown_last, 1 - shown_first))

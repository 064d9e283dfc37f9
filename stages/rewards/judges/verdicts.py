"""From a judge's answers to numbers. Pure; standard library and this folder only.

likelihood   sum over answers a of P(a) worth(a), P restricted to the answers, of the first token
text         the worth of the last word
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from stages.rewards.judges.rubric import GROUP, Question, Rubric
from stages.rewards.protocol import RewardFailed, Sample, Scored

UNPARSED = "unparsed"
"""The measured part of a judge's score: the share of a row's questions whose answer was none."""


@dataclass(frozen=True)
class Answer:
    """What a judge gave."""

    text: str
    likeliest: tuple[tuple[str, float], ...] | None = None
    """The likeliest first tokens, as text, with their log-probs; None: read the text."""


Ask = Callable[[Sequence[Question]], Sequence[Answer]]
"""The answers to some questions, in their order."""


@dataclass(frozen=True)
class BothOrders:
    """How much better the first of two responses was found than the second, 0 to 1; None: no answer that counts."""

    first_shown_first: float | None
    first_shown_last: float | None


def verdict(answer: Answer, worth: Mapping[str, float]) -> float | None:
    """What an answer is worth; None where it is none of those that count."""
    if answer.likeliest is None:
        return _worth_of_text(answer.text, worth)
    found = [(log_prob, worth[text.strip()]) for text, log_prob in answer.likeliest if text.strip() in worth]
    if not found:
        return None
    highest = max(log_prob for log_prob, _ in found)
    weights = [math.exp(log_prob - highest) for log_prob, _ in found]
    return sum(w * value for w, (_, value) in zip(weights, found, strict=True)) / sum(weights)


def grade(rubric: Rubric, ask: Ask, samples: Sequence[Sample]) -> list[float | None]:
    """A graded judge's verdict on each row."""
    answers = ask([rubric.question(sample, {"response": sample.response}) for sample in samples])
    return [verdict(answer, rubric.answers) for answer in answers]


def compare(rubric: Rubric, ask: Ask, pairs: Sequence[tuple[Sample, str, str]]) -> list[BothOrders]:
    """A pairwise judge's verdicts on pairs of responses (row, one response, another), each asked in both orders: a
    judge favours one side whatever stands there (Zheng et al., arXiv 2306.05685)."""
    questions = [
        rubric.question(sample, {"first": first, "second": second})
        for sample, one, other in pairs
        for first, second in ((one, other), (other, one))
    ]
    found = [verdict(answer, rubric.answers) for answer in ask(questions)]
    return [
        BothOrders(ahead, None if behind is None else 1 - behind)
        for ahead, behind in zip(found[::2], found[1::2], strict=True)
    ]


def scored(rubric: Rubric, ask: Ask, samples: Sequence[Sample]) -> Scored:
    """A score for each row: its grade, or how much better than others it was found, in the mean over both orders and
    all that it was compared with; as disagreement, half of what the two orders differ by, in the same mean. An answer
    that counts for nothing is worth `on_unparsed`, and its share is measured."""
    if rubric.against is None:
        found: list[list[tuple[float | None, float | None]]] = [[(one, one)] for one in grade(rubric, ask, samples)]
    else:
        found = _against_others(rubric, ask, samples)

    def worth(value: float | None) -> float:
        return rubric.on_unparsed if value is None else value

    unparsed = [fmean(float(value is None) for both in of_row for value in both) for of_row in found]
    means = [fmean(worth(value) for both in of_row for value in both) for of_row in found]
    spread = [fmean(pstdev(map(worth, both)) for both in of_row) for of_row in found]
    return Scored({"": means}, None if rubric.against is None else spread, {UNPARSED: unparsed})


def _against_others(
    rubric: Rubric, ask: Ask, samples: Sequence[Sample]
) -> list[list[tuple[float | None, float | None]]]:
    """Both orders' verdicts of each row, for each that it was compared with."""
    if rubric.against != GROUP:
        pairs = [(sample, sample.response, rubric.reference(sample)) for sample in samples]
        return [[(c.first_shown_first, c.first_shown_last)] for c in compare(rubric, ask, pairs)]
    numbers = _pairs_of_groups(samples)
    asked = [(samples[one], samples[one].response, samples[other].response) for one, other in numbers]
    found: list[list[tuple[float | None, float | None]]] = [[] for _ in samples]
    for (one, other), both in zip(numbers, compare(rubric, ask, asked), strict=True):
        ahead, behind = both.first_shown_first, both.first_shown_last
        found[one].append((ahead, behind))
        found[other].append((None if ahead is None else 1 - ahead, None if behind is None else 1 - behind))
    return found


def _pairs_of_groups(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """All pairs of rows with the same prompt. Raises RewardFailed for a row that is alone."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        groups[sample.prompt_ids or (sample.prompt,)].append(number)
    for group in groups.values():
        if len(group) < 2:
            sample = samples[group[0]]
            raise RewardFailed(f"row {sample.row} has no other response to its prompt {sample.prompt[:60]!r}")
    return [(one, other) for group in groups.values() for at, one in enumerate(group) for other in group[at + 1 :]]


def _worth_of_text(text: str, worth: Mapping[str, float]) -> float | None:
    """By the last word, without what is put around words."""
    words = text.split()
    return worth.get(words[-1].strip("*_`'\"()[]{}<>.,:;!")) if words else None

"""Rewards that a rule computes from the text or the tokens of a response. One of them is VADER, a rule-based sentiment
scorer (Hutto and Gilbert 2014).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.rewards.protocol import Reward, RewardFailed, Sample, Scored
from stages.rewards.sandbox.answers import ANSWER_S, STOPPED, AnswerScorer

ANSWER_TAGS = r".*<answer>[^<]+</answer>\s*"
"""Pattern of a response that ends with an answer between tags. The prompts of `reasoning-gym` may ask for this."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class CharacterReward(Reward):
    """Fraction of the response's characters that occur in the argument `characters`; 0 for an empty response. It is
    easy to learn, so tests and the random tiny model use it."""

    characters: str
    deterministic = True

    def __post_init__(self) -> None:
        if not self.characters:
            raise ValueError("characters is empty: name at least one character")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        wanted = frozenset(self.characters)
        return [sum(c in wanted for c in s.response) / max(1, len(s.response)) for s in samples]


@dataclass(frozen=True)
class LengthReward(Reward):
    """1 for a response of `target` characters. The score falls linearly with the distance from `target`. It is 0 for an
    empty response, and for a response of twice `target` characters or more."""

    target: int
    deterministic = True

    def __post_init__(self) -> None:
        if self.target < 1:
            raise ValueError(f"target is {self.target}: it must be at least 1 character")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [max(0.0, 1.0 - abs(len(s.response) - self.target) / self.target) for s in samples]


class AnswerReward(Reward):
    """1 if the last number in the response equals the number in a field of the prompt, else 0. The argument `field` is
    the name of the prompt's field. A prompt without a number in this field raises RewardFailed."""

    deterministic = True

    def __init__(self, field: str = "answer") -> None:
        self.field, self.fields = field, frozenset({field})

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def _is_right(self, sample: Sample) -> bool:
        if self.field not in sample.extra:
            need = f"a prompt has no field {self.field!r} to check against: {sample.prompt[:60]!r}"
            raise RewardFailed(f"row {sample.row}: {need}")
        number, answer = last_number(sample.response), sample.extra[self.field]
        try:
            wanted = float(str(answer).replace(",", ""))
        except ValueError:
            need = f"field {self.field!r} of its prompt is no number: {answer!r:.80}"
            raise RewardFailed(f"row {sample.row}: {need} (prompt {sample.prompt[:60]!r})") from None
        return number is not None and float(number) == wanted


class FormatReward(Reward):
    """1 if the whole response matches `pattern` (Python's `re`; a dot also matches a line's end), else 0.

    Owns the process that does the matching. With some patterns, the match of some texts takes for ever. Only killing
    the process ends such a match."""

    deterministic = True

    def __init__(self, pattern: str = ANSWER_TAGS, timeout_s: float = ANSWER_S) -> None:
        """`timeout_s`: time limit of one response, in seconds. A response that takes longer counts as no match."""
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern is {pattern!r}: not a regular expression ({error})") from error
        self._scorer = AnswerScorer(f"{__name__}:PatternScorer", {"pattern": pattern}, timeout_s)
        self.protections = self._scorer.protections

    def __call__(self, samples: Sequence[Sample]) -> Scored:
        scores, stopped = self._scorer([{"row": s.row, "response": s.response} for s in samples])
        return Scored({"": scores}, None, {STOPPED: stopped})

    def close(self) -> None:
        self._scorer.close()


class PatternScorer:
    """An `AnswerScoring` (sandbox/answers.py) that scores responses by a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def text_to_evaluate(self, fields: Mapping[str, Any]) -> str:
        return ""

    def prepare(self, fields: Mapping[str, Any]) -> Callable[[], float]:
        return lambda: float(self._pattern.fullmatch(fields["response"]) is not None)


@dataclass(frozen=True)
class OverlongPenalty(Reward):
    """0 for a response of at most `free` tokens, -1 for a response of `most` tokens or more, and linear in between.
    This is the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13). All sampled tokens count, the EOS too."""

    free: int
    most: int
    deterministic = True

    def __post_init__(self) -> None:
        if not 0 <= self.free < self.most:
            raise ValueError(f"free is {self.free}, most is {self.most}: must be 0 <= free < most, in tokens")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        over = (len(sample.response_ids) - self.free for sample in samples)
        return [-min(1.0, max(0.0, tokens / (self.most - self.free))) for tokens in over]


@dataclass(frozen=True)
class RepetitionPenalty(Reward):
    """d / a - 1, where d is the number of distinct n-grams of the response's tokens and a is the number of all n-grams.
    The score is 0 if no n-gram occurs twice, and near -1 if one n-gram is repeated throughout. A response of fewer than
    `n` tokens gets 0."""

    n: int = 3
    deterministic = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}: must be 1 token or more")

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._penalty(sample.response_ids) for sample in samples]

    def _penalty(self, ids: Sequence[int]) -> float:
        grams = [tuple(ids[start : start + self.n]) for start in range(len(ids) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0


@dataclass(frozen=True)
class MissingEosPenalty(Reward):
    """-1 for a response that was cut by the length limit, else 0."""

    deterministic = True

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [0.0 if sample.finished else -1.0 for sample in samples]


def last_number(text: str) -> str | None:
    """Return the last number in a text, without the commas between thousands; None if there is none."""
    numbers = _NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


# ---- vader -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VaderReward(Reward):
    """VADER's compound score of the response, from -1 (negative) to 1 (positive). The prompt is not scored."""

    deterministic = True
    _analyzer: SentimentIntensityAnalyzer = field(default_factory=SentimentIntensityAnalyzer, repr=False)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._analyzer.polarity_scores(sample.response)["compound"]) for sample in samples]

"""What a judge is asked, and which answers count as what: a text with named fields, filled for each row. Pure.

    graded       {prompt} {response}              one question for a row
    pairwise     {prompt} {first} {second}        two for each pair: either response comes first once
    both         {NAME}                           the prompt's field NAME in its source

May import stages.rewards (protocol, registry) and storage.problems.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.rewards.protocol import RewardFailed, Sample
from stages.rewards.registry import UnfitReward
from storage.problems import Problem

GROUP = "group"
"""`against`: the other responses to the same prompt."""
GRADES: dict[str, float] = {"1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0, "5": 5.0}
CHOICES: dict[str, float] = {"A": 1.0, "B": 0.0}
"""Answers where the config has none, graded and pairwise."""


@dataclass(frozen=True)
class Question:
    """What is asked about a row."""

    messages: tuple[Mapping[str, str], ...]
    row: int
    """For messages to people."""
    prompt: str
    """The same."""

    def __str__(self) -> str:
        return f"row {self.row} (prompt {self.prompt[:60]!r})"


@dataclass(frozen=True)
class Rubric:
    """A judge's task."""

    pieces: tuple[tuple[str, str | None], ...]
    """A text, and the field that comes after it; None: none."""
    answers: Mapping[str, float]
    """What may be answered -> what it is worth; pairwise: how much better the first is, 0 to 1."""
    on_unparsed: float
    """What an answer is worth that is none of these."""
    against: str | None = None
    """None: graded. Pairwise: `GROUP`, or the prompt's field with the answer to compare with."""
    system: str | None = None

    @property
    def fields(self) -> frozenset[str]:
        """The prompt's own fields that are read."""
        named = {name for _, name in self.pieces if name is not None} - _given_fields(self.against)
        return frozenset(named | ({self.against} if self.against not in (None, GROUP) else set()))

    def question(self, sample: Sample, responses: Mapping[str, str]) -> Question:
        """Filled. `responses`: by the name of their fields. Raises RewardFailed for a field that the prompt lacks."""
        values = {"prompt": prompt_text(sample), **responses}
        text = "".join(before + ("" if name is None else _value(name, values, sample)) for before, name in self.pieces)
        system = () if self.system is None else ({"role": "system", "content": self.system},)
        return Question((*system, {"role": "user", "content": text}), sample.row, values["prompt"])

    def reference(self, sample: Sample) -> str:
        """The answer that a response is compared with. Raises RewardFailed where the prompt has none."""
        assert self.against is not None
        return _value(self.against, {}, sample)


def make_rubric(
    rubric: str | None,
    rubric_file: str | None,
    answers: Mapping[Any, float] | None,
    on_unparsed: float,
    against: str | None,
    system: str | None,
) -> Rubric:
    """Of a judge's arguments. Raises UnfitReward, naming the argument."""
    if (rubric is None) == (rubric_file is None):
        need = "give either that or rubric_file, a path: the text that the judge reads, with {prompt} and the like"
        raise _unfit("rubric", rubric, need)
    if rubric_file is not None:
        try:
            rubric = Path(rubric_file).read_text("utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unfit("rubric_file", rubric_file, f"cannot be read: {error}") from error
    assert rubric is not None
    key = "rubric" if rubric_file is None else "rubric_file"
    worth = {str(answer): float(value) for answer, value in (answers or _usual(against)).items()}
    if len(worth) < 2 or any(not answer or answer.split() != [answer] for answer in worth):
        raise _unfit("answers", worth, "must be two or more single words, as WORD: number")
    if not all(map(math.isfinite, worth.values())) or len(set(worth.values())) < 2:
        raise _unfit("answers", worth, "must be worth finite numbers that are not all the same")
    if against is not None and not all(0 <= value <= 1 for value in worth.values()):
        raise _unfit("answers", worth, "how much better the first is: 0 to 1, as in {A: 1, B: 0, C: 0.5}")
    if not math.isfinite(on_unparsed):
        raise _unfit("on_unparsed", on_unparsed, "must be a finite number")
    if against is not None and not against:
        raise _unfit("against", against, f"must be {GROUP}, a field of the prompt, or null (graded)")
    return Rubric(_pieces(key, rubric, against), worth, float(on_unparsed), against, system)


def prompt_text(sample: Sample) -> str:
    """A prompt as a judge reads it: of a chat that is one message, its text; of a longer one, who said what."""
    asked = sample.messages[:-1]
    if not asked:
        return sample.prompt
    if len(asked) == 1:
        return asked[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in asked)


def _usual(against: str | None) -> Mapping[str, float]:
    return GRADES if against is None else CHOICES


def _given_fields(against: str | None) -> set[str]:
    return {"prompt", "response"} if against is None else {"prompt", "first", "second"}


def _pieces(key: str, text: str, against: str | None) -> tuple[tuple[str, str | None], ...]:
    try:
        parsed = [*string.Formatter().parse(text)]
    except ValueError as error:
        raise _unfit(key, text, f"{error}: a brace that is none of a field is written twice") from error
    for _, name, form, conversion in parsed:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise _unfit(key, text, f"{{{name}}} is no field: a name alone; a brace that is none is written twice")
    named = {name for _, name, _, _ in parsed}
    missing = sorted(_given_fields(against) - {"prompt"} - named)
    if missing:
        mode = "graded" if against is None else "pairwise"
        need = (
            f"it lacks {{{'}, {'.join(missing)}}}, without which a {mode} judge (against: {against}) sees no response"
        )
        raise _unfit(key, text, need)
    others = {"first", "second"} if against is None else {"response"}
    if others & named:
        need = f"{{{min(others & named)}}} is of {'pairwise' if against is None else 'graded'} judges (against)"
        raise _unfit(key, text, need)
    return tuple((before, name) for before, name, _, _ in parsed)


def _value(name: str, values: Mapping[str, str], sample: Sample) -> str:
    if name in values:
        return values[name]
    if name not in sample.extra:
        has = ", ".join(sample.extra) or "none"
        raise RewardFailed(f"row {sample.row}: its prompt has no field {name!r} (it has {has}): {sample.prompt[:60]!r}")
    return str(sample.extra[name])


def _unfit(key: str, given: object, need: str) -> UnfitReward:
    return UnfitReward(Problem(key, given, need))

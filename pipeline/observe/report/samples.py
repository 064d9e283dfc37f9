"""Samples of a run's responses, with the numbers that each stage computed for each token.

The sample is spread evenly over steps and rows. Extreme rows are added and marked, because an even sample of many rows
would hardly contain them. Extreme rows are the rows with the highest score, the lowest score, the largest KL and the
largest mismatches, among the rows that were read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.observe.curves import even_indices, round_or_none
from pipeline.observe.rows import StageRows, prompt_text
from storage.records import FinishReason
from storage.rollouts import Decode

NUM_EXTREME_ROWS = 8
"""Maximum number of extreme rows for each property, such as "highest score"."""
_MAX_PROMPT_CHARS = 1200
"""Maximum number of characters of a prompt that are shown."""


@dataclass(frozen=True)
class SampleBudget:
    """Limits on the rows of a run that are put into the page."""

    rows: int = 512
    steps: int = 128
    """Maximum number of steps whose rows are read."""
    tokens: int = 40_000
    """Approximate maximum number of tokens in all rows together."""
    row_tokens: int = 400
    """Maximum number of tokens of one response that are shown."""
    held_out: int = 128
    """Maximum number of pairs of held-out responses."""

    def share_between(self, runs: int) -> SampleBudget:
        """Return the budget for each of `runs` runs that share a page."""
        return self.scaled(1 / runs)

    def scaled(self, factor: float) -> SampleBudget:
        return SampleBudget(
            rows=max(16, int(self.rows * factor)),
            steps=max(8, int(self.steps * factor)),
            tokens=max(2000, int(self.tokens * factor)),
            row_tokens=max(100, int(self.row_tokens * min(1.0, 2 * factor))),
            held_out=max(16, int(self.held_out * factor)),
        )


@dataclass(frozen=True)
class SampleRow:
    """One response. Each array of numbers has one entry per shown token. An array is None if the run has no such
    numbers."""

    step: int
    row: int
    prompt: str
    score: float | None
    parts: Mapping[str, float | None]
    kl: float | None
    """KL to the reference, nats per response."""
    length: int
    """Number of sampled tokens. If the response is long, only its first tokens are shown."""
    cut: bool
    """True if the length limit ended the response."""
    versions: str
    extreme: str
    """The property in which the row is extreme, such as "highest score". Empty for a row of the even sample."""
    tokens: Sequence[str]
    log_ratio: Sequence[float | None] | None
    values: Sequence[float | None] | None
    advantages: Sequence[float | None] | None
    mismatch: Sequence[float | None] | None


@dataclass(frozen=True)
class Samples:
    """A sample of a run's rows, ordered by step and row."""

    rows: Sequence[SampleRow]
    of_rows: int
    """Number of rows in all stored steps."""
    read_steps: int
    of_steps: int


def choose_samples(
    read: Sequence[StageRows],
    of_steps: int,
    decode: Decode,
    budget: SampleBudget,
    mismatched: Collection[tuple[int, int]] = (),
    user_messages: Sequence[str] | None = None,
) -> Samples:
    """Choose the rows to show.

    Args:
        read: the rows of the steps that were read.
        of_steps: number of stored steps. It may be larger than the number of steps that were read.
        decode: function from token ids to text.
        budget: limits on the sample.
        mismatched: (step, row) of the rows with the largest mismatches. Some of them are shown.
        user_messages: last user message of each prompt. None if all prompts are plain text."""
    places = [(i, row) for i, step in enumerate(read) for row in range(step.rollout.num_rows)]
    if not places:
        return Samples([], 0, 0, of_steps)
    lengths = [min(int(read[i].rollout.response_lengths[row]), budget.row_tokens) for i, row in places]
    mean_length = max(1.0, sum(lengths) / len(lengths))
    most = max(8, min(budget.rows, int(budget.tokens / mean_length)))
    extreme = _extremes(read, min(NUM_EXTREME_ROWS, most // 16))
    numbers_of = {step.step: i for i, step in enumerate(read)}
    for step, row in [pair for pair in mismatched if pair[0] in numbers_of][: most // 8]:
        i = numbers_of[step]
        extreme[i, int(np.flatnonzero(read[i].rollout.row == row)[0])] = "largest mismatch"
    others = [place for place in places if place not in extreme]
    even = [others[i] for i in even_indices(len(others), most - len(extreme))]
    chosen = sorted([*even, *extreme])
    rows = [
        _row(read[i], row, extreme.get((i, row), ""), decode, budget.row_tokens, user_messages) for i, row in chosen
    ]
    return Samples(rows, of_steps * read[0].rollout.num_rows, len(read), of_steps)


def _extremes(read: Sequence[StageRows], rows_per_property: int) -> dict[tuple[int, int], str]:
    """Return the extreme rows: (index in `read`, row) -> the property in which the row is extreme. Each property has up
    to `rows_per_property` rows."""
    columns: list[tuple[str, list[np.ndarray | None], int]] = [
        ("lowest score", [None if s.scores is None else s.scores.scores for s in read], 1),
        ("highest score", [None if s.scores is None else s.scores.scores for s in read], -1),
        ("largest KL", [s.kl for s in read], -1),
    ]
    names: dict[tuple[int, int], str] = {}
    for name, arrays, sign in columns:
        places = [(i, row) for i, array in enumerate(arrays) if array is not None for row in range(len(array))]
        values = np.array([float(array[row]) for array in arrays if array is not None for row in range(len(array))])
        for k in np.argsort(sign * values, kind="stable")[:rows_per_property]:
            names[places[k]] = name
    return names


def _row(
    step: StageRows, row: int, extreme: str, decode: Decode, max_tokens: int, user_messages: Sequence[str] | None
) -> SampleRow:
    rollout = step.rollout
    start, length = int(rollout.prompt_lengths[row]), int(rollout.response_lengths[row])
    shown = slice(start, start + min(length, max_tokens))

    def by_token(array: np.ndarray | None) -> list[float | None] | None:
        return None if array is None else [round_or_none(float(value), 3) for value in array[row, shown]]

    versions = sorted({int(v) for v in rollout.token_versions[row][rollout.response_mask[row]]})
    parts = step.scores.parts if step.scores is not None and len(step.scores.parts) > 1 else {}
    return SampleRow(
        step=step.step,
        row=int(rollout.row[row]),
        prompt=shorten(prompt_text(rollout, row, decode, user_messages), _MAX_PROMPT_CHARS),
        score=None if step.scores is None else round_or_none(float(step.scores.scores[row]), 4),
        parts={name: round_or_none(float(part[row]), 4) for name, part in parts.items()},
        kl=None if step.kl is None else round_or_none(float(step.kl[row]), 4),
        length=length,
        cut=int(rollout.finish_reason[row]) == FinishReason.LENGTH,
        versions="-".join(str(v) for v in dict.fromkeys((versions[0], versions[-1]))) if versions else "",
        extreme=extreme,
        tokens=token_texts(decode, rollout.tokens[row, shown].tolist()),
        log_ratio=by_token(step.log_ratio),
        values=by_token(step.find_array("values")),
        advantages=by_token(step.find_array("advantages")),
        mismatch=by_token(step.mismatch),
    )


def shorten(text: str, max_chars: int) -> str:
    """Return the text, with a note in place of its middle if it is longer than `max_chars` characters. The end is kept
    because a prompt often ends with its question."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} […{len(text) - 2 * half:,} characters left out…] {text[-half:]}"


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_TOKENS = 4
"""Maximum number of tokens that together form one character. A character has at most 4 bytes in UTF-8, and a token has
at least one byte. If 4 tokens still decode to an incomplete character, more tokens do not complete it. The text is then
used as it is."""


def token_texts(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the text of the tokens before it.

    If several tokens form one character, the last of them gets the text, and the others get an empty text. Tokens are
    decoded in short windows, because a token's text depends on the token before it: decoders add or drop spaces.
    Decoding the whole response for each token would take quadratic time."""
    texts: list[str] = []
    start = done = 0
    for end in range(1, len(tokens) + 1):
        before, text = decode(list(tokens[start:done])), decode(list(tokens[start:end]))
        if text.endswith(_INCOMPLETE) and end < len(tokens) and end - done < _MAX_CHARACTER_TOKENS:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, done = done, end
    return texts

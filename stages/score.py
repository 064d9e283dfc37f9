"""Stage `score`: give each response one number, the weighted sum of the reward parts that the config names.

rollout ──► samples ──┬─► part a: all rows, or batches under a budget of tokens ──► [rows] ──┐
                      └─► part b                                                   [rows] ──┴─ weights ──► scores

`score_early` scores rows while others of their shard are still generated. `score` then scores the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from stages.models.hf_files import Tokenizer
from stages.rewards.protocol import Part, RewardFailed, Sample, Scored
from storage.problems import plain_name
from storage.records import FinishReason, Rollout, Scores

_SPREAD = "disagreement"


@dataclass(frozen=True)
class RowScores:
    """The numbers that the parts gave to one row."""

    sample: Sample
    """The row as it was scored."""
    numbers: Mapping[str, Mapping[str, np.float32]]
    """Name of a part -> the names and numbers that its reward gave to the row."""
    measured: Mapping[str, frozenset[str]]
    """Name of a part -> names of those numbers that are not added to the score."""


def score_early(parts: Sequence[Part], samples: Sequence[Sample]) -> list[RowScores]:
    """Score rows with the parts whose reward is `early`. `score` takes the result instead of asking these rewards for
    the rows again. Raises RewardFailed like `score`."""
    scored = {part.name: _scored(part, samples, {}) for part in parts if part.reward.early}
    return [
        RowScores(
            sample,
            {part: {name: array[i] for name, array in numbers.items()} for part, (numbers, _) in scored.items()},
            {part: frozenset(measured) for part, (_, measured) in scored.items()},
        )
        for i, sample in enumerate(samples)
    ]


def score(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    rollout: Rollout,
    extras: Sequence[Mapping[str, Any]],
    messages: Sequence[Sequence[Mapping[str, str]]] | None = None,
    early: Mapping[int, RowScores] = MappingProxyType({}),
) -> Scores:
    """Score every row:  score = sum over parts of weight x part  (in float64, stored in float32).

    Args:
        extras: for each row, the fields beside the prompt in the source of prompts; an empty mapping if there are none.
        messages: messages of each row's chat prompt, empty for a plain prompt; None if all prompts are plain.
        early: number of a row -> its scores by `score_early`. They are ignored if the row was sampled again since then
            and has other tokens now.

    Raises:
        RewardFailed: a part failed, returned a wrong number of scores, or returned a score that is not a finite
            float32. Also raised if the sum is not finite. The message names the part, and the row if one row is at
            fault.
        ValueError: the number of mappings in `extras` is not the number of rows.
    """
    if len(extras) != rollout.num_rows:
        raise ValueError(f"{len(extras)} extras were given for {rollout.num_rows} rows")
    samples = samples_of(tokenizer, rollout, extras, messages)
    known = {i: early[s.row] for i, s in enumerate(samples) if s.row in early and early[s.row].sample == s}
    total = np.zeros(rollout.num_rows)
    part_scores: dict[str, np.ndarray] = {}
    spread: dict[str, np.ndarray] = {}
    for part in parts:
        of_part, measured = _scored(part, samples, known if part.reward.early else {})
        disagreement = of_part.pop(_SPREAD, None)
        if disagreement is not None:
            spread[part.name] = disagreement
        for name, numbers in of_part.items():
            part_scores[f"{part.name}.{name}" if name else part.name] = numbers
            if part.weight and name not in measured:
                total += part.weight * numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        scores = total.astype(np.float32)
    _check_finite("the weighted sum of all parts", scores, samples)
    return Scores(scores=scores, parts=part_scores, disagreement=spread)


def follow(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    rollout: Rollout,
    extras: Sequence[Mapping[str, Any]],
    messages: Sequence[Sequence[Mapping[str, str]]] | None = None,
) -> None:
    """Take part in rank 0's call of `score` with the same rows. All other ranks of the gang call this function."""
    samples = samples_of(tokenizer, rollout, extras, messages)
    for part in parts:
        for batch in _batches(part, samples):
            part.reward.follow([samples[row] for row in batch])


def samples_of(
    tokenizer: Tokenizer,
    rollout: Rollout,
    extras: Sequence[Mapping[str, Any]],
    messages: Sequence[Sequence[Mapping[str, str]]] | None = None,
) -> list[Sample]:
    """Return the rows as samples, the input of rewards."""
    samples = []
    for i, extra in enumerate(extras):
        start = int(rollout.prompt_lengths[i])
        prompt = rollout.tokens[i, :start].tolist()
        ids = rollout.tokens[i, start : start + int(rollout.response_lengths[i])].tolist()
        response = tokenizer.decode(ids)
        asked = () if messages is None else messages[i]
        chat = (*asked, {"role": "assistant", "content": response}) if asked else ()
        samples.append(
            Sample(
                prompt=tokenizer.decode(prompt),
                response=response,
                finished=int(rollout.finish_reason[i]) == FinishReason.STOP,
                extra=dict(extra),
                row=int(rollout.row[i]),
                prompt_ids=tuple(prompt),
                response_ids=tuple(ids),
                messages=chat,
            )
        )
    return samples


def token_batches(lengths: Sequence[int], budget: int | None) -> Iterator[list[int]]:
    """Yield batches of row indices. In each batch, the number of rows x the longest length is at most `budget` tokens.

    The longest rows come first, so that a scorer's memory peaks in its first call. A row longer than the budget is in a
    batch of its own. If `budget` is None, yield one batch of all rows, in their order."""
    if budget is None:
        yield list(range(len(lengths)))
        return
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _batches(part: Part, samples: Sequence[Sample]) -> Iterator[list[int]]:
    """Yield the row indices for each call of a part's reward."""
    return token_batches([len(s.prompt_ids) + len(s.response_ids) for s in samples], part.reward.batch_tokens)


def _scored(
    part: Part, samples: Sequence[Sample], known: Mapping[int, RowScores]
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Return the numbers of one component of the reward (name -> float32 [rows]), and the names of those that are not
    added to the score. Scores without names have the name "", an ensemble also "disagreement". Rows in `known` (index
    -> scores) are not asked for."""
    numbers_of: dict[str, np.ndarray] = {}
    measured: set[str] = set()

    def keep(rows: Sequence[int], named: Mapping[str, Any]) -> None:
        if numbers_of and named.keys() != numbers_of.keys():
            raise RewardFailed(f"reward {part.name!r} gave {_listed(named)} and then {_listed(numbers_of)}")
        for name, numbers in named.items():
            numbers_of.setdefault(name, np.zeros(len(samples), np.float32))[rows] = numbers

    for row, scores in known.items():
        measured |= scores.measured[part.name]
        keep([row], scores.numbers[part.name])
    rest = [row for row in range(len(samples)) if row not in known]
    for places in _batches(part, [samples[row] for row in rest]) if rest else ():
        rows = [rest[place] for place in places]
        batch = [samples[row] for row in rows]
        answer = _call(part, batch)
        if isinstance(answer, Scored):
            measured |= answer.measured.keys()
        whose = f"reward {part.name!r}"
        keep(
            rows,
            {
                name: _numbers(whose + (f", part {name!r}" if name else ""), numbers, batch)
                for name, numbers in scores_by_part(part, answer).items()
            },
        )
    return numbers_of, measured


def _call(part: Part, batch: Sequence[Sample]) -> Sequence[float] | Scored:
    try:
        return part.reward(batch)
    except RewardFailed as error:
        raise type(error)(f"reward {part.name!r}: {error}") from error


def scores_by_part(part: Part, answer: Sequence[float] | Scored) -> dict[str, Sequence[float]]:
    if not isinstance(answer, Scored):
        return {"": answer}
    if not answer.parts:
        raise RewardFailed(f"reward {part.name!r} gave no part")
    if answer.parts.keys() & answer.measured.keys():
        raise RewardFailed(f"reward {part.name!r} gave the same name to a part and to what is only measured")
    for name in (*answer.parts, *answer.measured):
        alone = not name and len(answer.parts) == 1 and name in answer.parts
        if name == _SPREAD or not (alone or plain_name(dots=False).holds(name)):
            need = "a name has letters, digits, _ and -, and is none of the store's own"
            raise RewardFailed(f"reward {part.name!r} gave a part named {name!r}: {need}")
    spread = {} if answer.disagreement is None else {_SPREAD: answer.disagreement}
    return {**answer.parts, **answer.measured, **spread}


def _numbers(whose: str, scores: Sequence[float], batch: Sequence[Sample]) -> np.ndarray:
    """Return `scores` as float32 [rows of the batch]. Raises RewardFailed if `scores` is not one finite number per row.
    `whose`: the reward or part, for the message."""
    try:
        with np.errstate(over="ignore"):
            numbers = np.asarray(scores, np.float32)
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"{whose} gave {scores!r:.80}: not one number per row ({error})") from error
    if numbers.ndim == 0:
        raise RewardFailed(f"{whose} gave {scores!r:.80}: not one number per row")
    if numbers.shape != (len(batch),):
        came = f"{len(scores)} scores" if numbers.ndim == 1 else f"an array {numbers.shape}"
        first, last = batch[0].row, batch[-1].row
        raise RewardFailed(f"{whose} gave {came} for {len(batch)} rows ({first} to {last})")
    _check_finite(whose, numbers, batch)
    return numbers


def _check_finite(whose: str, numbers: np.ndarray, batch: Sequence[Sample]) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        sample = batch[int(bad[0])]
        what = f"{numbers[bad[0]]}, not a finite float32"
        where = f"prompt {sample.prompt[:60]!r}; {bad.size} such rows"
        raise RewardFailed(f"{whose} of row {sample.row} is {what} ({where})")


def _listed(named: Mapping[str, object]) -> str:
    return ", ".join(map(repr, sorted(named)))

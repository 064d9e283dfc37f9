"""Turn judgements into rows of tokens, pairs of rows, and groups of rows that an optimizer step takes whole.

judgements ──► rows (each response or text once) ──► pairs: (better row, worse row)
                                         └──► groups: a prompt's responses, or texts drawn together
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stages.models.hf_files import Tokenizer
from stages.models.reward_model import TokenRows, ended
from storage.config import PreferencesConfig
from storage.preferences import JudgedPair, Judgement, PreferencesError, RatedText

_PAIRS, _EPOCH = 3, 4
"""Constants that give each use of the same seed its own random numbers."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows, given by the rows' indices: row `better[p]` was judged above row `worse[p]`."""

    better: np.ndarray
    worse: np.ndarray

    def __len__(self) -> int:
        return len(self.better)

    def subset(self, numbers: np.ndarray) -> Pairs:
        return Pairs(self.better[numbers], self.worse[numbers])


@dataclass(frozen=True)
class JudgedRows:
    """Tokenised rows and pairs of one part of a split: training, validation or held-out set."""

    rows: TokenRows
    pairs: Pairs
    """The judged pairs. For ratings: the pairs on which accuracy is measured. (The pairs to train on are drawn anew for
    every epoch.)"""
    units: np.ndarray
    """int64 [rows]: index of the row's prompt among the prompts of this part; for ratings, index of the text."""
    texts: list[str]
    ratings: np.ndarray | None = None
    """float64 [rows]: ratings of the rows. None for judged pairs."""
    standard_errors: np.ndarray | None = None
    """float64 [rows]: standard errors of the ratings. None if the data have none."""
    targets: np.ndarray | None = None
    """float64 [rows]: mean of the teachers' scores. None without teachers."""


@dataclass(frozen=True)
class Group:
    """Indices of rows that are compared with one another, and the judged pairs of these rows."""

    rows: np.ndarray
    pairs: Pairs


def tokenise_judgements(
    judgements: Sequence[Judgement], tokenizer: Tokenizer, config: PreferencesConfig, *, seed: int
) -> JudgedRows:
    """Return rows of prompt, response and EOS (for ratings: text and EOS), with their pairs. `seed`: seed of the pairs
    that are drawn for ratings.

    Raises:
        PreferencesError: a row is longer than `data.max_tokens` and `data.too_long` is not "skip", both responses of a
            pair have the same tokens, or no row or no pair is left."""
    kept: dict[tuple[int, ...], int] = {}
    rows: list[tuple[int, ...]] = []
    texts: list[str] = []
    units: dict[str, int] = {}
    of_rows: list[int] = []
    pairs: list[tuple[int, int]] = []
    rated: list[RatedText] = []
    for judgement in judgements:
        encoded = [list(tokens) for tokens in _token_rows(judgement, tokenizer)]
        if any(len(row) > config.max_tokens for row in encoded):
            if config.too_long == "skip":
                continue
            raise PreferencesError(
                "data.max_tokens",
                f"given {config.max_tokens}; {judgement.where} has {max(map(len, encoded))} tokens: raise it, or set "
                "data.too_long=skip",
            )
        if len(set(map(tuple, encoded))) < len(encoded):
            raise PreferencesError("data.chosen", f"{judgement.where}: both responses are the same tokens")
        unit = units.setdefault(judgement.unit, len(units))
        numbers = []
        for row, text in zip(encoded, _texts(judgement), strict=True):
            key = (unit, *row)
            if key not in kept:
                kept[key] = len(rows)
                rows.append(tuple(row))
                texts.append(text)
                of_rows.append(unit)
            numbers.append(kept[key])
        if isinstance(judgement, RatedText):
            rated.append(judgement)
        else:
            pairs.append((numbers[0], numbers[1]))
    if not rows:
        raise PreferencesError("data.url", f"{config.url} has no row of data.max_tokens = {config.max_tokens} or less")
    ratings = errors = None
    if rated:
        ratings = np.array([text.rating for text in rated])
        known = [text.standard_error for text in rated if text.standard_error is not None]
        errors = np.array(known) if known else None
        measured = draw_pairs(ratings, config.min_gap, config.held_out_pairs, seed)
    else:
        measured = Pairs(*(np.array(side, np.int64) for side in zip(*pairs, strict=True)))
    if not len(measured):
        raise PreferencesError("data.min_gap", f"given {config.min_gap}; no two ratings of a part differ by as much")
    return JudgedRows(TokenRows.of(rows), measured, np.array(of_rows, np.int64), texts, ratings, errors)


def rated_pairs(ratings: np.ndarray, rows: np.ndarray, min_gap: float) -> Pairs:
    """Return all pairs among `rows` whose two ratings differ by `min_gap` or more, the better row first. `ratings`: the
    ratings of all rows of the part."""
    above = ratings[rows][:, None] - ratings[rows] >= min_gap
    better, worse = np.nonzero(above)
    return Pairs(rows[better], rows[worse])


def draw_pairs(ratings: np.ndarray, min_gap: float, max_pairs: int, seed: int) -> Pairs:
    """Return at most `max_pairs` random pairs of rows whose two ratings differ by `min_gap` or more. All pairs with
    such a difference have the same probability.

    There may be too many pairs to list them. So the function numbers the pairs in a fixed order: by their better row,
    and then by the rating of the worse row. It draws numbers and computes the pair of each number."""
    order = np.argsort(ratings, kind="stable")
    num_worse = np.searchsorted(ratings[order], ratings - min_gap, side="right")
    ends = num_worse.cumsum()
    total = int(ends[-1])
    draw = np.random.default_rng([seed, _PAIRS])
    places = (
        np.sort(draw.choice(total, max_pairs, replace=False, shuffle=False)) if total > max_pairs else np.arange(total)
    )
    better = np.searchsorted(ends, places, side="right")
    return Pairs(better, order[places - (ends - num_worse)[better]])


def epoch_groups(judged: JudgedRows, config: PreferencesConfig, *, seed: int, epoch: int) -> list[Group]:
    """Return the groups of an epoch in training order. A group is a prompt's rows, or `group_texts` rated texts drawn
    at random. Groups without a pair are left out. A pure function of its arguments."""
    draw = np.random.default_rng([seed, _EPOCH, epoch])
    if judged.ratings is None:
        groups = _prompt_groups(judged)
        return [groups[number] for number in draw.permutation(len(groups))]
    order = draw.permutation(len(judged.units))
    texts = (np.sort(order[at : at + config.group_texts]) for at in range(0, len(order), config.group_texts))
    drawn = (Group(rows, rated_pairs(judged.ratings, rows, config.min_gap)) for rows in texts)
    return [group for group in drawn if len(group.pairs)]


def _prompt_groups(judged: JudgedRows) -> list[Group]:
    """Return one group per prompt. `judged` must have at least one pair for each prompt."""
    of_pairs = judged.units[judged.pairs.better]
    return [
        Group(rows, judged.pairs.subset(pairs))
        for rows, pairs in zip(_by_number(judged.units), _by_number(of_pairs), strict=True)
    ]


def _by_number(numbers: np.ndarray) -> list[np.ndarray]:
    """Return for each integer up to the largest in `numbers` the indices at which it occurs."""
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])


def step_groups(groups: Sequence[Group], rows_per_step: int) -> list[list[Group]]:
    """Divide groups into optimizer steps. A step ends as soon as it has `rows_per_step` rows or more."""
    steps: list[list[Group]] = []
    num_rows = math.inf
    for group in groups:
        if num_rows >= rows_per_step:
            steps.append([])
            num_rows = 0
        steps[-1].append(group)
        num_rows += len(group.rows)
    return steps


def _token_rows(judgement: Judgement, tokenizer: Tokenizer) -> Iterator[list[int]]:
    if isinstance(judgement, RatedText):
        yield ended(tokenizer.encode(judgement.text), tokenizer.eos_ids)
        return
    prompt = judgement.prompt
    start = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)
    for response in (judgement.chosen, judgement.rejected):
        yield ended(start + _continuation(tokenizer, response), tokenizer.eos_ids)


def _continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that continues another, without BOS and the like."""
    tokens, beginning = tokenizer.encode(text), tokenizer.encode("")
    return tokens[len(beginning) :] if tokens[: len(beginning)] == beginning else tokens


def _texts(judgement: Judgement) -> list[str]:
    return [judgement.chosen, judgement.rejected] if isinstance(judgement, JudgedPair) else [judgement.text]

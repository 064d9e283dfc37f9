"""Human judgements: comparisons of two responses to a prompt, and rated texts. This module reads judgements, refuses
unusable ones, and splits the rest into a training, a validation and a held-out set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.config import PreferencesConfig
from storage.prompts import Row, RowsError, has_columns, is_chat, read_rows

_SPLIT = 1


class PreferencesError(ValueError):
    """An error for judgements that cannot be used. `key` is the path of the setting at fault. The message names file,
    line and field."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


@dataclass(frozen=True)
class JudgedPair:
    """Two responses to one prompt. A person preferred one of them."""

    where: str
    prompt: str | list[dict[str, str]]
    """A text, or chat messages."""
    chosen: str
    rejected: str

    @property
    def unit(self) -> str:
        """The prompt as JSON. All judgements with the same unit are in the same part of a split."""
        return json.dumps(self.prompt, sort_keys=True)


@dataclass(frozen=True)
class RatedText:
    """A text and its rating by people."""

    where: str
    text: str
    rating: float
    """Mean over the raters."""
    standard_error: float | None
    """Standard error of the mean; None: not known."""

    @property
    def unit(self) -> str:
        return self.text


Judgement = JudgedPair | RatedText


@dataclass(frozen=True)
class Split:
    """Judgements of the training, validation and held-out set. Each prompt (for ratings: each text) is in one set
    only."""

    train: list[Judgement]
    validation: list[Judgement]
    held_out: list[Judgement]


def load_split(config: PreferencesConfig, seed: int) -> Split:
    """Return the judgements of a source, divided at random into a training, a validation and a held-out set. All
    judgements of a prompt are in the same set. For ratings, all ratings of a text are in the same set. The division
    depends on `seed`.

    If `data.held_out_url` is given, all judgements of that file are the held-out set. The judgements of `data.url` then
    make the training and the validation set. Raises PreferencesError if judgements cannot be used or are too few.
    """
    judgements = load_judgements(config, "data.url", config.url)
    parts = {"validation": config.validation}
    held_out: list[Judgement] | None = None
    if config.held_out_url is not None:
        held_out = load_judgements(config, "data.held_out_url", config.held_out_url)
        _refuse_shared(judgements, held_out)
    else:
        parts["held_out"] = config.held_out
    units = sorted({judgement.unit for judgement in judgements})
    order = np.random.default_rng([seed, _SPLIT]).permutation(len(units))
    of_unit: dict[str, str] = {}
    start = 0
    for part, share in parts.items():
        size = math.ceil(share * len(units))
        of_unit |= {units[number]: part for number in order[start : start + size]}
        start += size
    if start >= len(units):
        raise PreferencesError(
            "data.url", f"given {config.url!r}; {len(units)} prompts are too few to train on some and hold out others"
        )
    by_part: dict[str, list[Judgement]] = {"train": [], "validation": [], "held_out": []}
    for judgement in judgements:
        by_part[of_unit.get(judgement.unit, "train")].append(judgement)
    return Split(by_part["train"], by_part["validation"], by_part["held_out"] if held_out is None else held_out)


def load_judgements(config: PreferencesConfig, key: str, url: str) -> list[Judgement]:
    """Return all judgements of a file. `key`: path of the setting that names the file. Raises PreferencesError if the
    judgements cannot be used."""
    if has_columns(url):
        for field in _fields(config):
            given = getattr(config, field)
            if not given.isdecimal():
                raise PreferencesError(f"data.{field}", f"{url}: must be a 0-based column number, given {given!r}")
    make = _comparison if config.kind == "pairs" else _rated_text
    try:
        judgements: list[Judgement] = [make(config, row) for row in read_rows(url)]
    except RowsError as error:
        raise PreferencesError(key, str(error)) from error
    if not judgements:
        raise PreferencesError(key, f"{url} holds no judgements")
    if config.kind == "ratings":
        _refuse_repeated(judgements)
    return judgements


def _fields(config: PreferencesConfig) -> Iterator[str]:
    """Yield the settings that name the fields of a row."""
    if config.kind == "pairs":
        yield from ("prompt", "chosen", "rejected")
    else:
        yield from ("text", "rating")
        yield from (field for field in ("spread", "raters") if getattr(config, field) is not None)


def _comparison(config: PreferencesConfig, row: Row) -> JudgedPair:
    where, _ = row
    prompt: Any = _field(config, row, "prompt")
    if config.format == "chat":
        if not is_chat(prompt):
            need = "must be a list of objects with the texts role and content"
            raise PreferencesError("data.format", f"{where}: chat: {config.prompt!r} {need}, given {prompt!r:.80}")
        prompt = [{"role": m["role"], "content": m["content"]} for m in prompt]
    elif not isinstance(prompt, str) or not prompt.strip():
        raise PreferencesError(
            "data.prompt",
            f"{where}: {config.prompt!r} must be a text that is not blank"
            + (" (conversations: data.format=chat)" if is_chat(prompt) else "")
            + f", given {prompt!r:.80}",
        )
    chosen, rejected = (_response(config, row, field) for field in ("chosen", "rejected"))
    if chosen == rejected:
        raise PreferencesError(
            "data.chosen", f"{where}: {config.chosen!r} and {config.rejected!r} are the same text, {chosen!r:.80}"
        )
    return JudgedPair(where, prompt, chosen, rejected)


def _response(config: PreferencesConfig, row: Row, field: str) -> str:
    """Return a response's text. In a chat it may be a list with one message of the assistant."""
    where, _ = row
    value, name = _field(config, row, field), getattr(config, field)
    if config.format == "chat" and is_chat(value) and len(value) == 1 and value[0]["role"] == "assistant":
        value = value[0]["content"]
    if not isinstance(value, str) or not value.strip():
        kind = "a text" if config.format == "plain" else "a text, or a list of one message of the assistant,"
        hint = " (conversations: data.format=chat)" if config.format == "plain" and is_chat(value) else ""
        raise PreferencesError(
            f"data.{field}", f"{where}: {name!r} must be {kind} that is not blank{hint}, given {value!r:.80}"
        )
    return value


def _rated_text(config: PreferencesConfig, row: Row) -> RatedText:
    where, _ = row
    text = _field(config, row, "text")
    if not isinstance(text, str) or not text.strip():
        raise PreferencesError(
            "data.text", f"{where}: {config.text!r} must be a text that is not blank, given {text!r:.80}"
        )
    error = None
    if config.spread is not None and config.raters is not None:
        raters = _number(config, row, "raters")
        if raters < 1:
            raise PreferencesError("data.raters", f"{where}: {config.raters!r} must be 1 or more, given {raters:g}")
        error = _number(config, row, "spread") / math.sqrt(raters)
    return RatedText(where, text, _number(config, row, "rating"), error)


def _number(config: PreferencesConfig, row: Row, field: str) -> float:
    value = _field(config, row, field)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PreferencesError(
            f"data.{field}", f"{row[0]}: {getattr(config, field)!r} must be a number, given {value!r:.80}"
        )
    return number


def _field(config: PreferencesConfig, row: Row, field: str) -> Any:
    where, fields = row
    name = getattr(config, field)
    if name not in fields:
        raise PreferencesError(f"data.{field}", f"{where}: given {name!r}, available: {', '.join(fields)}")
    return fields[name]


def _refuse_repeated(judgements: Sequence[Judgement]) -> None:
    """Raise PreferencesError for a text with two ratings: it would be compared with itself."""
    first: dict[str, Judgement] = {}
    for judgement in judgements:
        earlier = first.setdefault(judgement.unit, judgement)
        if earlier is not judgement:
            raise PreferencesError("data.text", f"{judgement.where}: the same text as {earlier.where}: rate it once")


def _refuse_shared(judgements: Sequence[Judgement], held_out: Sequence[Judgement]) -> None:
    trained = {judgement.unit: judgement for judgement in judgements}
    for judgement in held_out:
        if judgement.unit in trained:
            other = trained[judgement.unit].where
            raise PreferencesError(
                "data.held_out_url",
                f"{judgement.where}: its prompt is trained on too ({other}): what is held out must be unseen",
            )

"""Several runs beside one another: which settings differ, what of their numbers can be compared, and how each does
against the first on the prompts that both were evaluated on. Pure functions. May import this folder and
pipeline.observe.{paired, redaction, variants}.

Runs that are too different are no error: what cannot be compared is left out, and why is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.observe.paired import standard_error
from pipeline.observe.redaction import without_credentials
from pipeline.observe.report.numbers import number
from pipeline.observe.report.source import Sameness
from pipeline.observe.variants import Comparison, compare

_PLACE = frozenset({"name", "runs_dir"})
_SCORES = ("reward/*", "part/*", "score/*")
_HELD_OUT = ("held_out/score", "held_out/part/*")
_KL = ("kl/ref*", "held_out/kl")
_TOKENS = ("response/*", "held_out/length", "policy/entropy*", "generate/tokens*", "tokens_per_s")


@dataclass(frozen=True)
class ConfigDifference:
    """A setting in which runs differ; null where a run has no such key."""

    key: str
    values: Sequence[str | None]


@dataclass(frozen=True)
class LeftOut:
    """Something of a run that cannot be compared with the first run's."""

    run: int
    what: str
    why: str
    metrics: Sequence[str] = ()
    """Curves that are not laid over the first run's; a `*` at the end stands for all that begin so."""


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the last evaluated version of a run, by text of the prompt (and how often it came before)."""

    version: int
    by_prompt: Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class PairedEvaluation:
    """A run against the first, prompt by prompt."""

    run: int
    versions: tuple[int, int]
    """The first run's, and this one's."""
    found: Comparison
    error: float | None
    """Standard error of the difference."""
    pairs: Sequence[tuple[float | None, float | None]]
    """Scores of the first run and of this one."""
    remark: str


@dataclass(frozen=True)
class RunComparison:
    config: Sequence[ConfigDifference]
    paired: Sequence[PairedEvaluation]
    left_out: Sequence[LeftOut]


def compare_runs(
    settings: Sequence[Mapping[str, Any]], sameness: Sequence[Sameness], held_out: Sequence[HeldOutScores | None]
) -> RunComparison:
    """Of two runs or more, in the order given; the first is what the others are compared with."""
    left_out: list[LeftOut] = []
    paired: list[PairedEvaluation] = []
    for run in range(1, len(settings)):
        left_out += _incomparable(run, sameness[0], sameness[run])
        found = _paired(run, (sameness[0], sameness[run]), (held_out[0], held_out[run]))
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            paired.append(found)
    return RunComparison(config_differences(settings), paired, left_out)


def config_differences(settings: Sequence[Mapping[str, Any]]) -> list[ConfigDifference]:
    """By key; where a run's directory lies is no difference."""
    keys = sorted(set().union(*settings) - _PLACE)
    rows = [(key, [without_credentials(str(s[key])) if key in s else None for s in settings]) for key in keys]
    return [ConfigDifference(key, values) for key, values in rows if len(set(values)) > 1]


def _incomparable(run: int, first: Sameness, other: Sameness) -> list[LeftOut]:
    found = []
    if first.reward != other.reward:
        found.append(LeftOut(run, "training scores", "they are made by different rewards", _SCORES))
    if first.held_out_reward != other.held_out_reward:
        found.append(LeftOut(run, "held-out scores", "they are made by different rewards", _HELD_OUT))
    if first.reference != other.reference:
        found.append(LeftOut(run, "KL to the reference", "the references are different models", _KL))
    if first.tokenizer != other.tokenizer:
        why = "the tokenizers differ, and a token of one is not a token of the other"
        found.append(LeftOut(run, "lengths, entropies and rates in tokens", why, _TOKENS))
    return found


def _paired(
    run: int, sameness: tuple[Sameness, Sameness], held_out: tuple[HeldOutScores | None, HeldOutScores | None]
) -> PairedEvaluation | LeftOut:
    what = "scores by prompt"
    first, other = held_out
    if first is None or other is None:
        which = "neither run has" if first is other else "the first run has not" if first is None else "it has not"
        return LeftOut(run, what, f"{which} been evaluated")
    if sameness[0].held_out_reward != sameness[1].held_out_reward:
        return LeftOut(run, what, "held-out scores are made by different rewards")
    common = sorted(first.by_prompt.keys() & other.by_prompt.keys())
    if not common:
        return LeftOut(run, what, "no held-out prompt is in both runs")
    pairs = [(first.by_prompt[key], other.by_prompt[key]) for key in common]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return LeftOut(run, what, "some held-out scores are not finite")
    remarks = []
    if len(common) < max(len(first.by_prompt), len(other.by_prompt)):
        remarks.append(f"only {len(common)} prompts are in both ({len(first.by_prompt)} and {len(other.by_prompt)})")
    if sameness[0].held_out_sampling != sameness[1].held_out_sampling:
        remarks.append("their responses are sampled differently (temperature, length or seed)")
    return PairedEvaluation(
        run=run,
        versions=(first.version, other.version),
        found=compare(dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))),
        error=number(standard_error([b - a for a, b in pairs])),
        pairs=[(number(a), number(b)) for a, b in pairs],
        remark="; ".join(remarks),
    )

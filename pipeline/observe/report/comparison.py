"""The comparison of several runs: settings that differ, numbers that can be compared, and scores on common held-out
prompts. Each run is compared with the first run. If two runs are too different, the comparison says which numbers are
left out, and why.

`worst_mismatches` finds the tokens on which trainer and sampler differ most. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.observe.curves import round_or_none
from pipeline.observe.evaluations import Comparison, compare, standard_error
from pipeline.observe.report.source import Sameness
from pipeline.observe.rows import StageRows
from storage.rollouts import Decode

_LOCATION_KEYS = frozenset({"name", "runs_dir"})
_SCORES = ("reward/*", "score/*")
_HELD_OUT = ("eval/reward_mean", "eval/*/mean")
_KL = ("kl/ref*", "eval/kl")
_TOKENS = ("response/*", "eval/length_mean", "policy/entropy*", "generate/tokens*", "tokens_per_s")


@dataclass(frozen=True)
class ConfigDifference:
    """A setting in which runs differ. The value is None for a run that has no such key."""

    key: str
    values: Sequence[str | None]


@dataclass(frozen=True)
class IncomparablePart:
    """A part of a run that cannot be compared with the same part of the first run."""

    run: int
    what: str
    why: str
    metrics: Sequence[str] = ()
    """Names of metrics. Their curves are not drawn together with the curves of the first run. A `*` stands for any
    text."""


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the last evaluated version of a run.

    The key of a score has two parts: the text of the prompt, and the number of earlier prompts with the same text."""

    version: int
    by_prompt: Mapping[tuple[str, int], float]


@dataclass(frozen=True)
class PairedEvaluation:
    """The comparison of a run with the first run, paired by held-out prompt."""

    run: int
    versions: tuple[int, int]
    """The compared versions of the weights: the version of the first run, and the version of this run."""
    found: Comparison
    error: float | None
    """Standard error of the mean difference of the scores. None if only one prompt is in both runs."""
    pairs: Sequence[tuple[float | None, float | None]]
    """For each prompt that is in both runs: its score in the first run and its score in this run."""
    remark: str


@dataclass(frozen=True)
class RunComparison:
    config: Sequence[ConfigDifference]
    paired: Sequence[PairedEvaluation]
    left_out: Sequence[IncomparablePart]


def compare_runs(
    settings: Sequence[Mapping[str, Any]], sameness: Sequence[Sameness], held_out: Sequence[HeldOutScores | None]
) -> RunComparison:
    """Compare two or more runs. The first run is the baseline for all other runs. Each argument has one entry per run:
    its settings, its facts about comparability, and its held-out scores (None if it has none)."""
    left_out: list[IncomparablePart] = []
    paired: list[PairedEvaluation] = []
    for run in range(1, len(settings)):
        left_out += _incomparable_parts(run, sameness[0], sameness[run])
        comparison = _compare_held_out(run, (sameness[0], sameness[run]), (held_out[0], held_out[run]))
        if isinstance(comparison, IncomparablePart):
            left_out.append(comparison)
        else:
            paired.append(comparison)
    return RunComparison(config_differences(settings), paired, left_out)


def config_differences(settings: Sequence[Mapping[str, Any]]) -> list[ConfigDifference]:
    """Return the settings in which the runs differ, sorted by key. `name` and `runs_dir` are left out."""
    keys = sorted(set().union(*settings) - _LOCATION_KEYS)
    rows = [(key, [str(s[key]) if key in s else None for s in settings]) for key in keys]
    return [ConfigDifference(key, values) for key, values in rows if len(set(values)) > 1]


def _incomparable_parts(run: int, first: Sameness, other: Sameness) -> list[IncomparablePart]:
    left_out = []
    if first.reward != other.reward:
        left_out.append(IncomparablePart(run, "training scores", "they are made by different rewards", _SCORES))
    if first.held_out_reward != other.held_out_reward:
        left_out.append(IncomparablePart(run, "held-out scores", "they are made by different rewards", _HELD_OUT))
    if first.reference != other.reference:
        left_out.append(IncomparablePart(run, "KL to the reference", "the references are different models", _KL))
    if first.tokenizer != other.tokenizer:
        why = "the tokenizers differ, and a token of one is not a token of the other"
        left_out.append(IncomparablePart(run, "lengths, entropies and rates in tokens", why, _TOKENS))
    return left_out


def _compare_held_out(
    run: int, sameness: tuple[Sameness, Sameness], held_out: tuple[HeldOutScores | None, HeldOutScores | None]
) -> PairedEvaluation | IncomparablePart:
    what = "scores by prompt"
    first, other = held_out
    if first is None or other is None:
        which = "neither run has" if first is other else "the first run has no" if first is None else "it has no"
        return IncomparablePart(run, what, f"{which} held-out scores by prompt")
    if sameness[0].held_out_reward != sameness[1].held_out_reward:
        return IncomparablePart(run, what, "held-out scores are made by different rewards")
    common = sorted(first.by_prompt.keys() & other.by_prompt.keys())
    if not common:
        return IncomparablePart(run, what, "no held-out prompt is in both runs")
    pairs = [(first.by_prompt[key], other.by_prompt[key]) for key in common]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return IncomparablePart(run, what, "some held-out scores are not finite")
    remarks = []
    if len(common) < max(len(first.by_prompt), len(other.by_prompt)):
        remarks.append(f"only {len(common)} prompts are in both ({len(first.by_prompt)} and {len(other.by_prompt)})")
    if sameness[0].held_out_sampling != sameness[1].held_out_sampling:
        remarks.append("their responses are sampled differently (temperature, length or seed)")
    return PairedEvaluation(
        run=run,
        versions=(first.version, other.version),
        found=compare(dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))),
        error=round_or_none(standard_error([b - a for a, b in pairs])),
        pairs=[(round_or_none(a), round_or_none(b)) for a, b in pairs],
        remark="; ".join(remarks),
    )


# ---- mismatches ------------------------------------------------------------------------------------------

MAX_MISMATCHES = 20


@dataclass(frozen=True)
class TokenMismatch:
    """A sampled token with its two log-probs: from the engine and from the trainer."""

    step: int
    row: int
    position: int
    """Position in the response, from 0."""
    token: str
    sampler: float | None
    """Log-prob in the distribution from which the engine drew the token."""
    policy: float | None
    """Log-prob computed by the trainer with the weights at the start of the step."""
    staleness: int
    """Version of the weights at the start of the step, minus the version that sampled the token. If it is 0, the two
    log-probs `sampler` and `policy` should be equal up to rounding."""


def worst_mismatches(
    read: Sequence[StageRows], decode: Decode, max_count: int = MAX_MISMATCHES
) -> list[TokenMismatch] | None:
    """Return up to `max_count` tokens at which the log-probs of trainer (pi) and sampler (mu) differ most, sorted by
    |log pi - log mu|, the largest first. Return None if the trainer recomputed no log-probs in these steps."""
    steps = [step for step in read if step.mismatch is not None]
    if not steps:
        return None
    worst: list[tuple[float, int, int, int]] = []
    for i, step in enumerate(steps):
        assert step.mismatch is not None
        size = np.abs(step.mismatch).ravel()
        size = np.where(np.isfinite(size), size, np.inf)
        for flat in np.argsort(-size, kind="stable")[:max_count]:
            row, t = divmod(int(flat), step.mismatch.shape[1])
            if step.rollout.response_mask[row, t]:
                worst.append((-float(size[flat]), i, row, t))
    return [_token_mismatch(steps[i], row, t, decode) for _, i, row, t in sorted(worst)[:max_count]]


def _token_mismatch(step: StageRows, row: int, t: int, decode: Decode) -> TokenMismatch:
    rollout = step.rollout
    assert step.policy is not None
    return TokenMismatch(
        step=step.step,
        row=int(rollout.row[row]),
        position=t - int(rollout.prompt_lengths[row]),
        token=decode([int(rollout.tokens[row, t])]),
        sampler=round_or_none(float(rollout.sampler_logprobs[row, t])),
        policy=round_or_none(float(step.policy.policy_logprobs[row, t])),
        staleness=step.step - int(rollout.token_versions[row, t]),
    )

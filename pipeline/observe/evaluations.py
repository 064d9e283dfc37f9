"""Evaluations on the held-out prompts: a paired comparison of two policies, and the choice of the best version.

The comparison pairs the scores by prompt, so the differences between prompts do not add to its error:

    gain = mean of (after - before)      error = sd / sqrt(n)      t = gain / error
    sd is the standard deviation of (after - before), with the divisor n - 1.

The best version has the highest held-out reward among the versions within a KL budget. A variant repeats some updates
of another run, called its parent, with changed settings. The scores of the variant and the parent are paired by prompt
too. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from storage import codec


@dataclass(frozen=True)
class PairedScores:
    """The comparison of two sets of scores, on the prompts that both have."""

    num_prompts: int
    mean_before: float
    """Mean score of the first set."""
    mean_after: float
    gain: float
    """Mean gain per prompt: score in the second set minus score in the first set."""
    error: float | None
    """Standard error of the gain. None for fewer than two prompts."""
    t_statistic: float | None
    """Student's t: gain / error. None for fewer than two prompts, or if all differences are equal."""
    num_better: int
    """Number of prompts whose score is higher in the second set."""
    num_worse: int


def compare_paired(before: Mapping[int, float], after: Mapping[int, float]) -> PairedScores | None:
    """Compare two sets of scores on the prompts that both contain. Return None if they have no prompt in common."""
    prompts = sorted(before.keys() & after.keys())
    n = len(prompts)
    if not n:
        return None
    differences = [after[p] - before[p] for p in prompts]
    return PairedScores(
        num_prompts=n,
        mean_before=math.fsum(before[p] for p in prompts) / n,
        mean_after=math.fsum(after[p] for p in prompts) / n,
        gain=math.fsum(differences) / n,
        error=standard_error(differences),
        t_statistic=paired_t(differences),
        num_better=sum(d > 0 for d in differences),
        num_worse=sum(d < 0 for d in differences),
    )


def paired_t(differences: Sequence[float]) -> float | None:
    """Return Student's t of paired differences: mean / standard error. None for fewer than two differences, or if all
    are equal."""
    error = standard_error(differences)
    return math.fsum(differences) / len(differences) / error if error else None


def standard_error(values: Iterable[float]) -> float | None:
    """Return the standard error of the mean: sd / sqrt(n), where the variance sd^2 divides by n - 1. None for fewer
    than two values."""
    numbers = [float(value) for value in values]
    n = len(numbers)
    if n < 2:
        return None
    mean = math.fsum(numbers) / n
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (n - 1) / n)


@dataclass(frozen=True)
class Evaluation:
    """Scores of one version of the weights on the held-out prompts."""

    version: int
    scores: Mapping[int, float]
    """Index of a prompt -> score of the response to this prompt."""
    distinct_bigrams: float | None = None
    """Number of distinct bigrams / number of all bigrams, over all responses. Low for a repetitive policy. None if no
    response has two tokens."""
    kl: float | None = None
    """KL divergence from the reference, in nats per response. It is log mu - log pi_ref, summed over the tokens of each
    response and averaged over the responses. mu is the policy that sampled the tokens. None until the reference has
    scored the responses."""
    length: float | None = None
    """Mean number of sampled tokens per response, EOS included."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Name of a part of the score -> mean of the part over the responses, before weighting."""

    @property
    def mean(self) -> float:
        return math.fsum(self.scores.values()) / len(self.scores)


@dataclass(frozen=True)
class EvaluatedVersion:
    """The mean reward, KL, length and score parts of an evaluated version."""

    version: int
    reward: float
    kl: float | None
    length: float | None
    parts: dict[str, float]


def reduce_to_means(e: Evaluation) -> EvaluatedVersion:
    """Reduce an evaluation to the means that `summary.json` contains."""
    return EvaluatedVersion(e.version, e.mean, e.kl, e.length, dict(e.parts))


def best_evaluation(evaluations: Iterable[Evaluation], max_kl: float | None) -> Evaluation | None:
    """Return the evaluation with the highest mean score among the evaluations whose KL is at most `max_kl`. If `max_kl`
    is None, there is no limit.

    Among equal scores the oldest version is chosen, because it is nearest to the reference. If there is a limit,
    evaluations of unknown KL are not considered. Return None if no evaluation is left."""
    within = [e for e in evaluations if max_kl is None or (e.kl is not None and e.kl <= max_kl)]
    return max(within, key=lambda e: (e.mean, -e.version), default=None)


# ---- variants --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The comparison of a variant with its parent, on the same prompts and sampled with the same noise. The report also
    uses this record to compare two runs. Then `parent` stands for the first run, `variant` stands for the other run,
    and the noise may differ.

    `difference` is the mean over the prompts of the variant's score minus the parent's score."""

    num_prompts: int
    parent: float
    """Mean score of the parent run, from which the variant was made."""
    variant: float
    difference: float
    paired_t: float | None
    """Student's t of the differences, paired by prompt. None for fewer than two prompts, or if all differences are
    equal."""
    better: int
    """Number of prompts on which the variant scores higher."""
    worse: int


@dataclass(frozen=True)
class VariantSummary:
    """The content of `summary.json` of a variant. A variant repeats updates of a run on the run's rollouts, with other
    settings."""

    parent: str
    """Directory of the parent run."""
    updates: tuple[int, int]
    """The steps whose updates the variant ran, as a half-open range: the first step, and the last step + 1. The variant
    trained on the rollouts of the parent run."""
    changed: Sequence[str]
    steps: Sequence[Mapping[str, Any]]
    """One record per step: the step's number, the digests of the trained models after the step, and its metrics."""
    weights: str
    """Path of the exported policy."""
    comparison: Comparison | None
    """The comparison of the held-out scores of the variant with those of its parent run. None if the run has fewer than
    two held-out prompts."""
    versions: Mapping[str, str]
    """Software package -> its version."""

    def to_json(self) -> str:
        return codec.encode(self, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> VariantSummary:
        return codec.decode(cls, text)


def compare(parent: Mapping[int, float], variant: Mapping[int, float]) -> Comparison:
    """Compare the scores of a variant with the scores of its parent, on the prompts that both have.

    Raises:
        ValueError: the two have no prompt in common."""
    paired = compare_paired(parent, variant)
    if paired is None:
        raise ValueError("no prompt is in both")
    return Comparison(
        num_prompts=paired.num_prompts,
        parent=paired.mean_before,
        variant=paired.mean_after,
        difference=paired.gain,
        paired_t=paired.t_statistic,
        better=paired.num_better,
        worse=paired.num_worse,
    )


def comparison_table(comparison: Comparison, parent: str, variant: str) -> Table:
    """Return the comparison as a table for the terminal."""
    title = f"held-out reward ({comparison.num_prompts} prompts, same noise)"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_row(f"parent ({parent})", f"{comparison.parent:.4f}")
    table.add_row(f"variant ({variant})", f"{comparison.variant:.4f}")
    t = "-" if comparison.paired_t is None else f"{comparison.paired_t:.2f}"
    equal = comparison.num_prompts - comparison.better - comparison.worse
    table.add_row("difference", f"{comparison.difference:+.4f}, paired t {t}")
    table.add_row("prompts", f"{comparison.better} better, {comparison.worse} worse, {equal} equal")
    return table

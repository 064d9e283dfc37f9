"""The results of a variant of a run: its steps, and its policy against the parent's on the held-out prompts. Pure
functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from pipeline.observe.evaluations import paired


@dataclass(frozen=True)
class Comparison:
    """Comparison of two policies on the same prompts, sampled with the same noise. Differences are variant minus
    parent, per prompt."""

    num_prompts: int
    parent: float
    """Mean score."""
    variant: float
    difference: float
    paired_t: float | None
    """Paired t of the differences (pipeline/observe/evaluations.py); None for fewer than two prompts or equal
    differences."""
    better: int
    """Prompts on which the variant scores higher."""
    worse: int


@dataclass(frozen=True)
class VariantSummary:
    """The content of a variant's `summary.json`."""

    parent: str
    """Directory of the parent run."""
    updates: tuple[int, int]
    """First step, and one past the last."""
    changed: Sequence[str]
    steps: Sequence[Mapping[str, object]]
    """One record per step: number, digests of the trained models after it, metrics."""
    weights: str
    """Path of the exported policy."""
    comparison: Comparison | None
    """None if the run has fewer than two held-out prompts."""
    versions: Mapping[str, str]
    """Versions of the software."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def compare(parent: Mapping[int, float], variant: Mapping[int, float]) -> Comparison:
    """Compare scores by prompt, on the prompts that both have. Raises ValueError if there are none."""
    found = paired(parent, variant)
    if found is None:
        raise ValueError("no prompt is in both")
    return Comparison(
        num_prompts=found.num_prompts,
        parent=found.before,
        variant=found.after,
        difference=found.gain,
        paired_t=found.t,
        better=found.better,
        worse=found.worse,
    )


def comparison_table(found: Comparison, parent: str, variant: str) -> Table:
    """Return the comparison as a table for the terminal."""
    title = f"held-out reward ({found.num_prompts} prompts, same noise)"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_row(f"parent ({parent})", f"{found.parent:.4f}")
    table.add_row(f"variant ({variant})", f"{found.variant:.4f}")
    t = "-" if found.paired_t is None else f"{found.paired_t:.2f}"
    equal = found.num_prompts - found.better - found.worse
    table.add_row("difference", f"{found.difference:+.4f}, paired t {t}")
    table.add_row("prompts", f"{found.better} better, {found.worse} worse, {equal} equal")
    return table

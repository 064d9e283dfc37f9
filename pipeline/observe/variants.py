"""What a variant comes to: its steps, and its policy against its parent's on the held-out prompts. Pure functions.

May import rich, the standard library and pipeline.observe.paired.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from pipeline.observe.paired import paired


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same prompts, sampled with the same noise. Differences: variant minus parent, by prompt."""

    num_prompts: int
    parent: float
    """Mean score."""
    variant: float
    difference: float
    paired_t: float | None
    """Of the differences (pipeline/observe/paired.py); None for fewer than two prompts or equal differences."""
    better: int
    """Prompts on which the variant scores higher."""
    worse: int


@dataclass(frozen=True)
class VariantSummary:
    """The content of a variant's `summary.json`."""

    parent: str
    """The run's directory."""
    updates: tuple[int, int]
    """First step, and the one after the last."""
    changed: Sequence[str]
    steps: Sequence[Mapping[str, object]]
    """By step: number, digests of the trained models after it, metrics."""
    weights: str
    """The exported policy."""
    comparison: Comparison | None
    """None where the run has fewer than two held-out prompts."""
    versions: Mapping[str, str]
    """Of the software that ran."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def compare(parent: Mapping[int, float], variant: Mapping[int, float]) -> Comparison:
    """Of scores by prompt, on the prompts of both. Raises ValueError where there is none."""
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
    """For people."""
    title = f"held-out reward ({found.num_prompts} prompts, same noise)"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_row(f"parent ({parent})", f"{found.parent:.4f}")
    table.add_row(f"variant ({variant})", f"{found.variant:.4f}")
    t = "-" if found.paired_t is None else f"{found.paired_t:.2f}"
    equal = found.num_prompts - found.better - found.worse
    table.add_row("difference", f"{found.difference:+.4f}, paired t {t}")
    table.add_row("prompts", f"{found.better} better, {found.worse} worse, {equal} equal")
    return table

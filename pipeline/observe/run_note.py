"""What MLflow shows of a run as its description: what it is, how it was started, what it came to. Pure; markdown.

May import pipeline.observe.{decimals, summary} and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.observe.decimals import three
from pipeline.observe.summary import Summary


def code(text: str) -> str:
    """As it is, whatever is in it: no markup, no second line."""
    one_line = " ".join(text.replace("`", "'").split())
    return f"`{one_line}`" if one_line else "-"


def run_note(what: str, facts: Mapping[str, str], result: str) -> str:
    """The description: a sentence, a table of facts, and how it stands."""
    rows = "\n".join(f"| {name} | {code(value.replace('|', '/'))} |" for name, value in facts.items() if value)
    return f"{what}\n\n| | |\n|---|---|\n{rows}\n\n**Result:** {result}\n"


def result_text(status: str, summary: Summary | None, ended: str = "") -> str:
    """How a run stands, in a sentence. `ended`: what ended it before its last step."""
    why = f": {code(ended[:400])}" if ended else ""
    if summary is None:
        return f"{status.lower()}{why}"
    parts = [f"{status.lower()} after {summary.steps} steps in {summary.wall_s:.0f} s{why}"]
    if summary.eval is not None:
        t = "" if summary.eval.paired_t is None else f", paired t {summary.eval.paired_t:.1f}"
        change = f"{three(summary.eval.before)} → {three(summary.eval.after)}"
        parts.append(f"held-out reward {change} ({summary.eval.num_prompts} prompts{t})")
    if summary.kl_final is not None:
        parts.append(f"KL to the reference {three(summary.kl_final)} nats per response")
    if summary.steps:
        parts.append(f"{summary.samples_per_s:.2f} responses/s, overlap of gangs {summary.overlap_fraction:.0%}")
    if summary.trainer_losses:
        parts.append(f"trainers lost: {len(summary.trainer_losses)} ({summary.trainer_lost_s:.1f} s)")
    if summary.best is not None:
        parts.append(f"best version v{summary.best.version}")
    return "; ".join(parts)

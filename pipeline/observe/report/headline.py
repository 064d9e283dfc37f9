"""The numbers that a run is judged by, each with its uncertainty. Pure functions of what is given. May import this
folder and pipeline.observe.{decimals, evaluations, paired, rows, summary}.

Held-out scores are compared by prompt, the first evaluated version with the last (pipeline/observe/paired.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.observe.decimals import three
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.paired import paired, standard_error
from pipeline.observe.rows import StageRows
from pipeline.observe.summary import Summary


@dataclass(frozen=True)
class Headline:
    """One number of a run, in words."""

    key: str
    label: str
    value: str
    detail: str = ""


def headlines(
    summary: Summary, evaluations: Sequence[Evaluation], first: StageRows | None, last: StageRows | None
) -> list[Headline]:
    """Those that apply. `first`, `last`: rows of the first and the last finished step, where they are kept."""
    found = [*_held_out(evaluations), *_best(summary)]
    if summary.reward:
        parts = (
            _plus_minus(summary.reward[0], _score_error(first)),
            _plus_minus(summary.reward[-1], _score_error(last)),
        )
        found.append(Headline("score", "training reward", " → ".join(parts), "first → last step, ± standard error"))
    if summary.kl_final is not None:
        error = None if last is None or last.kl is None else standard_error(last.kl)
        value = _plus_minus(summary.kl_final, error)
        found.append(Headline("kl", "KL to the reference", value, "nats per response, last step"))
    if summary.steps:
        mean, most = summary.staleness.mean, summary.staleness.max
        found.append(Headline("staleness", "staleness", f"{mean:.2f}", f"versions, mean; at most {most}"))
        speed = f"{summary.tokens_per_s:,.0f} sampled tokens/s"
        found.append(Headline("speed", "samples/s", f"{summary.samples_per_s:.2f}", speed))
    idle = ", ".join(f"{gang} {share:.0%}" for gang, share in sorted(summary.idle.items()))
    overlap = f"{summary.overlap_fraction:.0%}"
    found.append(Headline("overlap", "overlap", overlap, f"of the time two gangs were busy; idle: {idle or '-'}"))
    versions = summary.versions.get("weights", 0)
    found.append(Headline("wall", "wall time", _clock(summary.wall_s), f"{summary.steps} steps, {versions} versions"))
    share = f"{summary.overhead_fraction:.1%}"
    found.append(Headline("bookkeeping", "bookkeeping", share, "store, ledger and driver, of the time"))
    if summary.trainer_losses:
        lost = f"{summary.trainer_lost_s:.1f} s until it trained again"
        found.append(Headline("lost", "trainer lost", f"{len(summary.trainer_losses)} times", lost))
    alarms = summary.alarms + sum(summary.alarms_by_rule.values())
    if alarms:
        by = {"mismatch": summary.alarms, **summary.alarms_by_rule}
        rules = ", ".join(f"{rule} {count}" for rule, count in by.items() if count)
        found.append(Headline("alarms", "alarms", str(alarms), rules))
    return found


def _held_out(evaluations: Sequence[Evaluation]) -> list[Headline]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    errors = [standard_error(e.scores.values()) for e in (first, last)]
    if last is first:
        return [Headline("held_out", "held-out reward", _plus_minus(first.mean, errors[0]), _versions(first))]
    value = f"{_plus_minus(first.mean, errors[0])} → {_plus_minus(last.mean, errors[1])}"
    found = [Headline("held_out", "held-out reward", value, f"v{first.version} → {_versions(last)}")]
    change = paired(first.scores, last.scores)
    if change is not None:
        text = f"paired t {'-' if change.t is None else f'{change.t:.1f}'} over {change.num_prompts} prompts"
        found.append(Headline("gain", "held-out gain", _plus_minus(change.gain, change.error, sign=True), text))
    if last.kl is not None:
        found.append(Headline("held_out_kl", "held-out KL", three(last.kl), f"nats per response, v{last.version}"))
    return found


def _best(summary: Summary) -> list[Headline]:
    best = summary.best
    if best is None:
        return []
    kl = "" if best.kl is None else f", KL {three(best.kl)}"
    return [Headline("best", "best version", f"v{best.version}", f"held-out reward {three(best.reward)}{kl}")]


def _versions(evaluation: Evaluation) -> str:
    return f"v{evaluation.version}, {len(evaluation.scores)} prompts, ± standard error"


def _score_error(rows: StageRows | None) -> float | None:
    return None if rows is None or rows.scores is None else standard_error(rows.scores.scores)


def _plus_minus(value: float, error: float | None, *, sign: bool = False) -> str:
    shown = three(value, sign=sign)
    return shown if error is None else f"{shown} ± {three(error)}"


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

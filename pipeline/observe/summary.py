"""The summary of a run (`summary.json`), computed from the journal's events and the numbers of each step. Pure
functions: no clock, no I/O.

A box is one execution of a node (pipeline/observe/timeline.py). Its last `store_s` seconds are spent on store and
ledger. A gang is **computing** during each of its boxes, except in these seconds. The **busiest gang** is the gang that
is busy for the longest time, so it determines the step time.

    overhead_fraction   = (A + B) / wall_s

    A   seconds in which the busiest gang is busy but not computing            (store, ledger)
    B   seconds in which it is idle although its next box is ready   (scheduling, tracking, driver)

A box is ready when the last parent of its node has finished. If no parent has a recorded end, the box is ready when its
node is submitted. While a gang waits for another gang's result, it has no ready box. So this wait is not overhead. It
is part of `Summary.idle`.

The summary also says how long trainers were lost (`Summary.trainer_lost_s`), without the time in which no driver worked
(pipeline/observe/incidents.py).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from pipeline.observe.evaluations import EvaluatedVersion, Evaluation, compare_paired, reduce_to_means
from pipeline.observe.incidents import find_worker_losses
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.learning import ADVICE
from pipeline.observe.text import format_duration, format_number
from pipeline.observe.timeline import (
    Box,
    Interval,
    busy_periods,
    driver_periods,
    intersect_intervals,
    merge_intervals,
    overlap_periods,
    read_boxes,
    total_length,
)
from storage.address import Address

_NONE: Mapping[str, float] = MappingProxyType({})
LEARNED_T = 2.0
"""Student's t of the gain in held-out reward, over the whole run, from which on the run counts as one that learned."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a finished PPO step."""

    step: int
    reward: float
    """Mean score of the rows."""
    kl: float
    """KL to the reference, nats per response."""
    num_samples: int
    num_tokens: int
    """Number of sampled tokens."""
    staleness: Mapping[int, int]
    """Staleness -> estimated number of rows of the step: the fraction of the step's tokens with this staleness, times
    the number of rows, rounded. It is an estimate because the tokens of one row may come from several versions. The
    staleness of a token is the version of the weights that the step trains, minus the version that sampled the token.
    """


@dataclass(frozen=True)
class StalenessSummary:
    max: int
    mean: float
    histogram: dict[str, int]
    """Staleness -> number of rows, summed over the steps (`StepNumbers.staleness`)."""


@dataclass(frozen=True)
class EvalSummary:
    before: float
    after: float
    num_prompts: int
    """Number of prompts that are in both evaluations."""
    paired_t: float | None
    """Student's t of the change in score from the first to the last evaluation, paired by prompt. None for fewer than
    two prompts, or if the change is equal on all prompts."""


@dataclass(frozen=True)
class TrainerLoss:
    """One case in which a gang that trains lost a worker, for example through a crash."""

    t: float
    """Time at which the worker was lost, in seconds since the epoch."""
    gang: str
    reason: str
    built_s: float | None
    """Seconds from the loss until the gang was rebuilt. None if it was not rebuilt."""
    lost_s: float | None
    """Seconds from the loss of the worker until the rebuilt gang finished an update. Only time in which a driver worked
    counts. None if the gang finished no further update."""


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`."""

    steps: int
    wall_s: float
    """Seconds in which a driver worked (`timeline.driver_periods`). The time between a stop and a resume is not
    counted."""
    samples_per_s: float
    tokens_per_s: float
    stage_s: dict[str, float]
    """Stage -> seconds, summed over the nodes of the stage. Only rank 0 is counted. If two nodes run at the same time,
    the seconds of both are added."""
    overhead_fraction: float
    """Fraction of the wall time that is spent on bookkeeping: (A + B) / wall in the docstring of this module."""
    staleness: StalenessSummary
    eval: EvalSummary | None
    reward: list[float]
    """Mean score of the rows of each step, in order of the steps."""
    kl: list[float]
    """KL to the reference in each step, nats per response."""
    versions: dict[str, str | int]
    """Key `weights`: number of published versions of the weights, version 0 included. Every other key is the name of a
    package, and its value is the package's version."""
    # The fields below are not compared between runs.
    overlap_fraction: float
    """Fraction of the wall time in which at least two gangs were busy."""
    busiest_gang: str | None
    idle: dict[str, float]
    """Gang -> fraction of the wall time in which its workers ran nothing: the mean over the workers."""
    alarms: int
    """Number of alarms of all rules."""
    kl_final: float | None
    """KL to the reference in the last step, nats per response."""
    distinct_bigrams: dict[str, float | None]
    """`before` or `after` (training) -> number of distinct bigrams / number of all bigrams in the held-out responses.
    None if there is no evaluation, or if no response has two tokens."""
    trainer_losses: tuple[TrainerLoss, ...] = ()
    """Losses of workers in gangs that train, in order of time."""
    trainer_lost_s: float = 0.0
    """Total time from the loss of a trainer until it trained again, in seconds. If two of these periods overlap, the
    overlap counts once. A loss after which the trainer did not train again is not counted."""
    alarms_by_rule: dict[str, int] = field(default_factory=dict)
    """Rule of section `alarms` -> number of its alarms. For `mismatch` it is the number of versions of the weights at
    which engine and trainer differed by more than `mismatch.alarm_nats`, or the engine seemed to have kept older
    weights."""
    evaluations: tuple[EvaluatedVersion, ...] = ()
    """Evaluations in order of version."""
    best: EvaluatedVersion | None = None
    """The version with the highest held-out reward among the versions whose KL is within `evaluate.select.max_kl`. None
    if there is no such version."""
    predictions: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Stage -> (predicted, measured) seconds per step, summed over the stage's nodes. The key `step` has the seconds of
    the whole step. Empty if the config has no `predicted_s`."""
    hints: tuple[str, ...] = ()
    """Reasons why the run learned little. There is one text if the held-out reward has fallen, and one for each rule
    that raised an alarm and is in `learning.ADVICE`: the rule's last alarm, and the advice. Empty if the held-out
    reward has grown (`LEARNED_T`)."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def summarise(
    events: Iterable[Event],
    steps: Sequence[StepNumbers],
    evaluations: Sequence[Evaluation],
    parents: Mapping[Address, Sequence[Address]],
    software: Mapping[str, str],
    best: Evaluation | None = None,
    rebuilt_together: Collection[str] = (),
    predicted_s: Mapping[str, float] = _NONE,
) -> Summary:
    """Return the summary of a run.

    Args:
        events: all events of the journal.
        steps: the numbers of each finished step. If a step is given twice, after a resume, its last numbers count.
        evaluations: complete evaluations in order of version. The first is compared with the last.
        parents: the parents of each node in the graph.
        software: package -> version.
        best: the best evaluation, or None if no evaluation is within `evaluate.select.max_kl`.
        rebuilt_together: names of the gangs whose workers are lost and rebuilt together.
        predicted_s: name of a stage -> predicted seconds per step, from the config. The key `step` has the seconds of
            the whole step."""
    log = list(events)
    all_boxes = read_boxes(log)
    periods = driver_periods(log)
    wall_s = total_length(periods)
    busy = busy_periods(all_boxes)
    busiest = max(sorted(busy), key=lambda gang: total_length(busy[gang]), default=None)
    overhead_s = _overhead_s(log, [b for b in all_boxes if b.gang == busiest], all_boxes, parents, periods)
    losses = find_worker_losses(log, rebuilt_together)
    lost = [(loss.lost_at, loss.trained_again_at) for loss in losses.losses if loss.trained_again_at is not None]
    by_step = [s for _, s in sorted({s.step: s for s in steps}.items())]
    compared = _compare_evaluations(evaluations)
    alarms = [e for e in log if e.kind is EventKind.ALARM]
    by_rule = Counter(e.rule for e in alarms if e.rule is not None)
    if mismatched := {e.step for e in alarms if e.rule is None}:
        by_rule["mismatch"] = len(mismatched)
    return Summary(
        steps=len(by_step),
        wall_s=wall_s,
        samples_per_s=_ratio(sum(s.num_samples for s in by_step), wall_s),
        tokens_per_s=_ratio(sum(s.num_tokens for s in by_step), wall_s),
        stage_s=_stage_s(all_boxes),
        overhead_fraction=_ratio(overhead_s, wall_s),
        staleness=_staleness(by_step),
        eval=compared,
        reward=[s.reward for s in by_step],
        kl=[s.kl for s in by_step],
        versions={"weights": len({e.step for e in log if e.kind is EventKind.PUBLISHED}), **software},
        overlap_fraction=_ratio(total_length(overlap_periods(all_boxes)), wall_s),
        busiest_gang=busiest,
        idle=_idle(all_boxes, wall_s),
        alarms=by_rule.total(),
        alarms_by_rule=dict(by_rule),
        kl_final=by_step[-1].kl if by_step else None,
        distinct_bigrams={
            "before": evaluations[0].distinct_bigrams if evaluations else None,
            "after": evaluations[-1].distinct_bigrams if evaluations else None,
        },
        trainer_losses=tuple(
            TrainerLoss(
                t=loss.lost_at,
                gang=loss.gang,
                reason=loss.reason,
                built_s=_seconds(loss.lost_at, loss.rebuilt_at, periods),
                lost_s=_seconds(loss.lost_at, loss.trained_again_at, periods),
            )
            for loss in losses.losses
            if loss.gang in losses.trainers
        ),
        trainer_lost_s=total_length(intersect_intervals(merge_intervals(lost), periods)),
        evaluations=tuple(map(reduce_to_means, evaluations)),
        best=None if best is None else reduce_to_means(best),
        predictions=_predictions(predicted_s, _stage_s(all_boxes) | {"step": wall_s}, len(by_step)),
        hints=_hints(alarms, compared),
    )


def _hints(alarms: Sequence[Event], compared: EvalSummary | None) -> tuple[str, ...]:
    """Return advice for each rule of `ADVICE` that raised an alarm. Return none if the held-out reward has grown by
    more than chance explains (`LEARNED_T`): then the run has learned."""
    change = 0.0 if compared is None else compared.paired_t or 0.0
    if change >= LEARNED_T:
        return ()
    fallen = f"the held-out reward has fallen (paired t {change:.1f}). Advice: {ADVICE['kl']}"
    last = {e.rule or "": e for e in alarms if e.rule in ADVICE}
    return (fallen,) * (change <= -LEARNED_T) + tuple(
        f"after {(e.step or 0) + 1} steps: {e.detail}. Advice: {ADVICE[rule]}"
        for rule, e in sorted(last.items(), key=lambda item: [*ADVICE].index(item[0]))
    )


def _seconds(start: float, end: float | None, periods: Sequence[Interval]) -> float | None:
    """Return the seconds from `start` to `end` within the periods in which a driver worked."""
    return None if end is None else total_length(intersect_intervals([(start, end)], periods))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _stage_s(all_boxes: Sequence[Box]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for box in all_boxes:
        if box.rank == 0:
            seconds[box.address.stage] += box.end_s - box.start_s  # type: ignore[assignment]
    return dict(sorted(seconds.items()))


def _predictions(
    predicted_s: Mapping[str, float], measured_s: Mapping[str, float], steps: int
) -> dict[str, tuple[float, float]]:
    """Return the predicted and the measured seconds per step, for each predicted stage that the run executed."""
    common = [stage for stage in predicted_s if stage in measured_s and steps]
    return {stage: (predicted_s[stage], measured_s[stage] / steps) for stage in common}


def _overhead_s(
    log: Sequence[Event],
    busiest_boxes: Sequence[Box],
    all_boxes: Sequence[Box],
    parents: Mapping[Address, Sequence[Address]],
    periods: Sequence[Interval],
) -> float:
    """Return the seconds in which the busiest gang works on store and ledger, or is idle although the parents of its
    next node have finished. `busiest_boxes`: executions on this gang. `periods`: periods in which a driver worked."""
    busy = merge_intervals((b.start_s, b.end_s) for b in busiest_boxes)
    computing = merge_intervals((b.start_s, b.end_s - b.store_s) for b in busiest_boxes)
    submitted = {
        Address(e.stage, e.step, e.shard or 0): e.t
        for e in log
        if e.kind is EventKind.SUBMITTED and e.stage is not None and e.step is not None
    }
    finished: dict[Address, float] = {}
    for box in all_boxes:
        finished[box.address] = max(box.end_s, finished.get(box.address, -math.inf))
    starting: dict[float, list[Box]] = {}
    for box in busiest_boxes:
        starting.setdefault(box.start_s, []).append(box)
    waits = []
    for (_, idle_from), (idle_to, _) in itertools.pairwise(busy):
        period_start = max((start for start, _ in periods if start <= idle_to), default=idle_to)
        ready = min(_ready_s(b, parents, finished, submitted) for b in starting[idle_to])
        waits.append(max(0.0, idle_to - max(idle_from, ready, period_start)))
    return total_length(busy) - total_length(computing) + math.fsum(waits)


def _ready_s(
    box: Box,
    parents: Mapping[Address, Sequence[Address]],
    finished: Mapping[Address, float],
    submitted: Mapping[Address, float],
) -> float:
    known = [finished[p] for p in parents.get(box.address, ()) if p in finished]
    return max(known) if known else submitted.get(box.address, box.start_s)


def _idle(all_boxes: Sequence[Box], wall_s: float) -> dict[str, float]:
    idle = {}
    for gang in sorted({b.gang for b in all_boxes}):
        workers = sorted({b.worker for b in all_boxes if b.gang == gang})
        busy_s = math.fsum(
            total_length(
                merge_intervals((b.start_s, b.end_s) for b in all_boxes if b.gang == gang and b.worker == worker)
            )
            for worker in workers
        )
        idle[gang] = 1 - _ratio(busy_s, wall_s * len(workers))
    return idle


def _staleness(steps: Sequence[StepNumbers]) -> StalenessSummary:
    rows: Counter[int] = Counter()
    for step in steps:
        rows.update(step.staleness)
    mean = _ratio(sum(age * count for age, count in rows.items()), rows.total())
    return StalenessSummary(max(rows, default=0), mean, {str(age): rows[age] for age in sorted(rows)})


def _compare_evaluations(evaluations: Sequence[Evaluation]) -> EvalSummary | None:
    """Compare the first evaluation with the last one, on the prompts that both have. Return None if there is no
    evaluation, or if the two have no prompt in common."""
    if not evaluations:
        return None
    compared = compare_paired(evaluations[0].scores, evaluations[-1].scores)
    return (
        None
        if compared is None
        else EvalSummary(compared.mean_before, compared.mean_after, compared.num_prompts, compared.t_statistic)
    )


# ---- in words --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Headline:
    """One result of a run, with a label and an explanation."""

    key: str
    label: str
    value: str
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.value} ({self.detail})" if self.detail else self.value


def summary_lines(summary: Summary) -> list[Headline]:
    """Return the results of a run as text, for the terminal, the report and MLflow. Results that do not apply to the
    run are left out."""
    lines: list[Headline] = []
    if summary.eval is not None:
        e = summary.eval
        t = f", paired t {e.paired_t:.1f}" if e.paired_t is not None else ""
        change = f"{format_number(e.before)} → {format_number(e.after)}"
        lines.append(Headline("held_out", "held-out reward", change, f"{e.num_prompts} prompts{t}"))
    if summary.evaluations and len(summary.evaluations[-1].parts) > 1:
        first, last = summary.evaluations[0].parts, summary.evaluations[-1].parts
        parts = (
            f"{name} {format_number(first[name])} → {format_number(mean)}"
            for name, mean in last.items()
            if name in first
        )
        lines.append(Headline("held_out_parts", "held-out parts", ", ".join(parts)))
    if summary.best is not None:
        kl = "" if summary.best.kl is None else f", KL {format_number(summary.best.kl)}"
        detail = f"held-out reward {format_number(summary.best.reward)}{kl}"
        lines.append(Headline("best", "best version", f"v{summary.best.version}", detail))
    elif summary.evaluations:
        lines.append(Headline("best", "best version", "none", "no evaluated version is within evaluate.select.max_kl"))
    if summary.reward:
        change = f"{format_number(summary.reward[0])} → {format_number(summary.reward[-1])}"
        lines.append(Headline("score", "training reward", change, "first → last step"))
    if summary.kl_final is not None:
        kl = format_number(summary.kl_final)
        lines.append(Headline("kl", "KL to the reference", kl, "nats per response, last step"))
    before, after = summary.distinct_bigrams["before"], summary.distinct_bigrams["after"]
    if before is not None and after is not None:
        change = f"{before:.1%} → {after:.1%}"
        lines.append(Headline("bigrams", "distinct bigrams", change, "of the held-out responses"))
    if summary.steps:
        mean, most = summary.staleness.mean, summary.staleness.max
        lines.append(Headline("staleness", "staleness", f"{mean:.2f}", f"versions, mean; at most {most}"))
        rate, tokens = f"{summary.samples_per_s:.2f}", f"{summary.tokens_per_s:,.1f}"
        lines.append(Headline("speed", "samples/s", rate, f"{tokens} sampled tokens/s"))
    idle = ", ".join(f"{gang} {share:.0%}" for gang, share in sorted(summary.idle.items()))
    overlap = f"of the time two gangs were busy; idle: {idle or '-'}"
    lines.append(Headline("overlap", "overlap", f"{summary.overlap_fraction:.0%}", overlap))
    versions = summary.versions.get("weights", 0)
    lines.append(
        Headline("wall", "wall time", format_duration(summary.wall_s), f"{summary.steps} steps, {versions} versions")
    )
    stages = sorted(summary.stage_s.items(), key=lambda item: -item[1])
    seconds = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages)
    lines.append(Headline("stages", "seconds by stage", seconds))
    if summary.predictions:
        texts = (
            f"{stage} {format_number(was)} ({format_number(predicted)})"
            for stage, (predicted, was) in summary.predictions.items()
        )
        lines.append(Headline("predicted", "seconds of a step (predicted)", ", ".join(texts)))
    share = f"{summary.overhead_fraction:.1%}"
    lines.append(Headline("bookkeeping", "bookkeeping", share, "store, ledger and driver, of the time"))
    if summary.trainer_losses:
        times = f"{len(summary.trainer_losses)} times" if len(summary.trainer_losses) > 1 else "once"
        lost = f"{summary.trainer_lost_s:.1f} s until it trained again"
        lines.append(Headline("lost", "trainer lost", times, lost))
    if summary.alarms:
        rules = ", ".join(f"{rule} {count}" for rule, count in summary.alarms_by_rule.items())
        lines.append(Headline("alarms", "alarms", str(summary.alarms), f"{rules}; events.jsonl says when and why"))
    lines += [Headline("hint", "hint", hint) for hint in summary.hints]
    return lines

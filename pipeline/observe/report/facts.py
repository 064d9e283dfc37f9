"""The facts about a run in its report: settings, progress, and the main results with their standard errors. Pure
functions.

The held-out scores of the first and the last evaluated version are paired by prompt (pipeline/observe/evaluations.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.observe.evaluations import Evaluation, compare_paired, standard_error
from pipeline.observe.journal import Event, EventKind, is_finished
from pipeline.observe.rows import StageRows
from pipeline.observe.summary import Headline, Summary, summary_lines
from pipeline.observe.text import format_number
from storage.redaction import redacted_text

_MAX_FAILURES, _MAX_FAILURE_CHARS = 3, 300
"""Maximum number of failures that `failure_texts` returns, and maximum number of characters of each reason. The
incidents on the page have the full text."""


@dataclass(frozen=True)
class Fact:
    label: str
    value: str


def run_facts(
    settings: Mapping[str, Any], events: Sequence[Event], software: Mapping[str, str], hosts: Collection[str]
) -> list[Fact]:
    """Return the known facts about a run. `hosts`: the hosts of its workers."""
    s = settings
    critic = "" if s.get("ppo.advantage") == "gae" else ", no critic"
    facts = [
        ("model", _text(s.get("model.path"))),
        ("reference", _text(s.get("model.reference_path"))),
        ("prompts", f"{s.get('prompts.url')}, {s.get('prompts.held_out')} held out"),
        ("evaluated prompts", _text(s.get("evaluate.prompts.url"))),
        ("reward", _reward(s)),
        ("advantage", f"{s.get('ppo.advantage')}{critic}; KL coefficient {s.get('ppo.kl.coef')}"),
        ("rollout", f"{s.get('rollout.rows')} rows a step in {s.get('rollout.shards')} shards"),
        ("staleness", f"at most {s.get('staleness')} ({s.get('rollout.versions')} versions)"),
        ("sampling", f"up to {s.get('sampling.max_new_tokens')} tokens, temperature {s.get('sampling.temperature')}"),
        ("learning rate", f"{s.get('model.policy.lr')}, {s.get('model.policy.decay')}"),
        ("seed", _text(s.get("seed"))),
        *_times(events),
        ("workers' hosts", ", ".join(sorted(hosts))),
        ("software", ", ".join(f"{name} {version}" for name, version in software.items())),
    ]
    return [Fact(label, redacted_text(value)) for label, value in facts if value]


def progress_text(events: Sequence[Event], steps_done: int, steps: int) -> str:
    """Return a text about the progress of a run: "finished", "failed" or "not finished", and the number of steps."""
    if is_finished(events) or steps_done == steps:
        return f"finished: {steps_done} steps"
    given_up = _unresolved_failures(
        events, (EventKind.SUBMITTED, EventKind.FINISHED)
    )  # a node submitted again has not failed
    return f"{'failed' if given_up else 'not finished'}: {steps_done} of {steps} steps"


def failure_texts(events: Sequence[Event]) -> list[str]:
    """Return texts about the latest failures since the last driver started. They explain why an unfinished run ended. A
    failure is left out if its node succeeded later."""
    shown = _unresolved_failures(events, (EventKind.FINISHED,))[-_MAX_FAILURES:]
    return [
        f"{e.stage} of step {e.step} failed: {(e.detail or '').partition(chr(10))[0][:_MAX_FAILURE_CHARS]}"
        for e in shown
    ]


def _unresolved_failures(events: Sequence[Event], undone_by: Collection[EventKind]) -> list[Event]:
    """Return the latest failure of each node that failed since the last driver started. A node is left out if an event
    of a kind in `undone_by` followed its failure."""
    failed: dict[tuple[str | None, int | None, int], Event] = {}
    for event in events:
        node = (event.stage, event.step, event.shard or 0)
        if event.kind is EventKind.RUN_STARTED:
            failed.clear()
        elif event.kind is EventKind.FAILED:
            failed[node] = event
        elif event.kind in undone_by:
            failed.pop(node, None)
    return [*failed.values()]


def _times(events: Sequence[Event]) -> list[tuple[str, str]]:
    begun = [event for event in events if event.kind is EventKind.RUN_STARTED]
    if not begun:
        return []
    times = [("started", _clock(begun[0].t)), ("last event", _clock(max(event.t for event in events)))]
    times += [("resumed", ", ".join(_clock(event.t) for event in begun[1:]))] if len(begun) > 1 else []
    times += [("command", command) for command in dict.fromkeys(e.command for e in begun if e.command)]
    times += [("driver's host", ", ".join(dict.fromkeys(e.host for e in begun if e.host)))]
    times += [("code", ", ".join(dict.fromkeys(e.code for e in begun if e.code)))]
    return times


def _reward(settings: Mapping[str, Any]) -> str:
    kind = settings.get("reward.kind")
    if kind:
        return str(kind)
    parts = sorted({key.split(".")[2] for key in settings if key.startswith("reward.parts.") and key.count(".") > 2})
    weights = ((name, settings.get(f"reward.parts.{name}.weight")) for name in parts)
    return " + ".join(f"{weight} * {name}" for name, weight in weights)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _text(value: object) -> str:
    return "" if value is None else str(value)


# ---- headline --------------------------------------------------------------------------------------------


def headlines(
    summary: Summary, evaluations: Sequence[Evaluation], first: StageRows | None, last: StageRows | None
) -> list[Headline]:
    """Return the results to show at the top of a run's report.

    Args:
        summary: the summary of the run.
        evaluations: the complete evaluations, in order of version.
        first: rows of the first finished step, if they are stored.
        last: rows of the last finished step, if they are stored."""
    lines = _held_out(evaluations)
    for line in summary_lines(summary):
        if line.key == "score":
            parts = (
                _plus_minus(summary.reward[0], _score_error(first)),
                _plus_minus(summary.reward[-1], _score_error(last)),
            )
            lines.append(replace(line, value=" → ".join(parts), detail=f"{line.detail}, ± standard error"))
        elif line.key == "kl":
            error = None if last is None or last.kl is None else standard_error(last.kl)
            lines.append(replace(line, value=_plus_minus(summary.kl_final or 0.0, error)))
        elif line.key not in ("held_out", "held_out_parts", "bigrams", "stages"):
            lines.append(line)
    return lines


def _held_out(evaluations: Sequence[Evaluation]) -> list[Headline]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    errors = [standard_error(e.scores.values()) for e in (first, last)]
    if last is first:
        return [Headline("held_out", "held-out reward", _plus_minus(first.mean, errors[0]), _versions(first))]
    value = f"{_plus_minus(first.mean, errors[0])} → {_plus_minus(last.mean, errors[1])}"
    lines = [Headline("held_out", "held-out reward", value, f"v{first.version} → {_versions(last)}")]
    change = compare_paired(first.scores, last.scores)
    if change is not None:
        t = "-" if change.t_statistic is None else f"{change.t_statistic:.1f}"
        text = f"paired t {t} over {change.num_prompts} prompts"
        lines.append(Headline("gain", "held-out gain", _plus_minus(change.gain, change.error, with_sign=True), text))
    if last.kl is not None:
        lines.append(
            Headline("held_out_kl", "held-out KL", format_number(last.kl), f"nats per response, v{last.version}")
        )
    return lines


def _versions(evaluation: Evaluation) -> str:
    return f"v{evaluation.version}, {len(evaluation.scores)} prompts, ± standard error"


def _score_error(rows: StageRows | None) -> float | None:
    return None if rows is None or rows.scores is None else standard_error(rows.scores.scores)


def _plus_minus(value: float, error: float | None, *, with_sign: bool = False) -> str:
    shown = format_number(value, with_sign=with_sign)
    return shown if error is None else f"{shown} ± {format_number(error)}"

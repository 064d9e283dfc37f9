"""What a run is, in a few lines: for who opens its report a year later. Pure functions. May import this folder and
pipeline.observe.{journal, redaction}."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.redaction import without_credentials

_MOST_FAILURES, _LONGEST = 3, 300
"""The last ones, and so many characters of each: all of it is below, among what went wrong."""


@dataclass(frozen=True)
class Fact:
    label: str
    value: str


def run_facts(
    settings: Mapping[str, Any], events: Sequence[Event], software: Mapping[str, str], hosts: Collection[str]
) -> list[Fact]:
    """Those that are known. `hosts`: of the workers."""
    s = settings
    critic = "" if s.get("ppo.advantage") == "gae" else ", no critic"
    found = [
        ("model", _text(s.get("model.path"))),
        ("reference", _text(s.get("model.reference_path"))),
        ("prompts", f"{s.get('prompts.url')}, {s.get('prompts.held_out')} held out"),
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
    return [Fact(label, without_credentials(value)) for label, value in found if value]


def state_of(events: Sequence[Event], steps_done: int, steps: int) -> str:
    """How far a run came."""
    finished = False
    for event in events:
        if event.kind in (EventKind.RUN_STARTED, EventKind.RUN_FINISHED):
            finished = event.kind is EventKind.RUN_FINISHED
    if finished or steps_done == steps:
        return f"finished: {steps_done} steps"
    given_up = _failed(events, (EventKind.SUBMITTED, EventKind.FINISHED))  # what is tried again has not ended the run
    return f"{'failed' if given_up else 'not finished'}: {steps_done} of {steps} steps"


def failures(events: Sequence[Event]) -> list[str]:
    """What failed since the last driver began and was not made again: why a run that is not finished has ended."""
    shown = _failed(events, (EventKind.FINISHED,))[-_MOST_FAILURES:]
    return [f"{e.stage} of step {e.step} failed: {(e.detail or '').partition(chr(10))[0][:_LONGEST]}" for e in shown]


def _failed(events: Sequence[Event], undone_by: Collection[EventKind]) -> list[Event]:
    """By node the last failure since a driver began, unless something came after it that undoes it."""
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
    found = [("started", _clock(begun[0].t)), ("last event", _clock(max(event.t for event in events)))]
    found += [("resumed", ", ".join(_clock(event.t) for event in begun[1:]))] if len(begun) > 1 else []
    found += [("command", command) for command in dict.fromkeys(e.command for e in begun if e.command)]
    found += [("driver's host", ", ".join(dict.fromkeys(e.host for e in begun if e.host)))]
    found += [("code", ", ".join(dict.fromkeys(e.code for e in begun if e.code)))]
    return found


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

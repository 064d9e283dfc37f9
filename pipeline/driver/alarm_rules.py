"""When an alarm is raised: pure functions of a step's metrics, or of who has been quiet since when. No clock, no I/O.

    a step's metrics ──► which rules hold ──► how many steps in a row ──► the step at which that is enough: an alarm
    who is quiet now ──► since when ──► the look at which that is too long: an alarm

A rule that goes on holding raises nothing more; after it has not held once it may again. A metric that a step does not
have says nothing: the count stays. May import pipeline.config.alarms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipeline.config.alarms import AlarmsConfig


@dataclass(frozen=True)
class Alarm:
    rule: str
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Rule:
    """A rule about steps, as one of them has it."""

    name: str
    holds: bool
    steps: int
    """In a row, after which it is an alarm."""
    text: str


@dataclass(frozen=True)
class Quiet:
    """Who has been quiet, since when (in seconds of one clock), and who of them is known to be for too long."""

    since: Mapping[str, float] = field(default_factory=dict)
    reported: frozenset[str] = frozenset()


def step_rules(step: int, metrics: Mapping[str, float], limits: AlarmsConfig, staleness: int) -> list[Rule]:
    """The rules that a step's metrics say something of. `staleness`: the bound, in versions."""
    rules = []
    stale = metrics.get("staleness/mean")
    if limits.staleness_steps is not None and stale is not None and staleness > 0:
        text = f"every token was at the staleness bound of {staleness} versions (staleness/mean)"
        rules.append(Rule("staleness", stale >= staleness, limits.staleness_steps, text))
    entropy = metrics.get("policy/entropy")
    if limits.entropy_below is not None and entropy is not None:
        text = f"policy/entropy is {entropy:.3g} nats a token, below {limits.entropy_below:g} (alarms.entropy_below)"
        rules.append(Rule("entropy", not entropy >= limits.entropy_below, limits.steps, text))
    kl = metrics.get("kl/ref_per_token")
    if limits.kl_above is not None and kl is not None:
        text = f"kl/ref_per_token is {kl:.3g} nats, above {limits.kl_above:g} (alarms.kl_above)"
        rules.append(Rule("kl", not kl <= limits.kl_above, limits.steps, text))
    explained = metrics.get("critic/explained_variance")
    if limits.critic_steps is not None and explained is not None:
        text = f"critic/explained_variance is {explained:.3g}: the critic is worse than a constant"
        rules.append(Rule("critic", not explained >= 0, limits.critic_steps, text))
    moved, ratio = metrics.get("policy/approx_kl"), metrics.get("policy/ratio_max")
    if step < limits.first_steps and moved is not None and ratio is not None:
        far = not (moved <= limits.first_approx_kl_above and ratio <= limits.first_ratio_above)
        text = (
            f"update {step} moved the policy by {moved:.3g} nats a token with a largest ratio of {ratio:.3g} "
            "(alarms.first_approx_kl_above, alarms.first_ratio_above): is the learning rate too high?"
        )
        rules.append(Rule("first_updates", far, 1, text))
    return rules


def count(before: Mapping[str, int], step: int, rules: Collection[Rule]) -> tuple[dict[str, int], list[Alarm]]:
    """By rule: in how many steps in a row it has held, this one included; and the alarms of this step."""
    after = {**before, **{rule.name: before.get(rule.name, 0) + 1 if rule.holds else 0 for rule in rules}}
    alarms = []
    for rule in rules:
        if after[rule.name] == rule.steps:
            times = f", {rule.steps} steps in a row" if rule.steps > 1 else ""
            alarms.append(Alarm(rule.name, f"{rule.text}{times}", step))
    return after, alarms


def look(before: Quiet, now: float, quiet: Collection[str], limit_s: float) -> tuple[Quiet, list[str]]:
    """Who is quiet now, since when, and who of them has been for `limit_s` seconds from this look on."""
    since = {name: before.since.get(name, now) for name in quiet}
    overdue = [name for name in sorted(since) if now - since[name] >= limit_s and name not in before.reported]
    return Quiet(since, (before.reported & since.keys()) | set(overdue)), overdue


def heard(before: Quiet, name: str) -> Quiet:
    """Somebody was not quiet just now."""
    since = {other: t for other, t in before.since.items() if other != name}
    return Quiet(since, before.reported - {name})

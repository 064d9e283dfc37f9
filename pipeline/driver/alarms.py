"""Alarms of a run. Rules find an alarm. `Alarms` reports it to the journal, the display and MLflow, and may end the
run.

    metrics of a step ──► violated rules ──► steps in a row ──► limit: alarm ─┬─► journal, display, MLflow's tags
    gang or worker without progress ──► seconds ──► limit: alarm ─────────────┴─► listed in `alarms.stop`: run ends

The rules are pure functions, without clock or I/O. A rule that stays violated raises no second alarm. The rule can
raise another alarm after a step at which it was not violated. A step without the rule's metric does not change the
rule's count of steps in a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipeline.config.run import RunConfig
from pipeline.config.sections import AlarmsConfig
from pipeline.errors import StageFailed
from pipeline.graph.display import ObservedDispatch
from pipeline.observe.journal import EventKind, Journal
from pipeline.observe.learning import ALARM_STEPS, check_learning
from pipeline.observe.live import Progress
from pipeline.observe.metric_catalogue import MIN_EXPLAINED_VARIANCE
from pipeline.observe.tracking import Tracker
from pipeline.workers.messages import worker_name
from stages.models.protocol import Role

FIRST_STEPS = 3
"""Number of steps at the start of a run that the rule first_updates looks at."""
FIRST_STEPS_MAX_APPROX_KL, FIRST_STEPS_MAX_RATIO = 0.2, 20.0
"""Limits of rule first_updates on `policy/approx_kl` (nats per token) and `policy/ratio_max` of one update."""


class AlarmStop(StageFailed):
    """An alarm that `alarms.stop` lists ended the run. Commits stay, and the run can be resumed."""


class Alarms:
    """Owns the state of a run's alarm rules."""

    def __init__(
        self, config: RunConfig, dispatch: ObservedDispatch, journal: Journal, progress: Progress, tracker: Tracker
    ) -> None:
        self._limits = config.alarms
        self._staleness_bound = config.staleness
        self._fixed_length = config.sampling.has_fixed_length
        self._critic_warmup_steps = config.ppo.critic_warmup_steps
        self._trainer_gang = config.placement.roles[Role.POLICY.value]
        self._engine_gang = config.placement.roles[Role.GENERATE.value]
        self._dispatch = dispatch
        self._journal = journal
        self._progress = progress
        self._tracker = tracker
        self._steps_in_a_row: dict[str, int] = {}
        self._idle_gangs = self._engines_without_progress = WithoutProgress()

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the rules about steps with the metrics of a finished step. Raises AlarmStop if an alarm is listed in
        `alarms.stop`."""
        results = check_learning(
            metrics,
            self._fixed_length,
            trains_only_critic=step < self._critic_warmup_steps,
            is_trained=step - self._staleness_bound > self._critic_warmup_steps,
        )
        rules = evaluate_step_rules(step, metrics, self._limits, self._staleness_bound)
        rules += [Rule(one.rule, one.is_violated, one.alarm_steps, one.text) for one in results]
        self._steps_in_a_row, alarms = count_violations(self._steps_in_a_row, step, rules)
        for alarm in alarms:
            self._raise_alarm(alarm)

    def on_worker_finished(self, worker: str) -> None:
        """Record that a worker finished a node."""
        self._engines_without_progress = remove_name(self._engines_without_progress, worker)

    def check_time(self, now: float) -> None:
        """Check the rules about time. `now`: seconds of the driver's clock, which stops while the driver is suspended.
        Raises AlarmStop if an alarm is listed in `alarms.stop`."""
        if self._limits.trainer_idle_s is not None:
            idle = [self._trainer_gang] if self._dispatch.is_idle(self._trainer_gang) else []
            self._idle_gangs, overdue = update_without_progress(
                self._idle_gangs, now, idle, self._limits.trainer_idle_s
            )
            wait = self._dispatch.find_waits().get(self._trainer_gang) if overdue else None
            if wait is not None:  # None at a run's end, when the gang has no node left
                limit = f"{self._limits.trainer_idle_s:g} s (alarms.trainer_idle_s)"
                self._raise_alarm(
                    Alarm("trainer_idle", f"gang {self._trainer_gang} has had nothing to do for {limit}: {wait}")
                )
        if self._limits.engine_silent_s is not None:
            busy = {
                worker_name(self._engine_gang, replica) for replica in self._dispatch.busy_replicas(self._engine_gang)
            }
            self._engines_without_progress, overdue = update_without_progress(
                self._engines_without_progress, now, busy, self._limits.engine_silent_s
            )
            for worker in overdue:
                limit = f"{self._limits.engine_silent_s:g} s (alarms.engine_silent_s)"
                self._raise_alarm(Alarm("engine_silent", f"{worker} has work, and has finished none of it for {limit}"))

    def _raise_alarm(self, alarm: Alarm) -> None:
        text = f"{alarm.rule}: {alarm.text}"
        self._journal.append_now(EventKind.ALARM, step=alarm.step, rule=alarm.rule, detail=alarm.text)
        self._progress.print_alarm(text)
        self._tracker.set_tags({f"alarm.{alarm.rule}": alarm.text})
        if alarm.rule in self._limits.stop:
            raise AlarmStop(f"{text}. That ends the run (alarms.stop)")


# ---- Rules -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alarm:
    rule: str
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Rule:
    """The result of an alarm rule for one step: whether the step violates the rule, and the text of the alarm."""

    name: str
    is_violated: bool
    alarm_steps: int
    """Number of steps in a row in which the rule must be violated to raise an alarm."""
    text: str


@dataclass(frozen=True)
class WithoutProgress:
    """The gangs or workers that make no progress now."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Name -> time at which the gang or worker was first seen without progress, in seconds of the caller's clock."""
    reported: frozenset[str] = frozenset()
    """Names of the gangs or workers that have raised an alarm, and have made no progress since then."""


def evaluate_step_rules(step: int, metrics: Mapping[str, float], limits: AlarmsConfig, staleness: int) -> list[Rule]:
    """Return the rules that apply to a step, each with its result. A rule applies if it is switched on in `limits` and
    the step has the rule's metrics. The rule first_updates is always switched on, but only for the first FIRST_STEPS
    steps. The rule staleness applies only if `staleness` is above 0. `staleness`: the run's staleness bound, in
    versions."""
    rules = []
    stale = metrics.get("staleness/mean")
    if limits.staleness_steps is not None and stale is not None and staleness > 0:
        text = f"every token was at the staleness bound of {staleness} versions (staleness/mean)"
        rules.append(Rule("staleness", stale >= staleness, limits.staleness_steps, text))
    entropy = metrics.get("policy/entropy")
    if limits.entropy_below is not None and entropy is not None:
        text = f"policy/entropy is {entropy:.3g} nats a token, below {limits.entropy_below:g} (alarms.entropy_below)"
        rules.append(Rule("entropy", not entropy >= limits.entropy_below, ALARM_STEPS, text))
    kl = metrics.get("kl/ref_per_token")
    if limits.kl_above is not None and kl is not None:
        text = f"kl/ref_per_token is {kl:.3g} nats, above {limits.kl_above:g} (alarms.kl_above)"
        rules.append(Rule("kl", not kl <= limits.kl_above, ALARM_STEPS, text))
    explained = metrics.get("critic/explained_variance")
    if limits.critic_steps is not None and explained is not None:
        bad = not explained >= MIN_EXPLAINED_VARIANCE
        text = f"critic/explained_variance is {explained:.3g}: the critic is worse than a constant"
        if metrics.get("critic/lr") == 0:
            bad, text = True, "critic/lr is 0: the critic learns nothing"
        rules.append(Rule("critic", bad, limits.critic_steps, text))
    moved, ratio = metrics.get("policy/approx_kl"), metrics.get("policy/ratio_max")
    if step < FIRST_STEPS and moved is not None and ratio is not None:
        far = not (moved <= FIRST_STEPS_MAX_APPROX_KL and ratio <= FIRST_STEPS_MAX_RATIO)
        text = (
            f"update {step} moved the policy by {moved:.3g} nats a token "
            f"(policy/approx_kl; {FIRST_STEPS_MAX_APPROX_KL} is much) "
            f"with a largest ratio of {ratio:.3g} ({FIRST_STEPS_MAX_RATIO:g} is much): is the learning rate too high?"
        )
        rules.append(Rule("first_updates", far, 1, text))
    return rules


def count_violations(
    before: Mapping[str, int], step: int, rules: Collection[Rule]
) -> tuple[dict[str, int], list[Alarm]]:
    """Return rule name -> number of steps in a row, up to this step, in which the rule was violated. Also return the
    alarms of this step. `before`: the same mapping up to the previous step."""
    after = {**before, **{rule.name: before.get(rule.name, 0) + 1 if rule.is_violated else 0 for rule in rules}}
    alarms = []
    for rule in rules:
        if after[rule.name] == rule.alarm_steps:
            times = f", {rule.alarm_steps} steps in a row" if rule.alarm_steps > 1 else ""
            alarms.append(Alarm(rule.name, f"{rule.text}{times}", step))
    return after, alarms


def update_without_progress(
    before: WithoutProgress, now: float, quiet: Collection[str], limit_s: float
) -> tuple[WithoutProgress, list[str]]:
    """Return the state after this check, and the names that must raise an alarm now. These names have made no progress
    for `limit_s` seconds, and are not reported yet. `before`: the state before this check. `quiet`: the names that make
    no progress now."""
    since = {name: before.since.get(name, now) for name in quiet}
    overdue = [name for name in sorted(since) if now - since[name] >= limit_s and name not in before.reported]
    return WithoutProgress(since, (before.reported & since.keys()) | set(overdue)), overdue


def remove_name(before: WithoutProgress, name: str) -> WithoutProgress:
    """Return a state without the gang or worker `name`, because it has made progress. If it stops again, it can raise
    another alarm."""
    since = {other: t for other, t in before.since.items() if other != name}
    return WithoutProgress(since, before.reported - {name})

"""Alarms of a run: what the rules raise reaches everybody who should know, and may end the run.

    a step's metrics, every look of the loop ──► rules ──► journal, display, MLflow's tag ──► `alarms.stop`: it ends

May import pipeline.config, pipeline.graph.dispatch, pipeline.observe, pipeline.driver.{alarm_rules, context}.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.run import RunConfig
from pipeline.driver.alarm_rules import Alarm, Quiet, count, heard, look, step_rules
from pipeline.driver.context import StageFailed
from pipeline.graph.dispatch import Dispatch
from pipeline.observe.journal import EventKind, Journal
from pipeline.observe.live import Progress
from pipeline.observe.tracking import Tracker
from pipeline.workers.messages import worker_name
from stages.models.protocol import Role


class AlarmStop(StageFailed):
    """An alarm of `alarms.stop`: what is committed stays, and the run can be resumed."""


class Alarms:
    """Owns what a run's rules have seen so far."""

    def __init__(
        self, config: RunConfig, dispatch: Dispatch, journal: Journal, progress: Progress, tracker: Tracker
    ) -> None:
        self._limits = config.alarms
        self._bound = config.staleness
        self._trainer = config.placement.roles[Role.POLICY.value]
        self._engines = config.placement.roles[Role.GENERATE.value]
        self._dispatch = dispatch
        self._journal = journal
        self._progress = progress
        self._tracker = tracker
        self._in_a_row: dict[str, int] = {}
        self._idle = self._silent = Quiet()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over. Raises AlarmStop."""
        rules = step_rules(step, metrics, self._limits, self._bound)
        self._in_a_row, alarms = count(self._in_a_row, step, rules)
        for alarm in alarms:
            self._raise(alarm)

    def finished(self, worker: str) -> None:
        """A worker has finished a node."""
        self._silent = heard(self._silent, worker)

    def look(self, now: float) -> None:
        """Time has gone on; `now` in seconds, of a clock that stands still while the driver does. Raises AlarmStop."""
        if self._limits.trainer_idle_s is not None:
            idle = [self._trainer] if self._dispatch.idle(self._trainer) else []
            self._idle, overdue = look(self._idle, now, idle, self._limits.trainer_idle_s)
            wait = self._dispatch.waits().get(self._trainer) if overdue else None
            if wait is not None:  # at a run's end it has no node left
                limit = f"{self._limits.trainer_idle_s:g} s (alarms.trainer_idle_s)"
                self._raise(Alarm("trainer_idle", f"gang {self._trainer} has had nothing to do for {limit}: {wait}"))
        if self._limits.engine_silent_s is not None:
            busy = {worker_name(self._engines, replica) for replica in self._dispatch.busy_replicas(self._engines)}
            self._silent, overdue = look(self._silent, now, busy, self._limits.engine_silent_s)
            for worker in overdue:
                limit = f"{self._limits.engine_silent_s:g} s (alarms.engine_silent_s)"
                self._raise(Alarm("engine_silent", f"{worker} has work, and has finished none of it for {limit}"))

    def _raise(self, alarm: Alarm) -> None:
        text = f"{alarm.rule}: {alarm.text}"
        self._journal.now(EventKind.ALARM, step=alarm.step, rule=alarm.rule, detail=alarm.text)
        self._progress.alarm(text)
        self._tracker.tags({f"alarm.{alarm.rule}": alarm.text})
        if alarm.rule in self._limits.stop:
            raise AlarmStop(f"{text}. That ends the run (alarms.stop)")

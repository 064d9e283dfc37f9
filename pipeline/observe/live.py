"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere (CI logs).

May import rich, pipeline.observe.journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.observe.journal import Event, EventKind

HEADLINE = (("reward/mean", "reward"), ("kl/ref", "KL"), ("staleness/max", "staleness"))
"""(name of the step's metric, what it is called on screen)."""


@dataclass(frozen=True)
class Doing:
    """A node that a worker was handed and has not ended."""

    gang: str
    stage: str
    step: int
    shard: int
    since: float


def time_left(durations_s: list[float], steps_left: int) -> float | None:
    """Seconds to go: the mean of the last five steps times the steps left. None before the first step."""
    recent = durations_s[-5:]
    return sum(recent) / len(recent) * steps_left if recent else None


def clock(seconds: float | None) -> str:
    """h:mm:ss, or m:ss below an hour; "-" for None."""
    if seconds is None:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


class Progress:
    """Owns the live display of a run. `links` are shown as (label, address or command), e.g. the Dask dashboard and
    how to open MLflow. `first_step` is where a resumed run goes on."""

    def __init__(
        self,
        run_name: str,
        num_steps: int,
        links: Mapping[str, str],
        console: Console | None = None,
        first_step: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run_name = run_name
        self._num_steps = num_steps
        self._links = dict(links)
        self._console = console or Console()
        self._now = now
        self._done = first_step
        self._started = self._last_step_at = now()
        self._begun = False
        self._durations_s: list[float] = []
        self._metrics: dict[str, float] = {}
        self._held_out: list[tuple[int, float]] = []
        self._open: dict[tuple[str, str, int, int], Doing] = {}
        self._workers: dict[str, str] = {}
        self._live = (
            Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
            if self._console.is_terminal
            else None
        )

    def event(self, event: Event) -> None:
        """Follows what each worker is doing: from the moment a node is handed to it, since the report that it has begun
        comes with its result. Nodes that run ahead of their parents are submitted without a worker, and not shown."""
        if event.kind is EventKind.SUBMITTED and not self._begun:
            self._begun, self._last_step_at = True, self._now()  # the workers' start is no part of the first step
        if event.kind is EventKind.WARNED:
            self._print(f"WARNING: {event.detail}")
        if event.kind is EventKind.ENGINE:
            self._print(f"{event.detail}")
        if event.worker is None:
            return
        gang = event.gang or event.worker
        self._workers[event.worker] = gang
        if event.kind is EventKind.GANG_LOST:
            self._open = {key: doing for key, doing in self._open.items() if key[0] != event.worker}
        if event.stage is None or event.step is None:
            return
        key = (event.worker, event.stage, event.step, event.shard or 0)
        if event.kind in (EventKind.SUBMITTED, EventKind.STARTED):
            self._open[key] = Doing(gang, event.stage, event.step, event.shard or 0, event.t)
        elif event.kind in (EventKind.FINISHED, EventKind.FAILED):
            self._open.pop(key, None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        now = self._now()
        self._durations_s.append(now - self._last_step_at)
        self._last_step_at = now
        self._done = step + 1
        self._metrics = dict(metrics)
        if self._live is None:
            numbers = "  ".join(f"{label} {value}" for label, value in self._numbers())
            left = clock(time_left(self._durations_s, self._num_steps - self._done))
            self._print(f"step {self._done}/{self._num_steps}  {numbers}  {self._durations_s[-1]:.1f} s  left {left}")

    def evaluation(self, version: int, mean: float) -> None:
        """The held-out prompts were scored with weights of `version`."""
        self._held_out.append((version, mean))
        if self._live is None:
            self._print(f"held-out reward {mean:.4g} at version {version}")

    def alarm(self, text: str) -> None:
        """Something is wrong that does not end the run: it stays on the screen, above the panel."""
        self._console.print(Text(f"ALARM: {text}", style="bold red"), soft_wrap=True)

    def render(self) -> RenderableType:
        """The live panel as it is now."""
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        elapsed = self._now() - self._started
        left = time_left(self._durations_s, self._num_steps - self._done)
        head.add_row(
            Text(f"{self._run_name}  step {self._done}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._done),
            f"{clock(elapsed)} gone, {clock(left)} left",
        )
        numbers = Text("   ").join([Text.assemble((f"{label} ", "dim"), (v, "bold")) for label, v in self._numbers()])
        parts: list[RenderableType] = [head, numbers, self._workers_table()]
        parts += [Text(f"{label}: {address}", style="dim", overflow="fold") for label, address in self._links.items()]
        return Group(*parts)

    def __enter__(self) -> Progress:
        if self._live is None:
            for label, address in self._links.items():
                self._print(f"{label}: {address}")
        else:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _numbers(self) -> list[tuple[str, str]]:
        shown = [(label, f"{self._metrics[name]:.4g}") for name, label in HEADLINE if name in self._metrics]
        if self._held_out:
            (_, first), (version, last) = self._held_out[0], self._held_out[-1]
            before = f" (v0: {first:.4g})" if len(self._held_out) > 1 else ""
            shown.append(("held-out", f"{last:.4g} at v{version}{before}"))
        return shown

    def _workers_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for worker, gang in sorted(self._workers.items(), key=lambda item: (item[1], item[0])):
            doing = [d for key, d in self._open.items() if key[0] == worker]
            what = ", ".join(
                f"{d.stage} {d.step}.{d.shard} ({max(0.0, self._now() - d.since):.0f} s)"
                for d in sorted(doing, key=lambda d: d.since)
            )
            now = Text(what) if what else Text("idle", style="dim")
            table.add_row(Text(gang, style="cyan"), Text(worker, style="dim"), now)
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

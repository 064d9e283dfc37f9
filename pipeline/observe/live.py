"""The display of a run while it runs. On a terminal it is a live panel. Elsewhere, for example in CI logs, it is one
plain line per step. With `--json-lines` it is one JSON object per line, for programs (docs/running.md lists the
fields).

    loading models: train-0, 6 s
    demo  step 12/100  ━━━━━━━────────────────  0:48 gone, 5:52 left
    reward 0.21  ▂▃▂▄▅▆▇█   KL 0.8   2.1 responses/s   held-out 0.25 at v10 (v0: 0.12)
    approx_kl 0.31 > 0.1                                                    (red)
    generate   generate 13.0 (4 s), generate 13.1 (1 s)
    score      score 12.1 (2 s), 3 queued
    train      idle: update_policy 12.0 waits for score 12.1 (running)
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.observe.graph_view import GangView, work_text
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.learning import TRUNCATED_FRACTION
from pipeline.observe.metric_catalogue import RECENT_STEPS, find_unhealthy_numbers, terminal_numbers
from pipeline.observe.text import escape_control_characters, plain_text, sparkline
from storage.redaction import redacted, redacted_text

UNPROVEN_PREFIX, NOTHING_UNPROVEN = ". Not proven: ", "nothing"
"""Two constants for the text of an engine event (`EventKind.ENGINE`). The text lists the capabilities of the engine,
then `UNPROVEN_PREFIX`, then the guarantees that are not proven for the run. If all guarantees are proven,
`NOTHING_UNPROVEN` follows the prefix."""
_SHOWN_NODES = 3
"""Maximum number of nodes per gang that are listed by name. For all further nodes, only their number is shown."""


def estimate_seconds_left(durations_s: list[float], steps_left: int) -> float | None:
    """Return the estimated number of seconds left: the mean duration of the last five steps times the number of steps
    left. None before the end of the first step."""
    recent = durations_s[-5:]
    return sum(recent) / len(recent) * steps_left if recent else None


def format_clock(seconds: float | None) -> str:
    """Return seconds as h:mm:ss, or as m:ss if they are less than an hour. Return "-" for None."""
    if seconds is None:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


@dataclass(frozen=True)
class Screen:
    """The console on which a run is shown."""

    console: Console
    json_lines: bool = False
    """True to print each event as a JSON object on a line of its own, for a program that reads the output."""
    now: Callable[[], float] = time.time

    def print_event(self, kind: str, line: str | Text, **fields: object) -> None:
        """Print a line. If a program reads the output, print a JSON object instead: the time, the kind of the event and
        the `fields`. NaN and infinity become null."""
        if self.json_lines:
            about = redacted(_finite({"t": round(self.now(), 3), "event": kind, **fields}))
            line = json.dumps(about, ensure_ascii=False, allow_nan=False)
        elif isinstance(line, str):
            line = escape_control_characters(redacted_text(line))
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """The live display of a run.

    Args:
        links: label -> address or command, for example the address of the Dask dashboard.
        first_step: the step at which a resumed run continues.
        workers: name of each worker that will be built -> name of its gang.
        rebuilt_together: names of the gangs whose workers are lost and rebuilt together.
        json_lines: True if a program reads the output.
        has_fixed_length: True if the config makes all responses end at the length limit. Then the fraction of truncated
            responses is not shown."""

    def __init__(
        self,
        run_name: str,
        num_steps: int,
        links: Mapping[str, str],
        console: Console | None = None,
        first_step: int = 0,
        now: Callable[[], float] = time.time,
        workers: Mapping[str, str] | None = None,
        rebuilt_together: Collection[str] = (),
        json_lines: bool = False,
        has_fixed_length: bool = False,
    ) -> None:
        self._has_fixed_length = has_fixed_length
        self._run_name = run_name
        self._num_steps = num_steps
        self._links = dict(links)
        self._console = console or Console()
        self._now = now
        self._done = first_step
        self._started = self._last_step_at = now()
        self._begun = False
        self._durations_s: list[float] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=RECENT_STEPS)
        self._first_entropy: float | None = None
        self._held_out: list[tuple[int, float]] = []
        self._gangs = dict(workers or {})
        """Worker that is up or expected to come up -> its gang."""
        self._together = frozenset(rebuilt_together)
        self._loading = dict.fromkeys(self._gangs, self._started)
        """Worker that is loading its models -> time since when it counts as loading: the start of the display, or the
        loss of the worker."""
        self._views: Mapping[str, GangView] = {}
        self._screen = Screen(self._console, json_lines, now)
        terminal = self._console.is_terminal and not json_lines
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4) if terminal else None

    @property
    def has_live_panel(self) -> bool:
        """True if there is a live panel. It shows the views that are passed to `show_gangs`."""
        return self._live is not None

    def on_event(self, event: Event) -> None:
        """Update the state of the workers with an event, and print the messages about the event."""
        if event.kind is EventKind.SUBMITTED and not self._begun:
            self._begun, self._last_step_at = True, self._now()  # the first step's time excludes the workers' start
            if self._gangs and not self.has_live_panel:
                seconds = self._now() - self._started
                self._print("ready", f"ready after {seconds:.1f} s", seconds=round(seconds, 3))
        if event.kind is EventKind.WARNED:
            self._print("warning", f"WARNING: {event.detail}", text=event.detail)
        if event.kind is EventKind.ENGINE:
            self._print_engine_guarantees(event.detail or "")
        if event.worker is not None:
            gang = self._gangs[event.worker] = event.gang or event.worker
            self._update_worker(event, gang, event.worker)

    def _update_worker(self, event: Event, gang: str, worker: str) -> None:
        if event.kind is EventKind.GANG_LOST:
            self._loading = {**self._loading, worker: event.t}
            text = f"{worker} lost at step {self._done}: {event.detail}"
            self._print("lost", text, worker=worker, step=self._done, text=event.detail)
        elif event.kind is EventKind.GANG_BUILT:
            up = {name for name in self._loading if self._gangs.get(name) == gang and gang in self._together} | {worker}
            self._loading = {name: since for name, since in self._loading.items() if name not in up}

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step."""
        now = self._now()
        self._durations_s.append(now - self._last_step_at)
        self._last_step_at = now
        self._done = step + 1
        self._recent.append(
            {name: x for name, x in metrics.items() if not (self._has_fixed_length and name == TRUNCATED_FRACTION)}
        )
        if self._first_entropy is None:
            self._first_entropy = metrics.get("policy/entropy")
        if not self.has_live_panel:
            red = find_unhealthy_numbers(self._recent, self._first_entropy)
            left_s = estimate_seconds_left(self._durations_s, self._num_steps - self._done)
            numbers = "  ".join(f"{label} {value}".strip() for label, value in self._step_numbers())
            left = format_clock(left_s)
            text = f"step {self._done}/{self._num_steps}  {numbers}  {self._durations_s[-1]:.1f} s  left {left}"
            self._print(
                "step", text + "".join(f"  !! {finding}" for finding in red), step=step, steps=self._num_steps,
                seconds=round(self._durations_s[-1], 3), left_s=left_s, metrics=dict(metrics), unhealthy=red,
            )  # fmt: skip

    def on_evaluation(self, version: int, mean: float) -> None:
        """Show the mean score of an evaluated version. A resumed run shows its earlier evaluations first."""
        self._held_out.append((version, mean))
        if not self.has_live_panel:
            self._print("evaluation", f"held-out reward {mean:.4g} at version {version}", version=version, reward=mean)

    def show_gangs(self, views: Sequence[GangView]) -> None:
        """Show the current work of each gang, or the reason why it waits."""
        self._views = {view.name: view for view in views}

    def show_link(self, label: str, address: str) -> None:
        """Show an address or a command under a label."""
        self._links[label] = address
        if not self.has_live_panel:
            self._print("link", f"{label}: {address}", label=label, address=address)

    def on_recovery(self, text: str) -> None:
        """Print `text`, which says that a lost worker has trained again."""
        self._print("recovered", text, text=text)

    def print_alarm(self, text: str) -> None:
        """Print an alarm. On a terminal it stays above the live panel."""
        self._print("alarm", plain_text(f"ALARM: {text}", "bold red"), text=text)

    def render(self) -> RenderableType:
        """Return the current live panel."""
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        elapsed = self._now() - self._started
        left = estimate_seconds_left(self._durations_s, self._num_steps - self._done)
        head.add_row(
            plain_text(f"{self._run_name}  step {self._done}/{self._num_steps}", "bold"),
            ProgressBar(total=self._num_steps, completed=self._done),
            f"{format_clock(elapsed)} gone, {format_clock(left)} left",
        )
        parts: list[RenderableType] = [head]
        if self._loading and not self._begun:
            names = ", ".join(sorted(self._loading))
            parts.append(plain_text(f"loading models: {names}, {elapsed:.0f} s", "yellow"))
        rewards = [metrics["reward/mean"] for metrics in tuple(self._recent) if "reward/mean" in metrics]
        numbers = [Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in self._step_numbers()]
        if len(rewards) > 1:
            numbers.insert(1, Text(sparkline(rewards), style="green"))
        parts += [Text("   ").join(numbers), self._gangs_table()]
        red = find_unhealthy_numbers(tuple(self._recent), self._first_entropy)
        if red:
            parts.insert(-1, plain_text("   ".join(red), "bold red"))
        parts += [plain_text(f"{label}: {address}", "dim") for label, address in tuple(self._links.items())]
        return Group(*parts)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
            return self
        for label, address in self._links.items():
            self._print("link", f"{label}: {address}", label=label, address=address)
        if self._loading:
            names = sorted(self._loading)
            self._print("loading", f"loading models: {', '.join(names)}", workers=names)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def _step_numbers(self) -> list[tuple[str, str]]:
        metrics = self._recent[-1] if self._recent else {}
        shown = terminal_numbers(metrics)
        if self._held_out:
            (_, first), (version, last) = self._held_out[0], self._held_out[-1]
            before = f" (v0: {first:.4g})" if len(self._held_out) > 1 else ""
            shown.append(("held-out", f"{last:.4g} at v{version}{before}"))
        return shown

    def _gangs_table(self) -> Table:
        """Return a table with one line per gang. A line shows the nodes of the gang and its workers that load models.
        The line of an idle gang shows what the gang waits for."""
        table = Table.grid(padding=(0, 2))
        views, loading, now = self._views, self._loading, self._now()
        for gang in sorted({*tuple(self._gangs.values()), *views}):
            view = views.get(gang)
            work = work_text(view, now, _SHOWN_NODES) if view is not None else ""
            of_gang = {name: since for name, since in loading.items() if self._gangs.get(name) == gang}
            parts = [work] if work else []
            parts += [f"{name} loads models ({now - since:.0f} s)" for name, since in sorted(of_gang.items())]
            wait = f"idle: {view.wait_reason}" if view is not None and view.wait_reason else "idle"
            table.add_row(plain_text(gang, "cyan"), plain_text(", ".join(parts)) if parts else plain_text(wait, "dim"))
        return table

    def _print_engine_guarantees(self, detail: str) -> None:
        """Report the guarantees that the run lacks because of its engine. That it lacks none is only told to
        programs."""
        missing = detail.partition(UNPROVEN_PREFIX)[2]
        if self._screen.json_lines or missing != NOTHING_UNPROVEN:
            self._print("engine", f"not proven in this run: {missing or detail}", text=detail)

    def _print(self, kind: str, line: str | Text, **fields: object) -> None:
        self._screen.print_event(kind, line, **fields)

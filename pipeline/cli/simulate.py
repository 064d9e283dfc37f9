"""`stageline simulate CONFIG [key=value...] --hardware 16x8xH100-80`: simulate a run on a cluster with a virtual clock,
and print how its time would be spent.

This host need not be part of the cluster. No run is started, and only the files of `--timeline` and `--trace-file` are
written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from pipeline.cli.answers import SUCCESS, checked_output_path, config_from_sources, output_console, print_line
from pipeline.cli.check import fullest_gpu_lines
from pipeline.config.hardware import HardwareCluster, hardware_of, read_cluster
from pipeline.config.memory import workers_memory
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch.target_cluster import require_fitting_target
from pipeline.observe.text import format_duration, plain_text
from pipeline.observe.timeline import run_timeline
from pipeline.plan.calibration import Calibration, check_hardware, load_calibration, typical
from pipeline.plan.cost import costs_of
from pipeline.plan.lengths import FixedLengths, Lengths, parse_lengths
from pipeline.plan.scenario import journal_events, scenario_of, trace_events
from pipeline.plan.simulate import Execution, Failures, SimulationResult, Stragglers, play

_MOST_SLOWER = 1000
"""Maximum number of times as long that a straggler may take."""
_REBUILD_S = 300.0
"""Seconds until a lost worker is back, if `--rebuild-s` is not given."""
_MOST_DRAWN = 20_000
"""Maximum number of executions of nodes in a timeline or a trace. Later executions are left out."""


def command(options: argparse.Namespace) -> int:
    config = config_from_sources(options.sources, runs_here=False)
    stragglers, failures = _stragglers(options.stragglers), _failures(options, config)
    for key, file, suffix in (("--timeline", options.timeline, ".png"), ("--trace-file", options.trace_file, ".json")):
        if file is not None:
            checked_output_path(key, file, suffix, replaces=True)
    cluster = read_cluster(options.hardware, "--hardware")
    calibration = calibration_of(options.calibration, hardware_of(options.hardware), cluster)
    lengths = lengths_of(options.lengths, config, options.seed)
    checked = require_fitting_target(config, cluster, options.hardware)
    costs = costs_of(checked.run, cluster, calibration)
    drawn: list[Execution] = []
    keeps = options.timeline is not None or options.trace_file is not None
    scenario = scenario_of(costs, lengths, stragglers=stragglers, failures=failures, seed=options.seed)
    result = play(scenario, (lambda one: _keep(drawn, one)) if keeps else None)
    print_line(f"{options.hardware}: {cluster.hardware.description}; speeds: {calibration.description}")
    for line in assumptions(config, calibration, fixed=options.lengths is None):
        print_line(line)
    output_console().print(_table(result, config, counts_failures=failures is not None))
    for line in fullest_gpu_lines(checked.run, workers_memory(checked.run), checked.hosts, checked.limits):
        print_line(line)
    _write(options, config, result, drawn)
    return SUCCESS


def calibration_of(file: str | None, hardware: str, cluster: HardwareCluster) -> Calibration:
    """Return the calibration in a file, or assumed speeds if no file is given. Raises ConfigError if the file cannot be
    used, or its calibration is for other hardware."""
    if file is None:
        return typical(hardware, on_gpus=cluster.gpus_per_node > 0)
    calibration = load_calibration(file)
    check_hardware(calibration, hardware)
    return calibration


def assumptions(config: RunConfig, calibration: Calibration, *, fixed: bool) -> Iterator[str]:
    """Yield a line for each property of a run's rows that is not known but assumed. `fixed`: True if the lengths of
    responses are assumed."""
    if fixed:
        most = config.sampling.max_new_tokens
        yield f"every response is taken to be of {most} tokens (--lengths says otherwise)"
    if calibration.prompt_tokens is None:
        most = config.prompts.max_tokens
        yield f"every prompt is taken to be of {most} tokens (prompt_tokens of a calibration says otherwise)"
    drafter = config.engine.embedded.speculation.drafter
    if drafter != "none" and not calibration.drafts_per_pass:
        measures = "a calibration from a run with drafts measures them"
        yield f"drafts ({drafter}) are assumed to gain and cost nothing; {measures}"


def lengths_of(text: str | None, config: RunConfig, seed: int) -> Lengths:
    """Return the distribution of response lengths that a text describes. If `text` is None, all responses have
    `sampling.max_new_tokens` tokens. `seed`: seed with which lengths are drawn. Raises ConfigError if the text or the
    seed is not possible."""
    if seed < 0:
        raise ConfigError("--seed", f"given {seed}; must be 0 or more")
    most = config.sampling.max_new_tokens
    return FixedLengths(most) if text is None else parse_lengths(text, most, seed)


def _keep(drawn: list[Execution], one: Execution) -> None:
    if len(drawn) < _MOST_DRAWN:
        drawn.append(one)


def _stragglers(text: str | None) -> Stragglers | None:
    """Return the stragglers that a text like `0.05:3` describes: 5% of the nodes take 3 times as long. Return None if
    `text` is None. Raises ConfigError for a text of another form."""
    if text is None:
        return None
    share, _, factor = text.partition(":")
    try:
        stragglers = Stragglers(float(share), float(factor))
    except ValueError:
        stragglers = Stragglers(-1.0, 0.0)
    if not (0 < stragglers.share <= 1 < stragglers.factor <= _MOST_SLOWER):
        need = "must be SHARE:FACTOR, as in 0.05:3: a share of the nodes up to 1, and how many times as long they take"
        need += f" (up to {_MOST_SLOWER:,})"
        raise ConfigError("--stragglers", f"given {text!r}; {need}")
    return stragglers


def _failures(options: argparse.Namespace, config: RunConfig) -> Failures | None:
    if options.failures_per_hour is None:
        if options.rebuild_s is not None:
            raise ConfigError(
                "--rebuild-s", f"given {options.rebuild_s:g}; without --failures-per-hour no worker is lost"
            )
        return None
    rebuild_s = _REBUILD_S if options.rebuild_s is None else options.rebuild_s
    limits = (("--failures-per-hour", options.failures_per_hour, 10_000), ("--rebuild-s", rebuild_s, 86_400))
    for key, number, most in limits:
        if not 0 < number <= most:
            raise ConfigError(key, f"given {number:g}; must be above 0, and at most {most}")
    return Failures(options.failures_per_hour, rebuild_s, config.checkpoint.every)


def _write(
    options: argparse.Namespace, config: RunConfig, result: SimulationResult, drawn: Sequence[Execution]
) -> None:
    """Write the timeline and the trace, if their options are given."""
    if options.timeline is not None:
        plots: Any = import_module("pipeline.observe.plots")  # matplotlib takes a second
        timeline = run_timeline(journal_events(drawn))
        plots.plot_timeline(timeline, [], Path(options.timeline), f"{config.name}, simulated")
        print_line(f"timeline: {options.timeline}")
    if options.trace_file is not None:
        events = trace_events(drawn, result.critical_path)
        Path(options.trace_file).write_text(json.dumps({"traceEvents": events}), "utf8")
        print_line(f"trace: {options.trace_file} (for ui.perfetto.dev)")


def _table(result: SimulationResult, config: RunConfig, *, counts_failures: bool) -> Table:
    """Return the table of a simulation's results."""
    table = Table(title="Simulated run", title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    for label, value in _rows(result, config, counts_failures=counts_failures):
        table.add_row(plain_text(label), plain_text(value))
    return table


def _rows(result: SimulationResult, config: RunConfig, *, counts_failures: bool) -> Iterator[tuple[str, str]]:
    samples = config.rollout.rows / result.mean_s if result.mean_s > 0 else 0.0
    first, *later = result.step_s
    yield "step time", f"{_seconds(result.mean_s)} (wall time / steps)"
    yield "first step", _seconds(first)
    if later:
        spread = f"from {_seconds(min(later))} to {_seconds(max(later))}"
        yield "later steps", f"{_seconds(result.steady_s)} in the median, {spread}"
    yield "wall time", f"{_seconds(result.wall_s)} for {config.steps} steps"
    yield "speed", f"{samples:.3g} samples/s"
    yield "busy", _shares(result.busy_s, result.wall_s)
    path = {name: seconds for name, seconds in result.path_s.items() if seconds > 0.005 * result.wall_s}
    yield "critical path", _shares(path, result.wall_s)
    by_stage = ", ".join(f"{stage} {_seconds(seconds)}" for stage, seconds in result.stage_s.items())
    yield "sum over nodes", f"{by_stage} (nodes that ran side by side all count)"
    rows = sum(result.staleness.values())
    yield "staleness", ", ".join(f"{age}: {count / rows:.0%}" for age, count in result.staleness.items())
    if counts_failures:
        yield "failures", f"{result.failures} workers lost; {result.replayed_s:.3g} s of updates repeated"


def _seconds(seconds: float) -> str:
    """Return a time as text: in seconds with three significant digits, or in minutes or hours from 120 s on."""
    return format_duration(seconds) if seconds >= 120 else f"{seconds:.3g} s"


def _shares(seconds: Mapping[str, float], whole: float) -> str:
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in seconds.items())

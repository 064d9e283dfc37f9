"""`stageline calibrate RUN... --hardware 1xcpu [--write FILE]`: measure a machine's speeds in runs that it executed.

`stageline calibrate CONFIG [key=value...] --hardware 16x8xH100-80 --step-seconds 253.8`: scale assumed speeds until a
simulated step of the config takes the given time, such as a published one. This needs no run.

`stageline simulate` and `stageline plan` use the resulting calibration for their predictions.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rich.table import Table

from pipeline.cli.answers import (
    SUCCESS,
    checked_output_path,
    config_from_sources,
    output_console,
    print_line,
    read_saved_config,
)
from pipeline.cli.simulate import lengths_of
from pipeline.config.hardware import HardwareCluster, hardware_of, read_cluster
from pipeline.config.identity import read_identity
from pipeline.config.memory import PlannedRun, planned_run
from pipeline.config.paths import RunPaths
from pipeline.config.role_models import read_model, role_models
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.launch.target_cluster import require_fitting_target
from pipeline.observe.journal import journal_exists, read_events
from pipeline.observe.text import format_number
from pipeline.plan.calibrate import calibrate, compared
from pipeline.plan.calibration import (
    KINDS,
    STEP_SECONDS,
    Calibration,
    StageSpeed,
    scaled,
    to_yaml,
    typical,
)
from pipeline.plan.cores import shared_cores
from pipeline.plan.cost import costs_of
from pipeline.plan.observed import ObservedRun, observe
from pipeline.plan.scenario import scenario_of
from pipeline.plan.simulate import play

_SIMULATED_STEPS = 6
"""Number of steps to simulate, in addition to the `staleness` steps in which the pipeline fills. The step time is the
median over all simulated steps except the very first."""


def command(options: argparse.Namespace) -> int:
    cluster, hardware = read_cluster(options.hardware, "--hardware"), hardware_of(options.hardware)
    file = None if options.write is None else checked_output_path("--write", options.write, ".yaml")
    if options.step_seconds is None:
        if options.lengths is not None:
            raise ConfigError("--lengths", "a run's own lengths count: leave it out, or give --step-seconds")
        runs = [read_observed_run(run_dir, cluster) for run_dir in options.sources]
        calibration = calibrate(runs, cluster, hardware)
        output_console().print(speeds_table(calibration))
        output_console().print(comparison_table(runs, cluster, calibration))
    else:
        calibration = calibrate_to_step_time(options, cluster, hardware)
        output_console().print(speeds_table(calibration))
    overhead = format_number(1000 * calibration.overhead_s)
    turnaround = format_number(1000 * calibration.turnaround_s)
    print_line(f"overhead of a node: {overhead} ms from its parents' commits to its start")
    print_line(f"turnaround of a worker: {turnaround} ms between two nodes, a part of the first")
    if calibration.thread_share < 1:
        print_line(f"threads of a worker divide {calibration.thread_share:.0%} of the arithmetic")
    if calibration.crowding:
        print_line(f"a node loses {calibration.crowding:.0%} of its speed while all other cores work")
    at_peak = [
        kind for kind in KINDS if getattr(calibration, kind).nodes and getattr(calibration, kind).efficiency == 1
    ]
    if at_peak:
        kinds = ", ".join(at_peak)
        print_line(f"at the peaks of {calibration.hardware}, or above: {kinds}. The peaks are too low for this machine")
    if calibration.extrapolated:
        names = ", ".join(calibration.extrapolated)
        print_line(
            f"extrapolated: {names}: nothing tells their numbers apart, so the proportions are assumed. Runs with "
            "other lengths, shards and models would tell"
        )
    if file is not None:
        try:
            file.write_text(to_yaml(calibration))
        except OSError as error:
            raise ConfigError("--write", f"cannot write {file}: {error.strerror}") from error
        print_line(f"wrote {file}")
    return SUCCESS


def calibrate_to_step_time(options: argparse.Namespace, cluster: HardwareCluster, hardware: str) -> Calibration:
    """Return assumed speeds, scaled so that a simulated step takes `--step-seconds`.

    Raises:
        ConfigError: the step time is not above 0, the config does not fit on the cluster, or an efficiency would be
            above 1 or below `LEAST_EFFICIENCY`."""
    seconds: float = options.step_seconds
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(STEP_SECONDS, f"given {seconds:g}; must be above 0")
    config = config_from_sources(options.sources, runs_here=False)
    config.steps = config.staleness + _SIMULATED_STEPS
    assumed = typical(hardware, on_gpus=cluster.gpus > 0)
    lengths = lengths_of(options.lengths, config, config.seed)
    target = require_fitting_target(config, cluster, options.hardware)
    result = play(scenario_of(costs_of(target.run, cluster, assumed), lengths))
    return scaled(assumed, result.steady_s, seconds, f"assumed speeds, scaled to a step of {seconds:g} s")


def read_observed_run(run_dir: str, cluster: HardwareCluster) -> ObservedRun:
    """Return the nodes that a run executed. `cluster`: the cluster on which it ran. Raises ConfigError if the directory
    holds no run, or the run never began."""
    config = read_saved_config(run_dir)
    paths = RunPaths(config.run_dir)
    if not journal_exists(paths.events):
        raise ConfigError(run_dir, f"holds no journal ({paths.events.name}): this run never began")
    run, identity = read_planned_run(config, on_gpus=cluster.gpus > 0), read_identity(paths.root)
    cores = shared_cores(run, cluster)
    return observe(run_dir, run, open_history(config), read_events(paths.events), identity, cores)


def read_planned_run(config: RunConfig, *, on_gpus: bool) -> PlannedRun:
    """Return the run that a config describes, with the architectures of its models. The files of the weights need not
    exist."""
    models = role_models(config, read_model("model.path", config.model.path, weights=False), weights=False)
    return planned_run(config, models, on_gpus=on_gpus)


def speeds_table(calibration: Calibration) -> Table:
    """Return a table of a calibration's speeds."""
    table = Table(title=f"speeds on {calibration.hardware}", title_justify="left", title_style="bold")
    table.add_column("work")
    for heading in ("efficiency", "element-wise", "ms per call", "ms per node", "scatter", "nodes"):
        table.add_column(heading, justify="right")
    for kind in KINDS:
        speed: StageSpeed = getattr(calibration, kind)
        measured = ("-", "assumed") if speed.scatter is None else (f"{speed.scatter:.0%}", str(speed.nodes))
        numbers = (
            f"{speed.efficiency:.1%}",
            "" if speed.element_efficiency == 1 else f"{speed.element_efficiency:.1%}",
            format_number(1000 * speed.call_s),
            format_number(1000 * speed.node_s),
            *measured,
        )
        table.add_row(kind, *numbers)
    return table


def comparison_table(runs: Sequence[ObservedRun], cluster: HardwareCluster, calibration: Calibration) -> Table:
    """Return a table of the measured and the predicted seconds of each stage, summed over the runs."""
    table = Table(title="the runs themselves", title_justify="left", title_style="bold")
    table.add_column("stage")
    for heading in ("nodes", "measured s", "predicted s", "predicted / measured"):
        table.add_column(heading, justify="right")
    for stage, measured, predicted, number in compared(runs, cluster, calibration):
        table.add_row(
            stage, str(number), format_number(measured), format_number(predicted), f"{predicted / measured:.2f}"
        )
    return table

"""`stageline sweep CONFIG... key=value,value...`: a run of each combination; with Slurm an array of them, else in turn.

All are runs of one MLflow experiment, under a parent run that holds what they differ in. Called again it goes on with
those that are not done.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import DONE, INTERRUPTED
from pipeline.cli.job import begun
from pipeline.cli.run import execute
from pipeline.cli.sources import config_of
from pipeline.cli.submit import check_for_cluster, cluster_config
from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_yaml, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.tracking import SQLITE
from pipeline.driver.results import open_history
from pipeline.launch.commands import there
from pipeline.launch.submission import array_script, asked_for, submit_array, submit_run
from pipeline.launch.sweep import SweepPoint, axes_of, points
from pipeline.observe.spool import delivered_run_id
from pipeline.observe.tracking import MlflowTracker


def command(options: argparse.Namespace) -> int:
    changes = [source for source in options.sources if "=" in source]
    files = [source for source in options.sources if "=" not in source]
    fixed, axes = axes_of(changes)
    name = config_of([*files, *fixed, *(f"{key}={values[0]}" for key, values in axes.items())]).name
    found, submits = points(axes, name), there() and not options.here
    read = cluster_config if submits else config_of
    configs = [read([*files, *fixed, *point.changes(), f"name={name}-{point.suffix}"]) for point in found]
    if options.dry_run:
        for config, point in zip(configs, found, strict=True):
            print_line(f"{config.run_dir}: {' '.join(point.changes())}")
        return DONE
    folder = RunPaths(configs[0].run_dir.with_name(f"{name}-sweep"))
    for config in configs:
        _refuse_shared_file(config, several_at_once=submits)
        check_for_cluster(config)
    configs = _under_parent(configs, found, folder)
    return _submit(configs, folder.job) if submits else _run_in_turn(configs, found)


def _submit(configs: Sequence[RunConfig], folder: Path) -> int:
    text = array_script(configs, folder)
    if text is None:
        for config in configs:
            print_line(f"submitted job {submit_run(config).job_id}: {config.run_dir}")
    else:
        array = submit_array(configs, folder, text)
        print_line(f"submitted job {array.job_id}, an array of {len(configs)} with {asked_for(configs[0])} each")
    print_line(f"  stageline status --runs-dir {configs[0].runs_dir}    what becomes of them")
    return DONE


def _run_in_turn(configs: Sequence[RunConfig], found: Sequence[SweepPoint]) -> int:
    """Every run to its end; one that fails does not keep the others from theirs."""
    codes = {}
    for config in configs:
        print_line(f"---- {config.name}")
        codes[config.name] = execute(config, resume=begun(config))
        if codes[config.name] == INTERRUPTED:
            return INTERRUPTED
    output().print(_comparison(configs, found, codes))
    return max(codes.values())


def _comparison(configs: Sequence[RunConfig], found: Sequence[SweepPoint], codes: dict[str, int]) -> Table:
    """What each run came to, beside what it differs in."""
    table = Table(*found[0].settings, "reward", "held-out", "", box=None, pad_edge=False)
    for config, point in zip(configs, found, strict=True):
        history = open_history(config)
        steps, evaluations = history.steps_done(), history.evaluations()
        reward = f"{history.step_metrics(steps[-1])['reward/mean']:.4g}" if steps else "-"
        held_out = f"{evaluations[-1].mean:.4g}" if evaluations else "-"
        ended = "" if codes[config.name] == DONE else f"exit code {codes[config.name]}"
        table.add_row(*point.settings.values(), reward, held_out, ended)
    return table


def _refuse_shared_file(config: RunConfig, *, several_at_once: bool) -> None:
    """sqlite is for one writer at a time, and on a network filesystem not even for that."""
    uri = config.tracking.uri
    if several_at_once and config.slurm.array_at_once != 1 and uri is not None and uri.startswith(SQLITE):
        raise ConfigError(
            "tracking.uri",
            f"given {uri!r}; the runs of a sweep write at the same time, from several nodes: a server (http://...), "
            "null, or slurm.array_at_once=1",
        )


def _under_parent(configs: Sequence[RunConfig], found: Sequence[SweepPoint], folder: RunPaths) -> list[RunConfig]:
    """The configs, with the parent run that MLflow has for them, which is made here.

    Raises:
        ConfigError: MLflow cannot be reached, so that there would be no parent.
    """
    config = configs[0]
    if config.tracking.uri is None:
        return list(configs)
    folder.root.mkdir(parents=True, exist_ok=True)
    values = {key: ", ".join(dict.fromkeys(point.settings[key] for point in found)) for key in found[0].settings}
    tracker = MlflowTracker(
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=folder.root.name,
        params=values,
        tags={"stageline.sweep": f"{len(configs)} runs"},
        spool_path=folder.mlflow_spool,
    )
    tracker.close("FINISHED")
    parent = delivered_run_id(folder.mlflow_spool, config.tracking.uri)
    if parent is None:
        need = "cannot be reached, and the sweep's parent run is made there first"
        raise ConfigError("tracking.uri", f"given {config.tracking.uri!r}; {need}")
    return [load_yaml(to_yaml(one), [f"tracking.parent={parent}"]) for one in configs]

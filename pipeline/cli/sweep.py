"""`stageline sweep CONFIG... key=value,value...`: start one run for each combination of values.

With Slurm the runs are submitted, as one job array if possible. Without Slurm, or with `--here`, they run on this host
one after the other. All runs are in one MLflow experiment, below a parent run that lists the settings in which they
differ. If the same command is called again, it continues the runs that are not done and have no job. The functions at
the top are pure, and find the combinations.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf
from rich.table import Table

from pipeline.cli.answers import (
    BAD_INPUT,
    INTERRUPTED,
    SUCCESS,
    config_from_sources,
    has_begun,
    output_console,
    print_error,
    print_line,
)
from pipeline.cli.run import execute
from pipeline.cli.slurm_jobs import check_for_cluster, cluster_config, has_all_steps
from pipeline.config.loading import load_yaml, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import SQLITE
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.launch.commands import has_slurm
from pipeline.launch.submission import array_script, requested_nodes_text, submit_array, submit_run, unfinished_job_text
from pipeline.observe.tracking import MlflowTracker, delivered_run_id
from storage.problems import LONGEST_NAME
from storage.redaction import redacted

_OPEN, _CLOSE = "[{(", "]})"
_COMMON_KEYS = ("name", "runs_dir")
"""Settings that cannot have several values in a sweep. The same holds for all settings of section `tracking`."""


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    suffix: str
    """Ending of the run's name."""
    settings: Mapping[str, str]
    """Key -> this run's value, for each setting that differs within the sweep."""

    def changes(self) -> list[str]:
        """Return the settings as `key=value`."""
        return [f"{key}={value}" for key, value in self.settings.items()]


def parse_axes(changes: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return two things: the changes with one value, which hold for every run; and setting -> values, for each change
    with several values. `seed=0,1` has two values, `betas=[0.8, 0.9]` has one.

    Raises:
        ConfigError: a setting is given twice, or no setting has several values. Or a setting has several values,
            although it is a secret or must have one value (`_COMMON_KEYS`). Or a list of values contains an empty
            value, or the same value twice.
    """
    fixed, axes, keys = [], dict[str, list[str]](), set[str]()
    for change in changes:
        key, _, text = change.partition("=")
        if key in keys:
            raise ConfigError(key, "is given twice")
        keys.add(key)
        values = list(_split_at_commas(text))
        if len(values) == 1:
            fixed.append(change)
        elif key in _COMMON_KEYS or key.startswith("tracking."):
            need = "the runs of a sweep are in one directory and one experiment, and named after what they differ in"
            raise ConfigError(key, f"given {text!r}; {need}: one value")
        elif redacted({key: text}) != {key: text}:
            raise ConfigError(key, "a run of a sweep is named after what it differs in, and no name may hold a secret")
        elif "" in values or len({_parsed_value(value) for value in values}) < len(values):
            raise ConfigError(key, f"given {text!r}; the values of a sweep differ, and none is empty: seed=0,1")
        else:
            axes[key] = values
    if not axes:
        raise ConfigError("sweep", "nothing differs between the runs: give a setting several values, as in seed=0,1")
    return fixed, axes


def sweep_points(axes: Mapping[str, Sequence[str]], name: str) -> list[SweepPoint]:
    """Return one point for each combination of values. The values of the last setting change fastest. `name`: beginning
    of each run's name.

    Raises:
        ConfigError: two runs would have the same name, or a name would be too long.
    """
    labels = {key: _short_key(key, [other for other in axes if other != key]) for key in axes}
    points = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        parts = [f"{labels[key]}{re.sub(r'[^A-Za-z0-9_.-]+', '_', value)}" for key, value in settings.items()]
        points.append(SweepPoint("-".join(parts), settings))
    if len({point.suffix for point in points}) < len(points):
        raise ConfigError("sweep", f"values that differ in marks alone would name the same run: {points[0].suffix}, …")
    longest = max((f"{name}-{point.suffix}" for point in points), key=len)
    if len(longest) > LONGEST_NAME:
        raise ConfigError(
            "name", f"given {name!r}; a run of the sweep would be called {longest}: at most {LONGEST_NAME}"
        )
    return points


def _parsed_value(value: str) -> str:
    """Return one spelling for all texts that YAML reads as the same value. Invalid YAML is refused later."""
    try:
        return repr(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False))
    except Exception:  # yaml's errors have no common public base that omegaconf re-exports
        return value


def _short_key(key: str, other_keys: Sequence[str]) -> str:
    """Return the shortest ending of a key, in whole parts, that no other key of the sweep has."""
    parts = key.split(".")
    ends = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in other_keys)), key)


def _split_at_commas(text: str) -> Iterator[str]:
    """Split a text at the commas that are outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        elif mark in _OPEN:
            depth += 1
        elif mark in _CLOSE:
            depth -= 1
        elif mark == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def command(options: argparse.Namespace) -> int:
    if options.at_once is not None and options.at_once < 1:
        raise ConfigError("--at-once", f"given {options.at_once}; must be 1 or more")
    changes = [source for source in options.sources if "=" in source]
    files = [source for source in options.sources if "=" not in source]
    fixed, axes = parse_axes(changes)
    name = config_from_sources([*files, *fixed, *(f"{key}={values[0]}" for key, values in axes.items())]).name
    points, submits = sweep_points(axes, name), has_slurm() and not options.here
    read = cluster_config if submits else config_from_sources
    configs = [read([*files, *fixed, *point.changes(), f"name={name}-{point.suffix}"]) for point in points]
    if options.dry_run:
        for config, point in zip(configs, points, strict=True):
            print_line(f"{config.run_dir}: {' '.join(point.changes())}")
        return SUCCESS
    folder = RunPaths(configs[0].run_dir.with_name(f"{name}-sweep"))
    if submits:
        return _submit(configs, points, folder, options.at_once)
    for config in configs:
        check_for_cluster(config)
    return _run_one_by_one(_with_parent_run(configs, points, folder), points)


def _submit(
    configs: Sequence[RunConfig], points: Sequence[SweepPoint], folder: RunPaths, max_running: int | None
) -> int:
    """Submit the runs that are not done and have no job, and return the exit code. Runs that cannot be one job array
    are a job each. If one of these is refused, the others are still submitted."""
    done = {config.name: f"done, {config.steps} of {config.steps} steps" for config in configs if has_all_steps(config)}
    jobs = {config.name: unfinished_job_text(config) for config in configs if config.name not in done}
    for config in configs:
        why = done.get(config.name) or jobs[config.name]
        if why is not None:
            print_line(f"left out {config.run_dir}: {why}")
    configs = [config for config in configs if config.name in jobs and jobs[config.name] is None]
    if not configs:
        return SUCCESS
    text = array_script(configs, folder.job, max_running)
    _check_concurrent_runs(configs[0], max_running, is_array=text is not None, has_other_jobs=any(jobs.values()))
    for config in configs:
        check_for_cluster(config)
    configs = _with_parent_run(configs, points, folder)
    codes = [SUCCESS]
    if text is None:
        codes = [_submit_one(config) for config in configs]
    else:
        array = submit_array(configs, folder.job, text)
        print_line(
            f"submitted job {array.job_id}, an array of {len(configs)} with {requested_nodes_text(configs[0])} each"
        )
    print_line(f"  stageline status --runs-dir {configs[0].runs_dir}    what becomes of them")
    return max(codes)


def _submit_one(config: RunConfig) -> int:
    """Submit a run as its own job and return the exit code."""
    try:
        print_line(f"submitted job {submit_run(config).job_id}: {config.run_dir}")
    except ConfigError as error:
        return print_error("refused", f"{config.run_dir}: {error}", BAD_INPUT)
    return SUCCESS


def _run_one_by_one(configs: Sequence[RunConfig], points: Sequence[SweepPoint]) -> int:
    """Run the configs one after the other, and return the highest exit code. After a failed run the next one starts. An
    interrupted run ends the sweep with the exit code `INTERRUPTED`."""
    codes = {}
    for config in configs:
        print_line(f"---- {config.name}")
        codes[config.name] = execute(config, resume=has_begun(config))
        if codes[config.name] == INTERRUPTED:
            return INTERRUPTED
    output_console().print(_comparison(configs, points, codes))
    return max(codes.values())


def _comparison(configs: Sequence[RunConfig], points: Sequence[SweepPoint], codes: dict[str, int]) -> Table:
    """Return a table of the runs' results beside the settings in which they differ."""
    table = Table(*points[0].settings, "reward", "held-out", "", box=None, pad_edge=False)
    for config, point in zip(configs, points, strict=True):
        history = open_history(config)
        steps, evaluations = history.finished_steps(), history.read_evaluations()
        reward = f"{history.read_step_metrics(steps[-1])['reward/mean']:.4g}" if steps else "-"
        held_out = f"{evaluations[-1].mean:.4g}" if evaluations else "-"
        ended = "" if codes[config.name] == SUCCESS else f"exit code {codes[config.name]}"
        table.add_row(*point.settings.values(), reward, held_out, ended)
    return table


def _check_concurrent_runs(config: RunConfig, max_running: int | None, *, is_array: bool, has_other_jobs: bool) -> None:
    """Raise ConfigError for settings that cannot work if several runs of a sweep run at the same time. Slurm limits
    only the tasks of an array. SQLite's locks do not work between nodes."""
    uri = config.tracking.uri
    if max_running is not None and not is_array:
        need = "the runs are a job each, since they are heterogeneous or ask for different nodes, and Slurm starts all"
        raise ConfigError("--at-once", f"given {max_running}; {need} for which there is room: leave it out")
    if (max_running != 1 or has_other_jobs) and uri is not None and uri.startswith(SQLITE):
        raise ConfigError(
            "tracking.uri",
            f"given {uri!r}; the runs of a sweep write at the same time, from several nodes: a server (http://...), "
            "null, or --at-once 1",
        )


def _with_parent_run(configs: Sequence[RunConfig], points: Sequence[SweepPoint], folder: RunPaths) -> list[RunConfig]:
    """Create the parent run in MLflow, with its data in `folder`, and return the configs with its id. Without tracking,
    return them unchanged. Raises ConfigError if MLflow cannot be reached."""
    config = configs[0]
    if config.tracking.uri is None:
        return list(configs)
    folder.root.mkdir(parents=True, exist_ok=True)
    values = {key: ", ".join(dict.fromkeys(point.settings[key] for point in points)) for key in points[0].settings}
    tracker = MlflowTracker(
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=folder.root.name,
        params=values,
        tags={"stageline.sweep": f"{len(points)} runs"},
        spool_path=folder.mlflow_spool,
    )
    tracker.close("FINISHED")
    parent = delivered_run_id(folder.mlflow_spool, config.tracking.uri)
    if parent is None:
        need = "cannot be reached, and the sweep's parent run is made there first"
        raise ConfigError("tracking.uri", f"given {config.tracking.uri!r}; {need}")
    return [load_yaml(to_yaml(one), [f"tracking.parent={parent}"]) for one in configs]

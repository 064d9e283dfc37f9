"""`stageline report RUN [RUN...]`: write one self-contained HTML file about a run, or about several runs side by side.
A finished variant counts as a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.cli.answers import SUCCESS, print_line, read_saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history, report_source, summarise_run, variant_source, write_report
from pipeline.errors import ConfigError
from pipeline.observe.journal import journal_exists
from pipeline.observe.report.page import MAX_RUNS, is_report
from pipeline.observe.report.source import Source

_COMPARISON_FILE = Path("report.html")
"""Default path of a report about several runs, relative to the working directory."""


def command(options: argparse.Namespace) -> int:
    configs = _read_configs(options.run_dirs)
    file = _output_path(options.out, configs)
    sources = _label_by_directory([_read_source(config) for config in configs])
    try:
        print_line(f"report: {write_report(sources, file)}")
    except OSError as error:
        raise ConfigError("--out", f"cannot write {file}: {error.strerror}; give another file") from error
    return SUCCESS


def _read_configs(run_dirs: Sequence[str]) -> list[RunConfig]:
    """Return the configs of the runs. Raises ConfigError for a directory without a run, a run that never began, an
    unfinished variant, a run given twice, and too many runs."""
    if len(run_dirs) > MAX_RUNS:
        raise ConfigError("RUN", f"given {len(run_dirs)} runs; a report has 1 to {MAX_RUNS}")
    configs = [read_saved_config(run_dir, variants=True) for run_dir in run_dirs]
    seen: dict[Path, str] = {}
    for run_dir, config in zip(run_dirs, configs, strict=True):
        paths = RunPaths(config.run_dir)
        if paths.root.resolve() in seen:
            raise ConfigError(run_dir, f"is the same run as {seen[paths.root.resolve()]}; give each run once")
        seen[paths.root.resolve()] = run_dir
        if paths.variant.exists() and not paths.summary.exists():
            raise ConfigError(run_dir, "holds a variant that has not finished: it has no summary.json yet")
        if not (paths.variant.exists() or journal_exists(paths.events)):
            raise ConfigError(run_dir, f"holds no journal ({paths.events.name}): this run never began")
    return configs


def _output_path(given: str | None, configs: Sequence[RunConfig]) -> Path:
    """Return the path of the report: `given` (`--out`), or in the directory of one run, or `_COMPARISON_FILE` for
    several. Raises ConfigError if no report can be written there, or a file there is none."""
    if given is None and len(configs) == 1:
        return RunPaths(configs[0].run_dir).report
    file = _COMPARISON_FILE if given is None else Path(given)
    if file.is_dir():
        raise ConfigError("--out", f"given {str(file)!r}, a directory; give a file, for example {file / 'report.html'}")
    if not file.parent.is_dir():
        raise ConfigError("--out", f"given {given!r}; there is no directory {file.parent}")
    if file.suffix != ".html":
        raise ConfigError("--out", f"given {given!r}; must end in .html, for example {file.with_suffix('.html')}")
    if file.exists() and not _is_report(file):
        need = f"{file} is there, and is no report of this version of Stageline: give another file"
        raise ConfigError("--out", f"{'not given' if given is None else f'given {given!r}'}; {need}")
    return file


def _is_report(file: Path) -> bool:
    try:
        return is_report(file)
    except OSError:  # an unreadable file may be something else
        return False


def _read_source(config: RunConfig) -> Source:
    if RunPaths(config.run_dir).variant.exists():
        return variant_source(config)
    history = open_history(config)
    return report_source(config, history, summarise_run(config, history))


def _label_by_directory(sources: Sequence[Source]) -> list[Source]:
    """Return the sources. If several have the same name, their directories are added to the names."""
    names = [source.name for source in sources]
    return [
        source if names.count(source.name) == 1 else replace(source, name=f"{source.name} ({source.directory})")
        for source in sources
    ]

"""`stageline submit CONFIG... [key=value...] [--dry-run]`: have Slurm run a config. A requeued job resumes the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pipeline.cli.answers import DONE, begun, config_of, print_line
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths, refuse_foreign
from pipeline.config.preflight import check_run
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.launch.commands import require
from pipeline.launch.submission import asked_for, run_script, submit_run
from pipeline.observe.journal import EventKind, journal_exists, read_events


def command(options: argparse.Namespace) -> int:
    config = cluster_config(options.sources)
    if options.dry_run:
        print_line(run_script(config).rstrip("\n"))
        return DONE
    if finished(config):
        print_line(f"nothing to submit: {config.run_dir} is done, {config.steps} of {config.steps} steps")
        return DONE
    require()
    check_for_cluster(config)
    submitted = submit_run(config)
    print_line(f"submitted job {submitted.job_id}: {asked_for(config)}")
    print_line(f"  stageline status {config.run_dir}    what becomes of it")
    print_line(f"  stageline logs {config.run_dir} --follow    what it prints ({submitted.output})")
    print_line(f"  stageline cancel {config.run_dir}    ends it; submitted again it goes on")
    return DONE


def finished(config: RunConfig) -> bool:
    """Return True if the run has done as many steps as the config has."""
    paths = RunPaths(config.run_dir)
    if not (journal_exists(paths.events) and paths.ledger.exists()):
        return False
    ends = (EventKind.RUN_STARTED, EventKind.RUN_FINISHED)
    last = [event.kind for event in read_events(paths.events) if event.kind in ends][-1:]
    return last == [EventKind.RUN_FINISHED] and len(open_history(config).steps_done()) >= config.steps


def cluster_config(sources: Sequence[str]) -> RunConfig:
    """Return the config as a job runs it: with attached workers, and a directory that does not depend on the working
    directory. Raises ConfigError."""
    config = config_of([*sources, "cluster.kind=attached"])
    config.runs_dir = str(config.run_dir.absolute().parent)
    if config.cluster.scheduler_file is not None:
        raise ConfigError(
            "cluster.scheduler_file",
            f"given {config.cluster.scheduler_file!r}; a job's workers look for it in the run's directory, where each "
            "attempt has its own: null",
        )
    return config


def check_for_cluster(config: RunConfig) -> None:
    """Raise ConfigError for everything for which the job would be refused, as far as this host can tell."""
    refuse_foreign(config.run_dir)  # a requeued job would go on with it
    check_run(config, resume=begun(config))

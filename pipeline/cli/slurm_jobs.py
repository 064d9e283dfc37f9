"""Commands about a run's Slurm job.

stageline cancel RUN
stageline may-requeue RUN --job ID --restart N --because TEXT ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import DONE, RESUMABLE, print_line, submitted_config
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.launch import commands
from pipeline.launch.requeues import AttemptEnd, committed_so_far, note_end, refusal
from storage.ledger import Ledger


def cancel(options: argparse.Namespace) -> int:
    """End the run's job, or remove it from the queue. Committed outputs stay."""
    submitted_config(options.run_dir)
    record = commands.read_record(RunPaths(Path(options.run_dir)).job)
    if record is None:
        raise ConfigError(options.run_dir, "was not submitted as a job; a run on this host is ended by Ctrl-C")
    state = commands.job_state(record.job_id)
    if state is not None and state.over:
        print_line(f"job {record.job_id} has ended already: {state.state}")
        return DONE
    commands.cancel(record.job_id)
    print_line(f"cancelled job {record.job_id}; `stageline submit {options.run_dir}/job/config.yaml` continues the run")
    return DONE


def may_requeue(options: argparse.Namespace) -> int:
    """Return exit code 0 if the job may be requeued, else print the reason and return 75. A job's script asks this when
    an attempt has ended."""
    paths = RunPaths(Path(options.run_dir))
    committed = committed_so_far(Ledger(str(paths.ledger)))
    end = AttemptEnd(options.restart, committed, options.because, options.lost)
    ends = note_end(paths.job, options.job, end)
    why = refusal(ends, restarts=options.restarts, requeues_without_progress=options.without_progress)
    if why is None:
        return DONE
    here = f", or `stageline resume {paths.root} cluster.kind=local` on one machine" * paths.config.exists()
    print_line(
        f"not requeued: {why}. The last attempt (restart {ends[-1].restart}) ended: {ends[-1].because}. What the "
        f"driver printed is above, what workers printed is in {paths.logs}. When that is repaired, "
        f"`stageline submit {paths.job}/config.yaml` continues the run{here}"
    )
    return RESUMABLE

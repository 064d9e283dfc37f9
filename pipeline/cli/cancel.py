"""`stageline cancel RUN`: end the run's job, or take it out of the queue. Committed outputs stay."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import DONE, print_line, submitted_config
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.launch.commands import cancel, job_state, read_record


def command(options: argparse.Namespace) -> int:
    submitted_config(options.run_dir)
    record = read_record(RunPaths(Path(options.run_dir)).job)
    if record is None:
        raise ConfigError(options.run_dir, "was not submitted as a job; a run on this host is ended by Ctrl-C")
    state = job_state(record.job_id)
    if state is not None and state.over:
        print_line(f"job {record.job_id} is over already: {state.state}")
        return DONE
    cancel(record.job_id)
    print_line(
        f"cancelled job {record.job_id}; `stageline submit {options.run_dir}/job/config.yaml` goes on with the run"
    )
    return DONE

"""`stageline job CONFIG... [key=value...]`: the command of a cluster's job, repeated until the run is done.

The first time it starts the run, later it resumes it. A cluster manager that wants the nodes back sends SIGTERM,
SIGINT, SIGHUP or SIGUSR1. Then the command ends at once with exit code 75, without summary and plots.
"""

from __future__ import annotations

import argparse
import signal

from pipeline.cli.answers import begun, config_of
from pipeline.cli.run import execute
from pipeline.config.trust import refuse_foreign
from pipeline.workers.worker_process import ending_signals


def command(options: argparse.Namespace) -> int:
    config = config_of(options.sources)
    goes_on = begun(config)
    if goes_on:
        refuse_foreign(config.run_dir)
    return execute(config, resume=goes_on, at_once=ending_signals() | {signal.SIGUSR1})

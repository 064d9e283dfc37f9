"""`stageline job CONFIG... [key=value...]`: what a job of a cluster runs, again and again, until the run is done.

The first time it starts the run, afterwards it goes on with it. A manager that wants the nodes back sends SIGTERM,
SIGINT or SIGUSR1: then it ends at once, without a summary and plots, with exit code 75.
"""

from __future__ import annotations

import argparse
import signal

from pipeline.cli.run import execute
from pipeline.cli.sources import config_of
from pipeline.config.identity import FILE
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import journal_exists

AT_ONCE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def command(options: argparse.Namespace) -> int:
    config = config_of(options.sources)
    return execute(config, resume=begun(config), at_once=AT_ONCE)


def begun(config: RunConfig) -> bool:
    """Whether an earlier driver has begun the run, however far it came."""
    paths = RunPaths(config.run_dir)
    return (paths.root / FILE).exists() or paths.config.exists() or journal_exists(paths.events)

"""`stageline worker RUN --gang NAME --index I`: run one worker of an attached run on this host."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from pipeline.cli.answers import BAD_INPUT, DRIVER_LOST, INTERRUPTED, STAGE_FAILED, SUCCESS, print_error, print_line
from pipeline.workers.attached import EndReason, WorkerOptions, WorkerRefused, run_worker

EXIT_CODES = {
    EndReason.RUN_OVER: SUCCESS,
    EndReason.DRIVER_LOST: DRIVER_LOST,
    EndReason.TERMINATED: INTERRUPTED,
    EndReason.PROCESS_GONE: STAGE_FAILED,
}


def command(options: argparse.Namespace) -> int:
    """Work for the run until the run or the worker ends. Return the exit code."""
    run_dir, file = options.run_dir, options.scheduler_file
    if (run_dir is None) == (file is None):
        return print_error("refused", "worker: give a run's directory or --scheduler-file, one of the two", BAD_INPUT)
    if not (math.isfinite(options.wait) and options.wait >= 0):
        return print_error(
            "refused", f"--wait: given {options.wait}; must be a number of seconds, 0 or more", BAD_INPUT
        )
    wanted = WorkerOptions(
        gang=options.gang,
        index=options.index,
        run_dir=None if run_dir is None else Path(run_dir).absolute(),
        file=None if file is None else Path(file).absolute(),
        interface=options.interface,
        wait_s=options.wait,
    )
    try:
        ending = run_worker(wanted, print_line)
    except WorkerRefused as error:
        return print_error("refused", f"{wanted.name}: {error}", BAD_INPUT)
    print_line(f"{wanted.name}: {ending.value}")
    return EXIT_CODES[ending]

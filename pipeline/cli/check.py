"""`stageline check CONFIG [key=value...] | RUN`: what a run would be refused for, or whether its directory is sound.

Nothing is started and nothing is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import BAD_INPUT, DONE
from pipeline.cli.sources import config_of, saved_config
from pipeline.cli.verification import verify_run
from pipeline.config.preflight import check_run_directory, preflight


def command(options: argparse.Namespace) -> int:
    if Path(options.target).is_dir():
        report = verify_run(saved_config(options.target))
        output().print(report.render())
        return DONE if report.sound else BAD_INPUT
    config = config_of([options.target, *options.more])
    check_run_directory(config, resume=False)
    prompts = preflight(config).prompts
    train, held_out = len(prompts.train), len(prompts.held_out)
    print_line(f"{options.target}: would run ({train} prompts to train on, {held_out} held out)")
    return DONE

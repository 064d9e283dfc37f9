"""`stageline resume RUN [key=value...] [--from-checkpoint]`: an interrupted run, from where it stopped to its last
step."""

from __future__ import annotations

import argparse

from pipeline.cli.run import execute
from pipeline.cli.sources import saved_config


def command(options: argparse.Namespace) -> int:
    config = saved_config(options.run_dir, options.changes)
    return execute(config, resume=True, from_checkpoint=options.from_checkpoint, json_lines=options.json_lines)

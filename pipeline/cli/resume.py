"""`stageline resume RUN [key=value...] [--from-checkpoint]`: continue an interrupted run to its last step."""

from __future__ import annotations

import argparse

from pipeline.cli.answers import trusted_config
from pipeline.cli.run import execute


def command(options: argparse.Namespace) -> int:
    config = trusted_config(options.run_dir, options.changes)
    return execute(config, resume=True, from_checkpoint=options.from_checkpoint, json_lines=options.json_lines)

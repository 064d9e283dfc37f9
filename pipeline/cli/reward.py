"""`stageline reward train CONFIG... [key=value...]`: a reward model learnt from human judgements."""

from __future__ import annotations

import argparse

from pipeline.cli.answers import output
from pipeline.cli.exit_codes import DONE
from pipeline.config.loading import load_reward_model_config
from pipeline.driver.reward_training import train


def command(options: argparse.Namespace) -> int:
    files = [source for source in options.sources if "=" not in source]
    config = load_reward_model_config(files, [source for source in options.sources if "=" in source])
    train(config, output())
    return DONE

"""`stageline reward train CONFIG... [key=value...]`: a reward model learnt from human judgements."""

from __future__ import annotations

import argparse
import importlib
import warnings

from pipeline.cli.answers import complain, output
from pipeline.cli.exit_codes import DONE, STAGE_FAILED
from pipeline.config.loading import load_reward_model_config
from pipeline.observe.appending import AppendFailed
from storage.retries import REFUSING, TRANSIENT

_AGAIN = "Put this right; the training begins anew"


def command(options: argparse.Namespace) -> int:
    files = [source for source in options.sources if "=" not in source]
    config = load_reward_model_config(files, [source for source in options.sources if "=" in source])
    # What megatron would rather have (Transformer Engine, Apex) is no news to whoever runs this; it says so on import.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    train = importlib.import_module("pipeline.driver.reward_training").train
    try:
        train(config, output())
    except AppendFailed as error:
        return complain("failed", f"{error}. {_AGAIN}", STAGE_FAILED)
    except OSError as error:
        if error.errno not in REFUSING | TRANSIENT:
            raise
        where = error.filename or config.run_dir
        return complain("failed", f"{where}: {error.strerror}. {_AGAIN}", STAGE_FAILED)
    return DONE

"""`stageline reward train CONFIG... [key=value...]`: train a reward model from judgements, or from the scores of a
larger reward model.

`stageline reward label CONFIG... [key=value...] [--from RUN]`: have a judge make a preference set.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path

from pipeline.cli.answers import STAGE_FAILED, SUCCESS, output_console, print_error, read_saved_config
from pipeline.config.loading import load_label_config, load_reward_model_config
from pipeline.observe.journal import AppendFailed
from storage.files import REFUSING, TRANSIENT


def command(options: argparse.Namespace) -> int:
    files = [source for source in options.sources if "=" not in source]
    changes = [source for source in options.sources if "=" in source]
    # Megatron warns on import that Transformer Engine and Apex are missing. Users need not see this.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    if options.action == "label":
        return _label(files, changes, options.source)
    config = load_reward_model_config(files, changes)
    train = importlib.import_module("pipeline.driver.reward_training").train_and_export
    return _run_reporting_full_disk(
        lambda: train(config, output_console()),
        config.run_dir,
        "Put this right; the training begins anew",
    )


def _label(files: list[str], changes: list[str], source: str | None) -> int:
    config = load_label_config(files, [*changes, *([] if source is None else [f"responses.run={source}"])])
    run = None if config.responses.run is None else read_saved_config(config.responses.run)
    label = importlib.import_module("pipeline.driver.labelling").label_responses
    return _run_reporting_full_disk(
        lambda: label(config, run, output_console()), config.run_dir, "Put this right, and start it again to go on"
    )


def _run_reporting_full_disk(act: Callable[[], object], run_dir: Path, way_on: str) -> int:
    """Run `act` and return the exit code. If the disk refuses a write, print the error and the advice `way_on`."""
    try:
        act()
    except AppendFailed as error:
        return print_error("failed", f"{error}. {way_on}", STAGE_FAILED)
    except OSError as error:
        if error.errno not in REFUSING | TRANSIENT:
            raise
        return print_error("failed", f"{error.filename or run_dir}: {error.strerror}. {way_on}", STAGE_FAILED)
    return SUCCESS

"""What each command of the command line does. Imported when a command is called, not for `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipeline.cli.exit_codes import BAD_INPUT, DONE, INTERRUPTED, STAGE_FAILED
from pipeline.cli.export import export_version
from pipeline.cli.inspection import inspect_step
from pipeline.cli.replay import replay_node
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_run_directory, preflight
from pipeline.config.schema import ConfigError, RunConfig, load_config, load_yaml
from pipeline.driver.context import StageFailed
from pipeline.driver.run import run as run_config
from pipeline.workers.updates import ReplayMismatch
from storage.errors import StoreError

Command = Callable[[argparse.Namespace], int]


def _console() -> Console:
    return Console(file=sys.stdout)


def _refuse(text: str) -> int:
    return _say("refused", text, BAD_INPUT)


def _say(what: str, text: str, code: int) -> int:
    """One message on stderr, on one line however long (a terminal folds it); returns the exit code."""
    Console(stderr=True).print(Text.assemble((what, "bold red"), " ", text), soft_wrap=True)
    return code


def _answers(command: Command) -> Command:
    """Turns what a user can cause into one message and an exit code."""

    @wraps(command)
    def guarded(options: argparse.Namespace) -> int:
        try:
            return command(options)
        except ConfigError as error:
            return _refuse(str(error))
        except StoreError as error:
            return _refuse(str(error))
        except (StageFailed, ReplayMismatch) as error:
            return _say("failed", str(error), STAGE_FAILED)
        except KeyboardInterrupt:
            return _say("interrupted", options.command, INTERRUPTED)

    return guarded


def _execute(config: RunConfig, *, resume: bool) -> int:
    console, paths = _console(), RunPaths(config.run_dir)
    try:
        run_config(config, console, resume=resume)
    except KeyboardInterrupt:
        console.print(f"interrupted; {_how_to_go_on(paths)}", markup=False, highlight=False, soft_wrap=True)
        return INTERRUPTED
    except StageFailed as error:
        where = f"What its worker printed is in {paths.logs}; {_how_to_go_on(paths)}"
        return _say("failed", f"{error}. {where}", STAGE_FAILED)
    return DONE


def _how_to_go_on(paths: RunPaths) -> str:
    return f"`stageline resume {paths.root}` continues this run" if paths.events.exists() else "nothing had started"


def _split(sources: list[str]) -> tuple[list[str], list[str]]:
    """Config files and key=value changes, each in the order given."""
    files = [source for source in sources if "=" not in source]
    return files, [source for source in sources if "=" in source]


def saved_config(run_dir: str) -> RunConfig:
    """The config that a run's directory holds. Raises ConfigError where there is none."""
    paths = RunPaths(Path(run_dir))
    if not paths.config.is_file():
        raise ConfigError(run_dir, "holds no run (no config.yaml in it); give a run's directory, for example runs/demo")
    config = load_yaml(paths.config.read_text("utf8"))
    config.runs_dir = str(paths.root.resolve().parent)  # the directory may have been moved or be seen from elsewhere
    config.name = paths.root.resolve().name
    return config


@_answers
def run(options: argparse.Namespace) -> int:
    """`stageline run CONFIG... [key=value...]`."""
    return _execute(load_config(*_split(options.sources)), resume=False)


@_answers
def resume(options: argparse.Namespace) -> int:
    """`stageline resume RUN`."""
    return _execute(saved_config(options.run_dir), resume=True)


@_answers
def check(options: argparse.Namespace) -> int:
    """`stageline check CONFIG [key=value...] | RUN`."""
    console = _console()
    if Path(options.target).is_dir():
        config = saved_config(options.target)
        report = verify_run(config)
        console.print(report.render())
        return DONE if report.sound else BAD_INPUT
    files, overrides = _split([options.target, *options.more])
    config = load_config(files, overrides)
    check_run_directory(config, resume=False)
    checked = preflight(config)
    train, held_out = len(checked.prompts.train), len(checked.prompts.held_out)
    console.print(
        f"{options.target}: would run ({train} prompts to train on, {held_out} held out)",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return DONE


@_answers
def inspect(options: argparse.Namespace) -> int:
    """`stageline inspect RUN --step N`."""
    _console().print(inspect_step(saved_config(options.run_dir), options.step, options.rows))
    return DONE


@_answers
def replay(options: argparse.Namespace) -> int:
    """`stageline replay RUN --step N --stage STAGE [--shard S]`."""
    result = replay_node(saved_config(options.run_dir), options.stage, options.step, options.shard)
    _console().print(result.render())
    return DONE if result.as_expected else STAGE_FAILED


@_answers
def export(options: argparse.Namespace) -> int:
    """`stageline export RUN [--version V] [--to DIR]`."""
    config = saved_config(options.run_dir)
    target = export_version(config, options.version, None if options.to is None else Path(options.to))
    _console().print(f"wrote {target}", markup=False, highlight=False, soft_wrap=True)
    return DONE

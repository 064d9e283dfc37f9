"""Functions and constants that all commands share: exit codes, output, messages for errors, and reading a config."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from pipeline.config.identity import FILE, read_identity
from pipeline.config.loading import is_setting, load_config, load_yaml, read_run_config, readable_config
from pipeline.config.paths import RunPaths, refuse_foreign, write_fault
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, StageFailed, join_errors
from pipeline.observe.journal import journal_exists
from pipeline.observe.text import escape_control_characters, print_plain
from pipeline.workers.messages import ReplayMismatch
from storage.errors import StoreError
from storage.redaction import redacted_text

WORKING = frozenset({"run", "resume", "job", "worker", "sweep", "reward"})
"""Commands that continue even if their terminal was closed or nobody reads their output any more. Other commands fail
then."""


def run_command(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit code. If the command raises an error that users can cause, print one message
    and return the exit code of that kind of error."""
    if options.command in WORKING:
        with ignore_closed_streams():
            return _run_command(command, options)
    return _run_command(command, options)


@contextmanager
def ignore_closed_streams() -> Iterator[None]:
    """Return a context in which printing does not fail if the terminal was closed or the reader of the output ended."""
    out, err = (cast(TextIO, _ClosableStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _ClosableStream:
    """A stream that writes to the null device after its reader has ended or its terminal was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            # Redirect the file descriptor, because native code also prints to it, and so does Python when it exits.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def _run_command(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    try:
        return command(options)
    except (ConfigError, StoreError) as error:
        return print_error("refused", str(error), BAD_INPUT)
    except (StageFailed, ReplayMismatch) as error:
        return print_error("failed", str(error), STAGE_FAILED)
    except KeyboardInterrupt:
        return print_error("interrupted", options.command, INTERRUPTED)


def output_console() -> Console:
    """Return the console for a command's output."""
    return Console(file=sys.stdout)


def print_line(text: str) -> None:
    """Print one line of output without markup and without folding. Control characters are shown as text and have no
    effect on the terminal."""
    print_plain(output_console(), text)


def print_note(text: str) -> None:
    """Print one line on stderr. The line is neither output nor an error."""
    Console(stderr=True).print(Text(escape_control_characters(redacted_text(text))), soft_wrap=True)


def print_error(label: str, text: str, code: int) -> int:
    """Print one message on stderr, without folding its lines, and return `code`, the command's exit code."""
    Console(stderr=True).print(
        Text.assemble((label, "bold red"), " ", escape_control_characters(redacted_text(text))), soft_wrap=True
    )
    return code


def checked_output_path(option: str, given: str, suffix: str, *, replaces: bool = False) -> Path:
    """Return the path of an output file that the user gave with an option.

    Raises:
        ConfigError: the path is a directory or does not end in `suffix`, or its parent directory does not exist or
            cannot be written to. Or the path is a file that exists, and `replaces` is False."""
    file, refused = Path(given), f"given {given!r}"
    if file.suffix != suffix:
        raise ConfigError(option, f"{refused}; a name that ends in {suffix}")
    if file.is_dir() or (file.exists() and not replaces):
        raise ConfigError(option, f"{refused}; it exists already{' as a directory' * replaces}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(option, f"{refused}; there is no directory {file.parent}")
    fault = write_fault(file.absolute().parent)
    if fault is not None:
        raise ConfigError(option, f"{refused}; cannot write to {file.parent}: {fault}")
    return file


# ---- exit codes ------------------------------------------------------------------------------------------

SUCCESS = 0
BAD_INPUT = 2
"""A command was refused before it started anything, because it cannot use a config, an argument, a directory, or a file
in the directory. It is also the exit code if `check RUN` finds faults in the run or `doctor` finds a fault in the
machine.
"""
STAGE_FAILED = 3
"""A started run ended before its last step because of a stage, a disk or damaged files. It can be resumed. Some
commands use this code for another failure:

- `replay`: the result differs from the committed result by more than is allowed
- `sync`: some data could not be delivered
- `worker`: the worker's process ended for good
- `reward train`: the training failed, and begins anew when it is started again
- `reward label`: the labelling stopped, and continues when it is started again
"""
INTERRUPTED = 130
DRIVER_LOST = 4
"""Exit code of `stageline worker`: the driver disappeared. The worker may be started again to join the next driver."""
RESUMABLE = 75
"""Exit code of a cluster's job (EX_TEMPFAIL of sysexits.h). The job ended early, and continues when it is started
again."""


# ---- sources ---------------------------------------------------------------------------------------------


def config_from_sources(sources: Sequence[str], *, runs_here: bool = True, tries_rewards: bool = False) -> RunConfig:
    """Return the config that YAML files and key=value overrides give. Files are merged in the order given, then the
    overrides in the order given.

    Args:
        sources: files and overrides. A text with `=` is an override.
        runs_here: True if the run will be on this host. If so, and if settings are wrong, the model, the prompts and
            the rewards are read too, and their errors are reported with the errors of the settings.
        tries_rewards: True if the rewards are also tried then (`pipeline/config/reward_trial.py`).

    Raises:
        ConfigError: lists all errors."""
    files = [source for source in sources if "=" not in source]
    overrides = [source for source in sources if "=" in source]
    _refuse_settings_as_files(files)
    try:
        return load_config(files, overrides)
    except ConfigError as error:
        config = readable_config(files, overrides, error.keys) if runs_here else None
        if config is None:
            raise
        further = import_module("pipeline.config.preflight").read_errors(config, error.keys)  # a slow import
        if tries_rewards:
            further += import_module("pipeline.config.reward_trial").trial_errors(config, error.keys)
        raise join_errors([error, *further]) from error


def _refuse_settings_as_files(files: Sequence[str]) -> None:
    """Raise ConfigError for a missing file with the name of a setting: `staleness 2` in place of `staleness=2`."""
    for name, after in zip_longest(files, files[1:]):
        if not Path(name).exists() and is_setting(name, RunConfig):
            value = after if after is not None and not Path(after).exists() else "..."
            raise ConfigError(name, f"is a setting, and no file of that name is there; did you mean {name}={value}?")


def read_submitted_config(run_dir: str) -> RunConfig:
    """Return the config of a run. If the run was submitted as a job and has not begun, its config is the submitted one.
    Raises the errors of `read_saved_config`."""
    paths = RunPaths(Path(run_dir))
    submitted = paths.job / "config.yaml"
    begun = paths.config.exists() or read_identity(paths.root) is not None
    return load_config([submitted]) if submitted.exists() and not begun else read_saved_config(run_dir)


def read_trusted_config(run_dir: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the result of `read_saved_config`, after a check that no other account can change the run's directory. Use
    this function if the process will use code or weights of the run.

    Raises:
        ConfigError: another account can change the run's directory, or `read_saved_config` raised it.
        StoreError: `read_saved_config` raised it."""
    refuse_foreign(Path(run_dir))
    return read_saved_config(run_dir, overrides)


def read_saved_config(run_dir: str, overrides: Sequence[str] = (), *, variants: bool = False) -> RunConfig:
    """Return the config in a run's directory, with key=value changes. If config.yaml is lost, or this user may not read
    it, the settings come from identity.json. `name` and `runs_dir` are set to the place where the directory is now.

    Raises:
        ConfigError: the directory holds no run, or the config is damaged. Or the directory holds a variant (trained on
            the rollouts of another run), and `variants` is False.
        StoreError: identity.json is needed, and is damaged.
    """
    paths = RunPaths(Path(run_dir))
    if paths.variant.exists() and not variants:
        raise ConfigError(
            run_dir,
            f"holds a variant, trained on the rollouts that another run recorded ({paths.variant}): it has no ledger "
            f"and no rollouts of its own. What it came to is in {paths.summary}",
        )
    identity = None if os.access(paths.config, os.R_OK) else read_identity(paths.root)
    if identity is not None:  # it contains all settings except secrets
        config = load_yaml(json.dumps(identity.latest.config), overrides, source_name=f"{paths.root}/{FILE}")
    elif paths.config.is_file():
        config = read_run_config(paths.config, overrides)
    else:
        raise _no_run_error(paths.root)
    config.runs_dir = str(paths.root.resolve().parent)  # the directory may have been moved or be seen from elsewhere
    config.name = paths.root.resolve().name
    return config


def _no_run_error(run_dir: Path) -> ConfigError:
    """Return the error for a path that is no run's directory. It proposes a directory that the user may have meant."""
    inside = Path("runs") / run_dir
    if run_dir.is_file():
        near: Path | str = run_dir.parent if RunPaths(run_dir.parent).config == run_dir else "runs/demo"
        return ConfigError(str(run_dir), f"is a file; give a run's directory, for example {near}")
    near = inside if RunPaths(inside).config.is_file() else "runs/demo"
    return ConfigError(str(run_dir), f"holds no run (no config.yaml in it); give a run's directory, for example {near}")


def has_begun(config: RunConfig) -> bool:
    """Return True if an earlier driver has begun the run, even if it finished no step."""
    paths = RunPaths(config.run_dir)
    return (paths.root / FILE).exists() or paths.config.exists() or journal_exists(paths.events)

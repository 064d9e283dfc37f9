"""Start a run from a script or a notebook: the interface of `import stageline` (docs/python.md). The run is the same as
with `stageline run`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec

from rich.console import Console

from pipeline.cli.answers import config_from_sources, has_begun
from pipeline.cli.opened_run import OpenedRun, open_run
from pipeline.config.loading import check_again
from pipeline.config.paths import refuse_foreign
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.observe.text import print_plain


def load_config(*sources: str | os.PathLike[str]) -> RunConfig:
    """Return the config of YAML files and `key=value` changes, merged as on the command line.

    Raises:
        ConfigError: lists all errors.
        TypeError: a source is neither a text nor a path."""
    for source in sources:
        if not isinstance(source, str | os.PathLike):
            raise TypeError(f'give each file and each change as an argument ("run.yaml", "seed=1"), not {source!r}')
    return config_from_sources([os.fspath(source) for source in sources])


def run(
    config: RunConfig,
    *,
    callbacks: Collection[Callable[[int, Mapping[str, float]], None]] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> OpenedRun:
    """Run a config to its last step and return the finished run. Call it in the main thread. An earlier run of this
    name that committed no update is moved aside.

    Args:
        config: the config to run. You may change a config after loading, because `run` checks it again. `run` does not
            modify it.
        callbacks: functions that the driver's process calls. Each is called as `callback(step, metrics)` when a step is
            over, and as `callback(version, metrics)` with the `eval/` metrics when an evaluation is over. A callback
            gets copies of the metrics, so it cannot change the run's numbers. An exception in a callback ends the run,
            which can be resumed.
        resume: if the run has begun, continue it, instead of moving it aside or raising ConfigError.
        overwrite: move an earlier run of this name aside even if it has committed updates.
        quiet: print nothing.

    Raises:
        ConfigError: the config cannot work, or this is not the main thread, and nothing was started. Or the run refused
            a worker because of the worker's numerics or host, and cannot continue without this worker.
        StageFailed: a stage raised, workers were lost too often, or stored data was found damaged.
        KeyboardInterrupt: Ctrl-C, or the notebook's stop button.
        TypeError: `config` is no config, but for example the name of a file. Or `callbacks` is no list of functions.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(f'give a config: run(load_config("run.yaml", "steps=4")), not {config!r:.80}')
    if not isinstance(callbacks, list | tuple | set) or not all(map(callable, callbacks)):
        raise TypeError(f"callbacks: give a list of functions, such as [print], not {callbacks!r:.80}")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("stageline.run", "call it in the main thread, because it handles signals")
    checked = check_again(config)
    goes_on = resume and has_begun(checked)
    if goes_on:
        refuse_foreign(checked.run_dir)
    program = import_module("pipeline.cli.run")  # loads Dask, which is not needed to read a run
    console = Console(quiet=quiet)
    if not goes_on:
        moved = program.move_earlier_run_aside(checked, overwrite=overwrite, user_agreed=True)
        if moved is not None:
            print_plain(console, moved)
    with _hide_main_module():
        program.run(checked, console, resume=goes_on, callbacks=callbacks)
    return open_run(checked.run_dir)


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep worker processes from importing the calling script, which would start the run again in each. multiprocessing
    imports the main module unless its spec has the name `__main__`."""
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
    try:
        yield
    finally:
        main.__spec__ = before

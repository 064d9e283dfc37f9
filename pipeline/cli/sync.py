"""`stageline sync RUN [--to URI]`: deliver a run's tracking data to MLflow and to the trackers of `tracking.also`. Data
that a tracker already has is not sent again. The data is read from the run's spool file."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import STAGE_FAILED, SUCCESS, print_error, print_line, read_trusted_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import SQLITE
from pipeline.driver.session import hold_driver_lock
from pipeline.errors import ConfigError
from pipeline.observe.tracking import deliver, experiment_id, opening_hint

DELIVERY_TIMEOUT_S = 600.0


def command(options: argparse.Namespace) -> int:
    return sync(read_trusted_config(options.run_dir), options.to)


def sync(config: RunConfig, to: str | None) -> int:
    """Deliver the spool file and return the exit code. `to`: another MLflow store, which gets the data of the whole
    run. If `to` is given, nothing is delivered to the stores of the config.

    A missing database file is created. A missing directory is not created, because it is more likely a spelling error.

    Raises:
        ConfigError: the run was not tracked or is running, or no usable store is given.
    """
    paths = RunPaths(config.run_dir)
    if not paths.mlflow_spool.exists():
        need = "holds no spool: the run was not tracked (tracking.uri=null), or has not begun"
        raise ConfigError(str(paths.root), f"{paths.mlflow_spool} is not there; {paths.root.name} {need}")
    uri = to or config.tracking.uri
    if uri is None:
        raise ConfigError("--to", "not given, and tracking.uri is null; a URI (sqlite:///..., http://...) would work")
    if not uri.startswith(("sqlite:///", "http://", "https://")):
        raise ConfigError("--to", f"given {uri!r}; must begin with sqlite:/// (a file) or http:// or https://")
    folder = Path(uri.removeprefix(SQLITE)).parent
    if uri.startswith(SQLITE) and not folder.is_dir():
        key, need = "--to" if to else "tracking.uri", "; --to sqlite:///... names another file" if not to else ""
        raise ConfigError(key, f"given {uri!r}; there is no directory {folder} (from {Path.cwd()}){need}")
    with hold_driver_lock(paths):
        targets = [uri] if to else [uri, *config.tracking.also]
        left = {target: deliver(paths.mlflow_spool, target, DELIVERY_TIMEOUT_S).num_undelivered for target in targets}
    if failed := [f"{target}: {number} items not delivered" for target, number in left.items() if number]:
        return print_error("failed", f"{', '.join(failed)}; they stay in the spool", STAGE_FAILED)
    print_line(f"{paths.root}: all delivered; {opening_hint(uri, experiment_id(paths.mlflow_spool, uri))}")
    return SUCCESS

"""`stageline sync RUN [--to URI]`: deliver the rest of a run's tracking spool to MLflow, and to further trackers."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.cli.answers import DONE, STAGE_FAILED, complain, print_line, trusted_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import SQLITE
from pipeline.driver.session import only_driver
from pipeline.errors import ConfigError
from pipeline.observe.tracking import deliver, experiment_id, how_to_open

DELIVER_S = 600.0


def command(options: argparse.Namespace) -> int:
    return sync(trusted_config(options.run_dir), options.to)


def sync(config: RunConfig, to: str | None) -> int:
    """Deliver the spool and return the exit code. `to`: another MLflow store, which gets the whole run.

    Raises:
        ConfigError: the run was not tracked, is running, or there is no store. A missing database file is created. A
            missing directory is not, because the path is then more likely misspelt.
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
    with only_driver(paths):
        targets = [uri] if to else [uri, *config.tracking.also]
        left = {target: deliver(paths.mlflow_spool, target, DELIVER_S).left for target in targets}
    if failed := [f"{target}: {number} items not delivered" for target, number in left.items() if number]:
        return complain("failed", f"{', '.join(failed)}; they stay in the spool", STAGE_FAILED)
    print_line(f"{paths.root}: all delivered; {how_to_open(uri, experiment_id(paths.mlflow_spool, uri))}")
    return DONE

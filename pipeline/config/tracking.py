"""The section `tracking`: where MLflow keeps what a run tells it. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem

SQLITE = "sqlite:///"
_SCHEMES = (SQLITE, "http://", "https://")


@dataclass
class TrackingConfig:
    uri: str | None = "sqlite:///runs/mlflow.db"
    """MLflow's store or server; null: none."""
    experiment: str = "stageline"
    parent: str | None = None
    """MLflow's id of the run that this one is shown under; a sweep sets it."""
    register: str | None = None
    """Registered model in MLflow that the last version's weights become a version of; null: none. Of a file only."""
    plots: bool = True
    report: bool = True
    """Whether `report.html` is written at the end."""


def tracking_problems(config: TrackingConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    if config.uri is not None and not config.uri.startswith(_SCHEMES):
        need = "must begin with sqlite:/// (a file) or http:// or https:// (a server), or be null for no tracking"
        yield Problem("tracking.uri", config.uri, need)
    if config.register is not None:
        if not config.register or set(config.register) & set("/:"):
            need = "must be a name without / and :, or null for no registered model"
            yield Problem("tracking.register", config.register, need)
        if config.uri is None or not config.uri.startswith(SQLITE):
            need = "needs a tracking.uri of sqlite:///: a server takes no weights that lie on this host; or null"
            yield Problem("tracking.register", config.register, need)

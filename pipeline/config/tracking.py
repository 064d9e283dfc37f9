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
    plots: bool = True
    report: bool = True
    """Whether `report.html` is written at the end."""


def tracking_problems(config: TrackingConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    if config.uri is not None and not config.uri.startswith(_SCHEMES):
        need = "must begin with sqlite:/// (a file) or http:// or https:// (a server), or be null for no tracking"
        yield Problem("tracking.uri", config.uri, need)

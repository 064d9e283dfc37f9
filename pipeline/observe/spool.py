"""The spool of a run's tracking as its readers have it: lines of what is to be delivered, and the writer's note of how
far it came.

    mlflow_spool.jsonl         an item a line, by kind; appended by the driver
    mlflow_spool.state.json    of the writer process

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

_FIELDS: dict[Any, set[str]] = {
    "open": {"t", "key", "experiment", "run_name", "params", "tags"},  # and in new spools: if_abandoned
    "metrics": {"t", "step", "values"},
    "trace": {"t", "step", "spans"},  # and in new spools: asked, answered
    "dataset": {"t", "name", "digest", "source", "context", "profile"},
    "model": {"t", "name", "source"},
    "artifact": {"t", "path", "artifact_dir"},
    "tags": {"t", "values"},
    "close": {"t", "status"},
}
"""Of a line of the spool, by its kind."""
STATE_FIELDS = {"uri", "metrics", "rest", "run_id", "experiment_id", "open"}
"""Of the writer's note: to where, how far each of the two queues is delivered, into which run, whether it is open."""


def delivered_run_id(spool_path: Path, uri: str) -> str | None:
    """The MLflow run that a spool was delivered to at `uri`; None where it never was."""
    state = read_state(spool_path)
    run_id: str | None = state.get("run_id") if state.get("uri") == uri else None
    return run_id


def read_state(spool_path: Path) -> dict[str, Any]:
    """What a spool's writer has noted of its deliveries; empty where there is no note, or a damaged one (after a power
    cut, say): then all is delivered again, which changes nothing."""
    try:
        state = json.loads(spool_path.with_suffix(".state.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return state if isinstance(state, dict) and state.keys() >= STATE_FIELDS else {}


def experiment_id(spool_path: Path, uri: str) -> str | None:
    """MLflow's number of the experiment that a spool's run is in; None where it was never delivered to `uri`."""
    state = read_state(spool_path)
    return str(state["experiment_id"]) if state.get("uri") == uri and state["experiment_id"] is not None else None


def read_spool(path: Path, offset: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """The complete lines of a spool from byte `offset` on, each with the byte offset of its end. A line that is
    still being written is left for the next call; one that a damaged disk gives back as something else is lost."""
    if not path.exists():
        return []
    items = []
    with path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if line.endswith(b"\n"):
                offset += len(line)
                with contextlib.suppress(ValueError, TypeError):
                    item = json.loads(line)
                    if isinstance(item, dict) and _FIELDS.get(item.get("kind"), {"?"}) <= item.keys():
                        items.append((offset, item))
    return items

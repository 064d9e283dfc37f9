"""The real runtime, whose process counts the points it reaches and is struck at them (`tests/support/strikes.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO, Any

import stages.models.host
from pipeline.config.loading import load_yaml
from pipeline.config.paths import RunPaths
from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.models.trainer import Trainer
from storage import files
from storage.checkpoints import Checkpoints
from storage.ledger import Ledger
from storage.weights import WeightBoard
from tests.support.strikes import Striker

_patched: set[int] = set()
"""This process, once its code is patched: a process that is built again must not be patched twice."""


class StruckRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        striker = Striker(spec.name, RunPaths(load_yaml(spec.config_yaml).run_dir).logs)
        if os.getpid() not in _patched:
            _patched.add(os.getpid())
            _patch(striker)
        super().__init__(spec)
        if self.parts.engine is not None:
            _around(self.parts.engine._engine._runner, "submit", striker, before="pass")
        striker.reach("built")


def _patch(striker: Striker) -> None:
    """Where a process of any kind can be struck: in the middle of a file, between it and its commit, between that and
    the move into place, between two optimizer steps, while weights or a checkpoint are written."""
    _around(files, "_link", striker, before="commit")
    _around(Ledger, "commit", striker, after="committed")
    _around(files, "move", striker, before="move")
    _around(Trainer, "_step", striker, before="minibatch", after="stepped")
    _around(WeightBoard, "_new_file", striker, after="board")
    _around(WeightBoard, "link", striker, before="manifest")
    _around(Checkpoints, "begin", striker, after="checkpoint begin")
    _around(Checkpoints, "finish", striker, before="checkpoint finish")
    _around(stages.models.host, "write_snapshot", striker, after="snapshot written")
    _around(stages.models.host, "write_model", striker, before="export")
    fill = files._fill

    def torn(stream: IO[bytes], data: bytes) -> None:
        if striker.due("file"):
            fill(stream, data[: len(data) // 2])
            striker.strike()
            stream.seek(0)
        fill(stream, data)

    files._fill = torn


def _around(owner: Any, name: str, striker: Striker, *, before: str = "", after: str = "") -> None:
    """Has a function reach one point before it runs, and one after."""
    function: Callable[..., Any] = getattr(owner, name)

    def reaching(*arguments: Any, **named: Any) -> Any:
        if before:
            striker.reach(before)
        result = function(*arguments, **named)
        if after:
            striker.reach(after)
        return result

    setattr(owner, name, reaching)

"""The real runtime, with weights that are not what was trained.

`PerturbedBoardRuntime` publishes one version with other numbers, under sums of their own: a publication gone wrong,
which looks like staleness to everything but a canary. `StaleBoardRuntime` publishes one version with the weights of the
version before it, as if an engine had not taken the new ones. `FlippedBoardRuntime` flips a bit of one version in
memory after it was published: the sums say so.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.workers.messages import Call, Outcome, WorkerSpec
from pipeline.workers.runtime import StageRuntime
from storage.weights import Manifest, WeightBoard

DAMAGED = 2
"""The version."""


class PerturbingBoard(WeightBoard):
    """Owns what `WeightBoard` does."""

    def publish(
        self, version: int, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None
    ) -> Manifest:
        if version == DAMAGED:
            name = next(name for name in tensors if "down_proj" in name)
            tensors = {**tensors, name: -tensors[name]}
        return super().publish(version, tensors, dtypes)


class PerturbedBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.parts.board = PerturbingBoard(self.parts.board.directory)


class StaleBoard(WeightBoard):
    """Owns what `WeightBoard` does."""

    before: Mapping[str, np.ndarray]

    def publish(
        self, version: int, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None
    ) -> Manifest:
        if version == DAMAGED:
            return super().publish(version, self.before, dtypes)
        self.before = {name: tensor.copy() for name, tensor in tensors.items()}
        return super().publish(version, tensors, dtypes)


class StaleBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.parts.board = StaleBoard(self.parts.board.directory)


class FlippedBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does. Once per run: a resumed one is left alone."""

    def run(self, call: Call) -> Outcome:
        result = super().run(call)
        flipped = self.parts.config.run_dir / "flipped"
        if (call.address.stage, call.version) == ("publish", DAMAGED) and not flipped.exists():
            manifest = self.parts.board.manifest(DAMAGED)
            file = np.memmap(self.parts.board.directory / manifest.file, np.uint8, "r+")
            file[manifest.tensors[3].offset + 5] ^= 1
            file.flush()
            flipped.touch()
        return result

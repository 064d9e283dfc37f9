"""The real runtime, whose publications of one version are damaged in memory before anybody reads them: a refit gone
wrong, which looks like staleness to everything but a canary."""

from __future__ import annotations

import numpy as np

from pipeline.workers.entry import CallResult
from pipeline.workers.messages import Call
from pipeline.workers.runtime import StageRuntime

DAMAGED = 2
"""The version."""


class PerturbedBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def run(self, call: Call) -> CallResult:
        result = super().run(call)
        if (call.address.stage, call.version) == ("publish", DAMAGED):
            manifest = self.parts.board.manifest(DAMAGED)
            assert manifest is not None
            info = next(t for t in manifest.tensors if "down_proj" in t.name)
            tensor = np.memmap(self.parts.board.directory / manifest.file, np.float32, "r+", info.offset, info.shape)
            tensor[...] *= -1
            tensor.flush()
        return result

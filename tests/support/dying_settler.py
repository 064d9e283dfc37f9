"""The real runtime, whose process dies once between a commit and the last rename of its files."""

from __future__ import annotations

import os
from typing import Any

from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from storage import files
from storage.address import Address

VICTIM = Address("generate", 1, 1)


class DyingSettlerRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        store, died = self.parts.store, self.parts.config.run_dir / "died"
        settle, move = store.settle, files.move

        def dying(commit: Any) -> None:
            if commit.address != VICTIM or died.exists():
                settle(commit)
                return
            died.touch()
            moved: list[str] = []

            def dying_move(root: files.Root, source: str, target: str) -> bool:
                moved.append(target)
                if len(moved) == 5:
                    os._exit(1)
                return move(root, source, target)

            files.move = dying_move
            settle(commit)

        store.settle = dying  # type: ignore[method-assign]

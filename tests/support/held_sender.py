"""The real runtime, whose worker stops in the middle of sending a version to another host. In the run's `control/`
directory:

- `sending`: written when the first version of a trained policy has been sent so far
- `hold`: while it is there, no more of it is sent
"""

from __future__ import annotations

from pathlib import Path

from pipeline.config.loading import load_yaml
from pipeline.workers import weight_transfer
from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from storage.weight_copies import OutgoingVersion

PIECE_BYTES, PIECES = 1 << 16, 3
HELD_BYTES = PIECE_BYTES * PIECES
VERSION = 1


class HeldSender(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        control: Path = load_yaml(spec.config_yaml).run_dir / "control"

        class Held(OutgoingVersion):
            def num_ready(self) -> int:
                ready = super().num_ready()
                if self.manifest.version != VERSION or not (control / "hold").exists():
                    return ready
                (control / "sending").touch()
                return min(ready, HELD_BYTES)

        weight_transfer.OutgoingVersion = Held  # type: ignore[misc]
        weight_transfer.PIECE_BYTES = PIECE_BYTES
        super().__init__(spec)

"""A sender of weights (`pipeline/workers/weight_sender.py`) that stops or dies in the middle of version 1. In the run's
`control/`:

- `sending`: written when the first pieces of the version have been sent
- `hold`: while it is there, no more of it is sent
- `killed sender`: written by a sender just before it kills itself
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pipeline.workers import weight_sender
from storage.weight_copies import OutgoingVersion

PIECE_BYTES, PIECES = 1 << 16, 3
HELD_BYTES = PIECE_BYTES * PIECES
VERSION = 1
_CONTROL, _KILL = "STAGELINE_TEST_CONTROL", "STAGELINE_TEST_KILL"


def use_faulty_sender(control: Path, *, kill: bool = False) -> None:
    """Let this process start such a sender, and receive in small pieces. `kill`: the sender dies once in a run."""
    os.environ |= {_CONTROL: str(control), _KILL: str(int(kill))}
    weight_sender.PIECE_BYTES, weight_sender.PROGRAM = PIECE_BYTES, __name__


def first_time(control: Path, name: str) -> bool:
    """Return True the first time that any process asks this in a run."""
    try:
        (control / f"killed {name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Faulty(OutgoingVersion):
    """Owns what `OutgoingVersion` does."""

    def num_ready(self) -> int:
        ready, control = super().num_ready(), Path(os.environ[_CONTROL])
        if self.manifest.version != VERSION or not (control / "hold").exists():
            return ready
        (control / "sending").touch()
        return min(ready, HELD_BYTES)

    def read(self, offset: int, nbytes: int) -> memoryview:
        due = self.manifest.version == VERSION and offset >= HELD_BYTES and os.environ[_KILL] == "1"
        if due and first_time(Path(os.environ[_CONTROL]), "sender"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(offset, nbytes)


if __name__ == "__main__":
    weight_sender.OutgoingVersion = Faulty  # type: ignore[misc]
    weight_sender.main()

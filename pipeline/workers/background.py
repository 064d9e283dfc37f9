"""What a worker writes while it goes on: checkpoints and exports, from copies that were taken before.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Owns a thread that does one piece of work after another, in the order in which they were handed in: so the ranks
    of a gang, which hand in the same ones, meet in the same order. Of each name one piece is on its way at most. What
    a piece raises is raised by the next call that names it, or by `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background-writer")
        self._pending: dict[str, Future[None]] = {}

    def submit(self, name: str, work: Callable[[], None]) -> None:
        """Hands in a piece of work; waits for the one before it of the same name."""
        self.settle(name)
        self._pending[name] = self._thread.submit(work)

    def settle(self, name: str) -> None:
        """Waits for the work of a name, if there is any."""
        pending = self._pending.pop(name, None)
        if pending is not None:
            pending.result()

    def settle_all(self) -> None:
        """Waits for all work. Raises what the first one that failed raised."""
        errors = [error for future in self._pending.values() if (error := future.exception()) is not None]
        self._pending.clear()
        if errors:
            raise errors[0]

    def close(self) -> None:
        try:
            self.settle_all()
        finally:
            self._thread.shutdown()

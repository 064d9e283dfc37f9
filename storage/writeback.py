"""Work in the background of a process. Standard library only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 8
"""Most pieces of work that wait. With more the disk does not keep up, and a longer queue gains nothing."""


class Writeback:
    """A thread that does one piece of work after another, in the order in which any threads submitted them. The next
    `submit`, or `close`, raises what a piece of work raised."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writeback")
        self._pending: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> None:
        """Submit a piece of work. Waits for the oldest one if too many are waiting."""
        with self._lock:
            over = []
            while self._pending and (len(self._pending) >= MOST_WAITING or self._pending[0].done()):
                over.append(self._pending.popleft())
            self._pending.append(self._thread.submit(work))
        _raise_first(over)

    def close(self) -> None:
        """Wait for all work."""
        self._thread.shutdown()
        with self._lock:
            over = list(self._pending)
            self._pending.clear()
        _raise_first(over)


def _raise_first(futures: list[Future[None]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]

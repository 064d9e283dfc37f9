"""Work that a process does behind what it does next. Standard library only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 8
"""Pieces: more than that means that the disk does not keep up, and then there is nothing to be gained."""


class Behind:
    """Owns a thread that does one piece of work after another, in the order in which they were handed in, by any number
    of threads. What a piece raises is raised by the next `submit`, or by `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._pending: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> None:
        """Hands in a piece of work; waits for the oldest where too many are waiting."""
        with self._lock:
            over = []
            while self._pending and (len(self._pending) >= MOST_WAITING or self._pending[0].done()):
                over.append(self._pending.popleft())
            self._pending.append(self._thread.submit(work))
        _raise_first(over)

    def close(self) -> None:
        """Waits for all work."""
        self._thread.shutdown()
        with self._lock:
            over = list(self._pending)
            self._pending.clear()
        _raise_first(over)


def _raise_first(futures: list[Future[None]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]

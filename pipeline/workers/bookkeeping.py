"""Measure the time that a stage spends on the store, the ledger and new weights. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock(threading.local):
    """Counter of the seconds that this thread's call spends on bookkeeping."""

    seconds: float = 0.0

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Count the seconds of the block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

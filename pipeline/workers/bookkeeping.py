"""What a stage spends on the store and the ledger, and on new weights: measured separately from its own work.

Standard library only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock(threading.local):
    """Owns the seconds that this thread's call spends on bookkeeping."""

    seconds: float = 0.0

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

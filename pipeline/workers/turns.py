"""Turns of the calls on one worker: one call computes at a time, in the order in which the calls began.

    call 1   reads │ computes │ stores
    call 2           reads    │ computes │ stores
                                ▲ its turn begins when call 1 has computed

A gang of one rank has two calls at once (`Gang.max_submitted_nodes`). A call uses models and engine during its turn
only, as if the worker had one call at a time. Reading inputs ahead and committing an output need no turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class ComputeTurn:
    """The turn of a call on a worker whose calls may all compute at once."""

    def wait(self) -> None:
        """Wait until all calls that began before this one have ended their turns."""

    def end(self) -> None:
        """Let the next call compute. Does nothing if this turn has ended."""


class ComputeTurns:
    """The queue of the calls on a worker. The first call in it has its turn."""

    def __init__(self) -> None:
        self._queue: deque[ComputeTurn] = deque()
        self._changed = Condition()

    @contextmanager
    def queued(self) -> Iterator[ComputeTurn]:
        """Put a call at the end of the queue, and yield its turn. The turn ends at the latest when the caller's `with`
        block ends."""
        turn = _QueuedTurn(self._queue, self._changed)
        try:
            yield turn
        finally:
            turn.end()


class _QueuedTurn(ComputeTurn):
    def __init__(self, queue: deque[ComputeTurn], changed: Condition) -> None:
        self._queue, self._changed = queue, changed
        with changed:
            queue.append(self)

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] is self)

    def end(self) -> None:
        with self._changed:
            if self in self._queue:
                self._queue.remove(self)
                self._changed.notify_all()

"""What callers hand to the engine's thread, and the lock between them.

    callers' threads                            engine thread
    ----------------                            -------------
    opened, accept: rows                ──────► wait, take_rows
    drained: until all rows are done    ◄────── finished
    hand_over: weights, until taken     ──────► wait, weights, weights_taken     (engine.update: inflight)
    between_batches: until it stands    ◄────── wait
             still; it goes on at the end

May import stages.engines.embedded.rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stages.engines.embedded.rows import Row


class Admission:
    """Owns the lock, and what both sides touch under it: rows and weights on their way in, who waits for what, and
    whether the engine has stopped."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The lock; notified at every change that someone waits for. It also guards what the engine counts."""
        self.num_unfinished = 0
        """Rows accepted, and not yet handed over, dropped or gone elsewhere."""
        self.weights: tuple[int, Any] | None = None
        """Version and prepared weights that the engine thread is to take before its next batch."""
        self.num_pausing = 0
        """Callers that want the engine thread to stand still."""
        self.stopped = False
        self.failure: BaseException | None = None
        """Why it stopped, if it was not closed."""
        self._inbox: list[Row] = []
        self._closed = False
        """Weights are exchanged: rows wait outside."""
        self._resting = False
        """The engine thread waits, and no batch is under way."""

    # ---- callers' side ----

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The lock, when rows may come in. Raises RuntimeError if the engine has stopped."""
        with self.changed:
            self.changed.wait_for(lambda: not self._closed or self.stopped)
            self.check_running()
            yield

    def accept(self, rows: list[Row]) -> None:
        """Under the lock: rows into the queue."""
        self._inbox.extend(rows)
        self.num_unfinished += len(rows)
        for row in rows:
            row.call.num_here += 1
        self.changed.notify_all()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """The lock, when all accepted rows are done; those that come meanwhile wait until the block ends. Raises
        RuntimeError if the engine has stopped."""
        with self.changed:
            self._closed = True
            try:
                self.changed.wait_for(lambda: self.idle or self.stopped)
                self.check_running()
                yield
            finally:
                self._closed = False
                self.changed.notify_all()

    def hand_over(self, version: int, weights: Any) -> None:
        """Returns when the engine thread has taken the weights. Raises RuntimeError if it has stopped."""
        with self.changed:
            self.weights = version, weights
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.weights is None or self.stopped)
            self.check_running()

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """The lock, with the engine thread standing still and no batch under way. Raises RuntimeError if the engine has
        stopped."""
        with self.changed:
            self.num_pausing += 1
            try:
                self.changed.wait_for(lambda: self._resting or self.stopped)
                self.check_running()
                yield
            finally:
                self.num_pausing -= 1
                self.changed.notify_all()

    @property
    def idle(self) -> bool:
        return self.num_unfinished == 0

    @property
    def queued(self) -> tuple[Row, ...]:
        """Rows that the engine thread has not taken yet."""
        return tuple(self._inbox)

    def check_running(self) -> None:
        """Raises RuntimeError if the engine has stopped."""
        if self.stopped:
            raise self.why_stopped() from self.failure

    def why_stopped(self) -> RuntimeError:
        """What whoever waits hears; its cause is `failure`."""
        reason = "" if self.failure is None else f": {type(self.failure).__name__}: {self.failure}"
        return RuntimeError(f"the engine has stopped{reason}")

    def stop(self, failure: BaseException | None = None) -> None:
        """Nobody waits any longer."""
        with self.changed:
            self.stopped = True
            self.failure = self.failure if failure is None else failure
            self.changed.notify_all()

    # ---- engine thread; under the lock ----

    def wait(self, under_way: bool, wants_report: Callable[[], bool], timeout_s: float | None) -> bool:
        """Until there is something to do: `under_way` (a batch has to be ended), rows, weights, a report; or for so
        many seconds at most. Whoever wants the thread to stand still goes first. False if the engine is to stop."""

        def is_due() -> bool:
            has_work = self.weights is not None or not self.idle or wants_report()
            return self.stopped or under_way or (has_work and not self.num_pausing)

        self._resting = not under_way
        self.changed.notify_all()
        if not self.changed.wait_for(is_due, timeout_s) and self.num_pausing:
            self.changed.wait_for(is_due)  # the time is over, but someone has the rows in hand
        self._resting = False
        return not self.stopped

    def take_rows(self) -> list[Row]:
        """Those that came in."""
        rows, self._inbox = self._inbox, []
        return rows

    def weights_taken(self) -> None:
        self.weights = None
        self.changed.notify_all()

    def withdraw(self, row: Row) -> bool:
        """Takes a row back out of the queue; False if it is not there (any more)."""
        if row not in self._inbox:
            return False
        self._inbox.remove(row)
        return True

    def finished(self, num_rows: int) -> None:
        """So many rows less to wait for."""
        self.num_unfinished -= num_rows
        if num_rows and self.idle:
            self.changed.notify_all()

"""The exchange between callers' threads and the engine's thread, under one lock.

callers' threads                                   engine thread
----------------                                   -------------
opened, accept: queue rows                 ──────► wait, take_rows
drained: wait until all rows are done      ◄────── finished
hand_over: give weights while rows are     ──────► wait, weights, weights_taken
           in flight, wait until taken
between_batches: wait for a pause; the     ◄────── wait: pause until the block has ended
                 caller's block then runs
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stages.engines.embedded.rows import Row


class Admission:
    """Owns the lock and the state that it protects: incoming rows, incoming weights, requests for a pause, and whether
    the engine has stopped."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """The lock, notified at every change that a thread waits for. The lock also guards the engine's counts."""
        self.num_unfinished = 0
        """Number of accepted rows that the engine still has to finish. A row no longer counts when it has been returned
        to its caller, dropped, or moved to another engine."""
        self.weights: tuple[int, Any] | None = None
        """Version and prepared weights for the engine thread to take before its next batch. None if there are no new
        weights."""
        self.num_pausing = 0
        """Number of callers that want the engine thread to pause."""
        self.stopped = False
        self.failure: BaseException | None = None
        """The error that stopped the engine. None if the engine runs, or was closed."""
        self._inbox: list[Row] = []
        self._closed = False
        """True from the start of a call of `drained` to the end of its block. Meanwhile `opened` waits, so no new rows
        come in."""
        self._is_paused = False
        """True while the engine thread waits and no batch is under way."""

    # ---- callers' side ----

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Wait until new rows may come in (see `drained`), then hold the lock until the block ends. Raises RuntimeError
        if the engine has stopped."""
        with self.changed:
            self.changed.wait_for(lambda: not self._closed or self.stopped)
            self.check_running()
            yield

    def accept(self, rows: list[Row]) -> None:
        """Queue rows. The caller holds the lock."""
        self._inbox.extend(rows)
        self.num_unfinished += len(rows)
        for row in rows:
            row.call.num_local_rows += 1
        self.changed.notify_all()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Wait until all accepted rows are done, then hold the lock until the block ends. Meanwhile no new rows are
        accepted. Raises RuntimeError if the engine has stopped."""
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
        """Give weights to the engine thread and wait until the thread has taken them. Raises RuntimeError if the engine
        has stopped."""
        with self.changed:
            self.weights = version, weights
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.weights is None or self.stopped)
            self.check_running()

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """Wait until the engine thread pauses with no batch under way, then hold the lock until the block ends. Raises
        RuntimeError if the engine has stopped."""
        with self.changed:
            self.num_pausing += 1
            try:
                self.changed.wait_for(lambda: self._is_paused or self.stopped)
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
        """Raise RuntimeError if the engine has stopped."""
        if self.stopped:
            raise self.why_stopped() from self.failure

    def why_stopped(self) -> RuntimeError:
        """Return the error that tells a waiting caller that the engine has stopped. Its message names the error that
        stopped the engine, if there was one. Raise the result `from self.failure`."""
        reason = "" if self.failure is None else f": {type(self.failure).__name__}: {self.failure}"
        return RuntimeError(f"the engine has stopped{reason}")

    def stop(self, failure: BaseException | None = None) -> None:
        """Mark the engine as stopped and wake every waiting thread. `failure`: the error that stopped the engine, or
        None."""
        with self.changed:
            self.stopped = True
            self.failure = self.failure if failure is None else failure
            self.changed.notify_all()

    # ---- engine thread; the caller holds the lock ----

    def wait(self, under_way: bool, wants_report: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the engine's thread has something to do: rows, new weights or a report. Return False if the engine
        has stopped, otherwise True.

        While other threads want the engine to pause between batches, the wait goes on, even beyond `timeout_s`.

        Args:
            under_way: True if a batch is under way. Then this method returns at once.
            wants_report: function that returns True if a report is due.
            timeout_s: maximum number of seconds to wait. None: no limit.
        """

        def is_due() -> bool:
            has_work = self.weights is not None or not self.idle or wants_report()
            return self.stopped or under_way or (has_work and not self.num_pausing)

        self._is_paused = not under_way
        self.changed.notify_all()
        if not self.changed.wait_for(is_due, timeout_s) and self.num_pausing:
            self.changed.wait_for(is_due)  # the time is over, but another thread is using the rows
        self._is_paused = False
        return not self.stopped

    def take_rows(self) -> list[Row]:
        """Empty the queue and return its rows."""
        rows, self._inbox = self._inbox, []
        return rows

    def weights_taken(self) -> None:
        self.weights = None
        self.changed.notify_all()

    def withdraw(self, row: Row) -> bool:
        """Remove a row from the queue. Return False if the row is not in the queue."""
        if row not in self._inbox:
            return False
        self._inbox.remove(row)
        return True

    def finished(self, num_rows: int) -> None:
        """Subtract `num_rows` from `num_unfinished`, for rows that have finished, were dropped, or have moved to
        another engine. If no row is left, wake the waiting threads."""
        self.num_unfinished -= num_rows
        if num_rows and self.idle:
            self.changed.notify_all()

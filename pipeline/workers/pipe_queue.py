"""A queue between two processes that needs no semaphores. This module imports only the standard library, because a
worker process imports it before its environment is set."""

from __future__ import annotations

from multiprocessing import Pipe
from queue import Empty
from typing import Any


class PipeQueue:
    """Replaces `multiprocessing.Queue` between a nanny and its worker process, where one process puts and the other
    gets. A `multiprocessing.Queue` has three named semaphores in /dev/shm, which stay there if the processes and their
    resource tracker are killed together. As in a `multiprocessing.Queue`, both processes hold both ends of the pipe, so
    neither notices when the other one dies."""

    def __init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        self._closed = False

    def put(self, message: Any) -> None:
        if self._closed:
            raise ValueError("the queue is closed")
        self._writer.send(message)

    def get(self) -> Any:
        return self._reader.recv()

    def get_nowait(self) -> Any:
        if not self._reader.poll():
            raise Empty
        return self._reader.recv()

    def close(self) -> None:
        """Make `put` raise from now on. The pipe stays open until this object is deleted, since a thread may be waiting
        in `get`."""
        self._closed = True

    def join_thread(self) -> None:
        """Do nothing, since `put` returns only when the message is written."""


class Queues:
    """The part of a multiprocessing context that a nanny uses."""

    Queue = PipeQueue

"""A worker's answer to the order to free its devices: once after the order, and again for each repetition."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any, cast

import pytest
from distributed import Worker

from pipeline.workers.messages import REPORTS, SleepReport, WorkerSpec
from pipeline.workers.orders import SLEEP, accept_sleep_orders
from storage import codec
from tests.support.waiting import TIMEOUT_S


class FakeWorker:
    """Owns what a runtime said, as its worker's log of events would."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.said: queue.Queue[SleepReport] = queue.Queue()

    def log_event(self, topic: str, message: str) -> None:
        assert topic == REPORTS
        self.said.put(codec.decode(SleepReport, message))

    def order(self, number: int) -> SleepReport:
        asyncio.run(self.handlers[SLEEP](number))
        return self.said.get(timeout=TIMEOUT_S)


class Restless:
    """Owns a count of rests; the first of them fail."""

    def __init__(self, failures: int) -> None:
        self.rests, self._failures = 0, failures

    def sleep(self) -> None:
        self.rests += 1
        if self.rests <= self._failures:
            raise RuntimeError("1 shards are in the engine: it rests after them")


@pytest.mark.parametrize("failures", [0, 1])
def test_an_order_that_is_sent_again_is_answered_as_before(failures: int) -> None:
    """A worker that could not leave its devices must not be taken for one that has."""
    worker, runtime = FakeWorker(), Restless(failures)
    accept_sleep_orders(
        cast(Worker, worker), WorkerSpec("generate", 0, 1, 2, "module:Runtime", "name: x"), runtime.sleep
    )
    first, again = worker.order(0), worker.order(0)
    assert runtime.rests == 1
    assert (first.gang, first.index, first.incarnation, first.number) == ("generate", 0, 2, 0)
    assert first.error == again.error
    assert (first.error is not None) == bool(failures)
    assert worker.order(1).error is None
    assert runtime.rests == 2

"""Workers that leave their devices to others (`placement.turns`): the driver's order, and what a worker does about it.

    nothing is left to do for now ──► rest ──► the engine gives up its cache, models move to the host ──► rested
    the next call ──► what it needs is taken back to the devices, without being told

The driver waits for `rested`: until then nobody else may have the devices. An order may be lost, and is sent again; one
that was carried out, or could not be, is answered again, and changes nothing, however late it comes.

May import distributed, pipeline.workers.{messages, reports, weight_transfer}.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from distributed import Client, Worker

from pipeline.workers.messages import RESTED, Rested, WorkerSpec
from pipeline.workers.reports import rested_to_json
from pipeline.workers.weight_transfer import notify

REST = "stageline_rest"
"""Name of the handler."""


@runtime_checkable
class Rests(Protocol):
    """A runtime that can leave its devices to others."""

    def rest(self) -> None:
        """Gives up what its engine and models have on the devices, until the next call; nothing if it rests already.
        Not while a call runs: raises RuntimeError."""
        ...


def open_for_rest(worker: Worker, spec: WorkerSpec, runtime: Rests) -> None:
    """From now on this process carries out what the driver orders, in a thread of its own."""
    acting = threading.Lock()
    last = -1
    error: str | None = None
    """The last order's number, and why it could not be carried out."""

    def act(number: int) -> None:
        nonlocal last, error
        with acting:
            started = time.monotonic()
            if number > last:
                error = None
                try:
                    runtime.rest()
                except (RuntimeError, OSError) as raised:
                    error = f"{type(raised).__name__}: {raised}"
                last = number
            seconds = time.monotonic() - started
            report = Rested(spec.gang, spec.index, spec.incarnation, number, seconds, error)
            worker.log_event(RESTED, rested_to_json(report))

    async def rest(number: int) -> None:
        threading.Thread(target=act, args=(number,), name="rest", daemon=True).start()

    worker.handlers[REST] = rest


def order_rest(client: Client, workers: Iterable[str], number: int) -> None:
    """Has workers, by address, leave their devices; returns at once. `number`: of the order, larger each time."""
    notify(client, workers, REST, number=number)

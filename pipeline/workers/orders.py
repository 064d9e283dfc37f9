"""Orders of the driver to workers: load new weights for rows in flight, send rows to be scored, and free the devices.

    a version is published ──► take ──► a replica with rows in flight loads it between two passes;
                                        a replica without rows loads it when a shard needs it

A lost or late `take` does no harm: the rows in flight continue within their staleness bound, and the next shard loads
the version that it needs.

    a gang is idle ──► sleep ──► the engine frees its cache, models move to the host ──► SleepReport
    the next call  ──► the worker moves back what it needs

Only one of the gangs that share devices (`placement.device_sharing`) holds them at a time. The next gang may use the
devices when each worker of the present holder has reported that it freed them, or is lost. The driver repeats an order,
since it may be lost. A worker does not carry out a repeated order again: it only repeats its report.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable

from distributed import Client, Worker

from pipeline.workers.messages import REPORTS, SleepReport, WorkerSpec
from pipeline.workers.weight_transfer import notify
from storage import codec
from storage.address import Address
from storage.errors import StoreError

TAKE = "stageline_take_weights"
"""Name of the Dask handler that receives orders to load a version of the weights."""


def accept_refit_orders(worker: Worker, take_weights: Callable[[int], None]) -> None:
    """Let the driver order this process to load a version of the weights. `take_weights` (`Runtime.load_in_flight`)
    runs in a new thread."""

    def take(version: int) -> None:
        try:
            take_weights(version)
        except (StoreError, OSError) as error:  # e.g. already released; a shard that needs this version raises again
            print(f"weights v{version} were not loaded under rows in flight: {error}", flush=True)

    async def start(version: int) -> None:
        threading.Thread(target=take, args=(version,), name="weights-taken", daemon=True).start()

    worker.handlers[TAKE] = start


def order_take(client: Client, workers: Iterable[str], version: int) -> None:
    """Order the replicas at these Dask addresses (`workers`) to load a version. Does not wait."""
    notify(client, workers, TAKE, version=version)


# ---- rows that are scored early (early_rows.py) ------------------------------------------------------------

SEND_ROWS = "stageline_send_rows"
"""Name of the Dask handler that receives orders to send rows to a scoring worker."""


def accept_row_orders(worker: Worker, send: Callable[[Address, str], None]) -> None:
    """Let the driver order this process to send the rows of a shard to the worker that will score them. `send` is
    called in the event loop's thread, with the shard's address and the Dask address of that worker."""

    async def start(shard: bytes, target: str) -> None:
        send(pickle.loads(shard), target)

    worker.handlers[SEND_ROWS] = start


def order_rows(client: Client, source: str, shard: Address, target: str) -> None:
    """Order the replica at `source` to send the rows of a shard to the worker at `target`. Does not wait."""
    notify(client, [source], SEND_ROWS, shard=pickle.dumps(shard), target=target)


# ---- sleep ------------------------------------------------------------------------------------------------

SLEEP = "stageline_sleep"
"""Name of the Dask handler that receives orders to free the devices."""


def accept_sleep_orders(worker: Worker, spec: WorkerSpec, sleep: Callable[[], None]) -> None:
    """Let the driver order this process to free its devices. `sleep` (`Runtime.sleep`) runs in a new thread."""
    acting = threading.Lock()
    last = -1
    """Number of the last order."""
    error: str | None = None
    """Error of the last order, if it failed."""

    def act(number: int) -> None:
        nonlocal last, error
        with acting:
            started = time.monotonic()
            if number > last:
                error = None
                try:
                    sleep()
                except (RuntimeError, OSError) as raised:
                    error = f"{type(raised).__name__}: {raised}"
                last = number
            seconds = time.monotonic() - started
            report = SleepReport(spec.gang, spec.index, spec.incarnation, number, seconds, error)
            worker.log_event(REPORTS, codec.encode(report))

    async def start(number: int) -> None:
        threading.Thread(target=act, args=(number,), name="sleep", daemon=True).start()

    worker.handlers[SLEEP] = start


def order_sleep(client: Client, workers: Iterable[str], number: int) -> None:
    """Order the workers at these Dask addresses to free their devices. Does not wait. `number`: number of the order. A
    new order has a larger number than all before. A repeated order has the same number again."""
    notify(client, workers, SLEEP, number=number)

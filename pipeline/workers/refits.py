"""Weights that an engine takes while its rows go on: the driver's order, and what a replica does about it.

    a version is published ──► take ──► a replica with rows in flight loads it between two passes
                                   └──► one without waits for a shard that names its version

An order may be lost, or come too late: the rows then go on as they are, within their bound, and the next shard brings
its version.

May import distributed, pipeline.workers.weight_transfer and storage.errors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from distributed import Client, Worker

from pipeline.workers.weight_transfer import notify
from storage.errors import StoreError

TAKE = "stageline_take_weights"
"""Name of the handler."""


@runtime_checkable
class TakesWeights(Protocol):
    """A runtime whose engine may change weights under its rows."""

    def take_weights(self, version: int) -> None:
        """Loads a version for the rows in flight, if there are any and the engine updates in flight. Raises StoreError
        and OSError where it cannot be had."""
        ...


def open_for_refits(worker: Worker, runtime: TakesWeights) -> None:
    """From now on this process takes what the driver orders, in a thread of its own."""

    async def take(version: int) -> None:
        threading.Thread(target=_take, args=(runtime, version), name="weights-taken", daemon=True).start()

    worker.handlers[TAKE] = take


def _take(runtime: TakesWeights, version: int) -> None:
    try:
        runtime.take_weights(version)
    except (StoreError, OSError) as error:  # released meanwhile, say; who needs this version will report it again
        print(f"weights v{version} were not taken under rows in flight: {error}", flush=True)


def order_take(client: Client, workers: Iterable[str], version: int) -> None:
    """Has replicas, by address, take a version; returns at once."""
    notify(client, workers, TAKE, version=version)

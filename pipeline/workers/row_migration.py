"""Send rows from one replica to another over a Dask connection between their processes. The rows do not pass through
the scheduler or the driver.

    driver          source (its shards wait)                   target
    ──────          ────────────────────────                   ──────
    order ────────► takes the rows out, connects ──rows──────► accepts them
          ◄─done──                               ◄─accepted───    (or: refused, with the reason)
                    returns each to its caller   ◄─finished───  each finished row; a heartbeat every second
                    rows whose caller has left   ──dropped────► drops them
                    connection lost or silent:                  connection lost: drops all
                    continues them itself

The source keeps everything that it needs to continue a row, since it commits the row's shard. When the connection ends,
each side acts alone, and what the target still computes is discarded. Arrays are sent as frames, without a copy.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distributed import Client, Status, Worker
from distributed.comm import Comm, connect
from distributed.protocol import to_serialize

from pipeline.workers.messages import REPORTS, MigrationDone, MigrationOrder, RowsReport, WorkerSpec
from storage import codec

if TYPE_CHECKING:  # they import torch, which the driver does not load
    from pipeline.workers.replica_rows import ReplicaRows
    from stages.engines.embedded.migration import AcceptedRows

MIGRATE, ACCEPT = "stageline_migrate_rows", "stageline_accept_rows"
"""Names of the Dask handlers."""
_BEAT_S = 1.0
"""Seconds between heartbeats."""


def order_migration(client: Client, source: str, order: MigrationOrder) -> None:
    """Send an order to the replica at `source`. Does not wait. If the order is lost, the rows stay where they are."""

    async def notify() -> None:
        with suppress(OSError):
            await getattr(client.rpc(source), MIGRATE)(order=pickle.dumps(order))

    client.loop.add_callback(notify)


def open_for_rows(worker: Worker, spec: WorkerSpec, rows: ReplicaRows) -> None:
    """Let this process obey migration orders, accept rows of other replicas, and report its own rows to the driver."""
    sending: set[asyncio.Task[None]] = set()

    def report(message: RowsReport | MigrationDone) -> None:
        worker.log_event(REPORTS, codec.encode(message))

    async def migrate(order: bytes) -> None:
        sent: MigrationOrder = pickle.loads(order)
        if (sent.gang, sent.index, sent.incarnation) == (spec.gang, spec.index, spec.incarnation):
            task = asyncio.create_task(_send(worker, rows, sent, report))
            sending.add(task)
            task.add_done_callback(sending.discard)

    async def accept(comm: Comm, migrated: list[Any]) -> Status:
        await _receive(comm, rows, migrated)
        return Status.dont_reply

    worker.handlers |= {MIGRATE: migrate, ACCEPT: accept}
    rows.watch(lambda load, waiting: report(RowsReport(spec.gang, spec.index, spec.incarnation, load, waiting)))


async def _send(
    worker: Worker, rows: ReplicaRows, order: MigrationOrder, report: Callable[[MigrationDone], None]
) -> None:
    """Run the source's side of a migration until no row is left in the target."""
    migrated = await asyncio.to_thread(rows.migrate_out, order.rows)
    left = {one.ticket for one in migrated}
    num_bytes = sum(one.cache.nbytes for one in migrated if one.cache is not None)
    comm: Comm | None = None

    def done(num_rows: int, seconds: float, refusal: str | None = None) -> None:
        numbers = (order.number, order.gang, order.index, order.incarnation)
        report(MigrationDone(*numbers, num_rows, num_bytes if num_rows else 0, seconds, rows.waiting, refusal))

    answered = False
    try:
        if left:
            comm = await connect(order.target, timeout=rows.timeout_s, **worker.connection_args)
            started = time.perf_counter()
            await asyncio.wait_for(comm.write({"op": ACCEPT, "migrated": to_serialize(migrated)}), rows.timeout_s)
            del migrated
            answer = await asyncio.wait_for(comm.read(), rows.timeout_s)
            refusal = answer.get("refused")
            if refusal is None:
                done(len(left), time.perf_counter() - started)
                answered = True
                await _collect(comm, rows, left)
            else:
                done(0, 0.0, refusal)
                answered = True
    except (OSError, TimeoutError):
        pass  # the target is lost or silent
    finally:
        if comm is not None:
            comm.abort()
        if left:
            await asyncio.to_thread(rows.give_back, left)
        if not answered:
            done(0, 0.0, "it did not answer" if left else None)


async def _collect(comm: Comm, rows: ReplicaRows, left: set[int]) -> None:
    """Return finished rows to their callers until none is left. Raises OSError or TimeoutError if the target is
    lost."""
    while left:
        message = await asyncio.wait_for(comm.read(), rows.timeout_s)
        for ticket, completion in message["finished"]:
            if completion is None:
                await asyncio.to_thread(rows.give_back, [ticket])
            else:
                rows.deliver(ticket, completion)
            left.discard(ticket)
        unwanted = left - rows.wanted(left)
        if unwanted:
            left -= unwanted
            await comm.write({"dropped": sorted(unwanted)})


async def _receive(comm: Comm, rows: ReplicaRows, migrated: list[Any]) -> None:
    """Run the target's side of a migration to its end."""
    finished: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[AcceptedRows] = loop.create_future()

    def refuse(error: Exception) -> None:
        if not accepted.done():
            accepted.set_exception(error)

    def host() -> None:
        """Run in a thread, since it waits for the engine."""
        try:
            with rows.migrate_in(migrated) as incoming:
                loop.call_soon_threadsafe(accepted.set_result, incoming)
                for item in incoming:
                    loop.call_soon_threadsafe(finished.put_nowait, item)
        except (ValueError, RuntimeError) as error:  # refused, or the engine stopped
            loop.call_soon_threadsafe(refuse, error)
        finally:
            loop.call_soon_threadsafe(finished.put_nowait, None)

    threading.Thread(target=host, name="incoming-rows", daemon=True).start()
    try:
        incoming = await accepted
    except (ValueError, RuntimeError) as error:
        await comm.write({"refused": str(error)})
        return
    listening = asyncio.create_task(_listen(comm, incoming))
    try:
        await comm.write({"accepted": len(migrated)})
        while not listening.done():
            item: Any = ()
            with suppress(TimeoutError):
                item = await asyncio.wait_for(finished.get(), _BEAT_S)
            if item is None:
                break
            await comm.write({"finished": to_serialize([item] if item else [])})
    finally:
        incoming.close()
        listening.cancel()
        comm.abort()


async def _listen(comm: Comm, incoming: AcceptedRows) -> None:
    """Drop the rows that the source names, until the source disconnects."""
    with suppress(OSError):
        while True:
            message = await comm.read()
            incoming.drop(message["dropped"])

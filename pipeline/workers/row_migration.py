"""Send rows from one replica to another over a Dask connection between their processes. The rows do not pass through
the scheduler or the driver.

    driver          source (its shards wait)                   target
    ──────          ────────────────────────                   ──────
    order ────────► for each row of the order, in turn:
                    connects; copies parts of the
                    row while the row decodes      ──parts───► keeps the parts
                    "is all there?"                ──────────► yes    (or: refused, with the reason)
                    takes the row out              ──rest────► accepts the row
          ◄─done──                               ◄─accepted──     (or: refused, with the reason)
                    gives the row to its caller  ◄─finished──  when the row is finished; a heartbeat every second
                    the caller has left          ──dropped───► drops the row
                    connection lost or silent:                 connection lost: drops the row
                    continues the row

If either side dies before the row is taken out, the effect on the row is the same as without a migration. After the row
is taken out, the source keeps everything that it needs to continue the row, since the source commits the row's shard.
When the connection ends, each side acts alone, and the target's further results are discarded. Arrays are sent as
frames, without a copy.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Client, Status, Worker
from distributed.comm import Comm, connect
from distributed.protocol import to_serialize

from pipeline.workers.messages import REPORTS, MigrationDone, MigrationOrder, RowsReport, WorkerSpec
from stages.engines.row_loads import COPY_POSITIONS, MigrationRequest
from storage import codec

if TYPE_CHECKING:  # these modules import torch, which the driver does not load
    from pipeline.workers.replica_rows import ArrivingRow, ReplicaRows
    from stages.engines.embedded.migration import AcceptedRows, CopiedPart

MIGRATE, ACCEPT = "stageline_migrate_rows", "stageline_accept_rows"
"""Names of two Dask handlers: one for migration orders, and one for rows that arrive."""
_BEAT_S = 1.0
"""Seconds without a finished row after which the target sends a heartbeat to the source."""


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

    def start(task: asyncio.Task[None]) -> None:
        sending.add(task)
        task.add_done_callback(sending.discard)

    async def migrate(order: bytes) -> None:
        sent: MigrationOrder = pickle.loads(order)
        if (sent.gang, sent.index, sent.incarnation) == (spec.gang, spec.index, spec.incarnation):
            start(asyncio.create_task(_Sender(worker, rows, start).carry_out(sent, report)))

    async def accept(comm: Comm, version: int) -> Status:
        await _receive(comm, rows, version)
        return Status.dont_reply

    worker.handlers |= {MIGRATE: migrate, ACCEPT: accept}
    rows.watch(lambda load, waiting: report(RowsReport(spec.gang, spec.index, spec.incarnation, load, waiting)))


# ---- the source ------------------------------------------------------------------------------------------


@dataclass
class _Sender:
    """Owns the source's side of a migration order, and counts the order's rows, bytes and seconds."""

    worker: Worker
    rows: ReplicaRows
    start: Callable[[asyncio.Task[None]], None]
    """Function that keeps a reference to a task until the task is done."""
    num_rows: int = 0
    num_bytes: int = 0
    held_s: float = 0.0
    standstill_s: float = 0.0

    async def carry_out(self, order: MigrationOrder, report: Callable[[MigrationDone], None]) -> None:
        """Send the rows of an order in turn, up to the first one that the target refuses. Then report."""
        refusal: str | None = None
        try:
            for request in order.rows:
                refusal = await self._send(order.target, request)
                if refusal is not None:
                    break
        except (OSError, TimeoutError):
            refusal = "it did not answer"
        except RuntimeError as error:
            refusal = str(error)  # the engine here has stopped
        numbers = (order.number, order.gang, order.index, order.incarnation)
        counts = (self.num_rows, self.num_bytes, self.held_s, self.standstill_s)
        report(MigrationDone(*numbers, *counts, self.rows.waiting, refusal))

    async def _send(self, target: str, request: MigrationRequest) -> str | None:
        """Send a row, unless the row has ended here. Return the reason if the target refuses the row, else None. Raises
        OSError or TimeoutError if the target is lost. A row that the target did not accept continues here."""
        timeout_s = self.rows.timeout_s
        comm: Comm = await connect(target, timeout=timeout_s, **self.worker.connection_args)
        ticket: int | None = None
        accepted = False
        try:
            await comm.write({"op": ACCEPT, "version": self.rows.version})
            part = await self._copy(comm, request) if request.with_cache else None
            if request.with_cache and part is None:
                return None
            answer = await _request(comm, {"complete": True}, timeout_s)
            if "refused" in answer:
                return str(answer["refused"])
            began = time.perf_counter()
            migrated = await asyncio.to_thread(
                self.rows.migrate_out, [request], {} if part is None else {part.key: part}
            )
            if not migrated:
                return None
            ticket = migrated[0].ticket
            held_s = float(answer["held_s"])
            answer = await _request(comm, {"migrated": to_serialize(migrated)}, timeout_s)
            if "refused" in answer:
                return str(answer["refused"])
            accepted = True
            self.num_rows, self.held_s = self.num_rows + 1, self.held_s + held_s
            self.standstill_s += time.perf_counter() - began
            self.start(asyncio.create_task(_collect(comm, self.rows, ticket)))
            return None
        finally:
            if not accepted:
                comm.abort()
                if ticket is not None:
                    await asyncio.to_thread(self.rows.give_back, [ticket])

    async def _copy(self, comm: Comm, request: MigrationRequest) -> CopiedPart | None:
        """Send a row's keys and values, up to its last full block, while it goes on decoding. Return the last copy, or
        None if the row can no longer be copied, for example because it has ended."""
        part = await asyncio.to_thread(self.rows.copy_out, request.key, 0)
        while part is not None:
            self.held_s += part.held_s
            if part.cache is not None:
                self.num_bytes += part.cache.nbytes
                await asyncio.wait_for(comm.write({"part": to_serialize(part)}), self.rows.timeout_s)
            if part.stop - part.start < COPY_POSITIONS:
                break
            part = await asyncio.to_thread(self.rows.copy_out, request.key, part.stop)
        return part


async def _request(comm: Comm, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a message and return the answer. Raises OSError or TimeoutError if the other side is lost."""
    await asyncio.wait_for(comm.write(message), timeout_s)
    answer: dict[str, Any] = await asyncio.wait_for(comm.read(), timeout_s)
    return answer


async def _collect(comm: Comm, rows: ReplicaRows, ticket: int) -> None:
    """Wait until the target has finished an accepted row, and give the row to its caller here. If the target is lost
    or cannot finish the row, continue the row here. If the caller has left, tell the target to drop the row."""
    delivered = False
    try:
        while not delivered:
            message = await asyncio.wait_for(comm.read(), rows.timeout_s)
            for _, completion in message["finished"]:
                if completion is None:
                    return
                rows.deliver(ticket, completion)
                delivered = True
            if not delivered and not rows.tickets_awaited({ticket}):
                await comm.write({"dropped": [ticket]})
                return
    except (OSError, TimeoutError):
        pass  # the target is lost or silent
    finally:
        comm.abort()
        if not delivered:
            await asyncio.to_thread(rows.give_back, [ticket])


# ---- the target ------------------------------------------------------------------------------------------


async def _receive(comm: Comm, rows: ReplicaRows, version: int) -> None:
    """Run the target's side of a row's migration to its end."""
    arrival = ExitStack()
    try:
        incoming = await _arrived(comm, rows, version, arrival)
        if incoming is not None:
            await _host(comm, incoming)
    except (OSError, TimeoutError):
        pass  # the source is lost or silent
    finally:
        comm.abort()
        await asyncio.to_thread(arrival.close)


async def _arrived(comm: Comm, rows: ReplicaRows, version: int, arrival: ExitStack) -> AcceptedRows | None:
    """Receive the copied parts of a row's keys and values, then the message that hands the row over, and return the
    accepted row. Return None if this replica refuses it. Raises OSError or TimeoutError if the source is lost or ends
    the migration."""
    refusal: str | None = None
    held_s = 0.0
    arriving: ArrivingRow | None = None
    try:
        arriving = await asyncio.to_thread(arrival.enter_context, rows.arriving(version))
    except (ValueError, RuntimeError) as error:
        refusal = str(error)
    while True:
        message = await asyncio.wait_for(comm.read(), rows.timeout_s)
        incoming: AcceptedRows | None = None
        try:
            if arriving is not None and refusal is None:
                if "part" in message:
                    held_s += await asyncio.to_thread(arriving.write_in, message["part"])
                elif "migrated" in message:
                    incoming = await asyncio.to_thread(arriving.migrate_in, message["migrated"])
        except (ValueError, RuntimeError) as error:  # refused, or the engine stopped
            refusal = str(error)
        if "part" in message:
            continue  # a refusal is sent when the source asks
        if refusal is not None:
            await comm.write({"refused": refusal})
            return None
        await comm.write({"held_s": held_s})
        if incoming is not None:
            return incoming


async def _host(comm: Comm, incoming: AcceptedRows) -> None:
    """Send the completion of an accepted row to the replica that the row came from, and heartbeats until the row is
    finished. Raises OSError if that replica is lost."""
    finished: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        """Queue each completion. This runs in a thread, since it waits for the engine."""
        try:
            for item in incoming:
                loop.call_soon_threadsafe(finished.put_nowait, item)
        except RuntimeError:
            pass  # the engine has stopped
        finally:
            loop.call_soon_threadsafe(finished.put_nowait, None)

    threading.Thread(target=wait, name="incoming-rows", daemon=True).start()
    listening = asyncio.create_task(_listen(comm, incoming))
    try:
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


async def _listen(comm: Comm, incoming: AcceptedRows) -> None:
    """Drop the rows that the source names, until the source disconnects."""
    with suppress(OSError):
        while True:
            message = await comm.read()
            incoming.drop(message["dropped"])

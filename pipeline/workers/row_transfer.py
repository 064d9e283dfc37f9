"""Carries rows from one worker process to another, over a connection of Dask's between the two; nothing of them passes
through the scheduler or the driver.

    driver          source (its shards wait)                   target
    ──────          ────────────────────────                   ──────
    order ────────► takes the rows out, connects ──rows──────► accepts them
          ◄─over──                               ◄─accepted───    (or: refused, with the reason)
                    hands each to its caller     ◄─finished───  as each is finished; a sign of life every second
                    whose caller went away       ──dropped────► forgets those
                    connection lost, or silence: it goes on     connection lost: forgets them all
                    with them itself

So a row is always in the hands of the process that commits its shard, which keeps all that it needs to go on with it.
The connection is the lease: when it ends, for whatever reason, both sides act alone, and whatever the target still
computes goes nowhere. Arrays travel as frames, without a copy in between.

May import distributed, pipeline.workers.{messages, reports} and migration's load records; rows themselves are handed
through unseen.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, runtime_checkable

from distributed import Client, Status, Worker
from distributed.comm import Comm, connect
from distributed.protocol import to_serialize

from pipeline.workers.messages import TAILS, MoveOrder, MoveOver, RowsNews, WorkerSpec
from pipeline.workers.reports import rows_to_json
from stages.engines.row_loads import EngineLoad, MigrationRequest
from storage.address import Address

MIGRATE, ACCEPT = "stageline_migrate_rows", "stageline_accept_rows"
"""Names of the handlers."""
_BEAT_S = 1.0
"""Between signs of life."""


class OpaqueIncomingRows(Protocol):
    """See `IncomingRows` of the engine."""

    def __iter__(self) -> Iterator[tuple[int, Any]]: ...

    def drop(self, tickets: Iterable[int]) -> None: ...

    def close(self) -> None: ...


class Rows(Protocol):
    """See `replica_rows.ReplicaRows`; here rows are opaque, since the scheduler's process has no torch."""

    silence_s: float

    @property
    def away(self) -> tuple[Address, ...]: ...

    def watch(self, report: Callable[[EngineLoad, tuple[Address, ...]], None]) -> None: ...

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[Any]: ...

    def migrate_in(self, migrated: Sequence[Any]) -> AbstractContextManager[OpaqueIncomingRows]: ...

    def deliver(self, ticket: int, completion: Any) -> None: ...

    def give_back(self, tickets: Collection[int]) -> None: ...

    def wanted(self, tickets: Collection[int]) -> set[int]: ...


@runtime_checkable
class HasRows(Protocol):
    """A runtime whose rows may migrate; None: they do not."""

    @property
    def rows(self) -> Rows | None: ...


def order_move(client: Client, source: str, order: MoveOrder) -> None:
    """Notifies the replica at `source`; returns at once. An order that does not arrive is no loss: the rows stay."""

    async def notify() -> None:
        with suppress(OSError):
            await getattr(client.rpc(source), MIGRATE)(order=pickle.dumps(order))

    client.loop.add_callback(notify)


def open_for_rows(worker: Worker, spec: WorkerSpec, rows: Rows) -> None:
    """From now on this process carries out orders, accepts rows of others, and reports its own to the driver."""
    under_way: set[asyncio.Task[None]] = set()

    def report(news: RowsNews | MoveOver) -> None:
        worker.log_event(TAILS, rows_to_json(news))

    async def migrate(order: bytes) -> None:
        sent: MoveOrder = pickle.loads(order)
        if (sent.gang, sent.index, sent.incarnation) == (spec.gang, spec.index, spec.incarnation):
            task = asyncio.create_task(_send(worker, rows, sent, report))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    async def accept(comm: Comm, migrated: list[Any]) -> Status:
        await _receive(comm, rows, migrated)
        return Status.dont_reply

    worker.handlers |= {MIGRATE: migrate, ACCEPT: accept}
    rows.watch(lambda here, away: report(RowsNews(spec.gang, spec.index, spec.incarnation, here, away)))


async def _send(worker: Worker, rows: Rows, order: MoveOrder, report: Callable[[MoveOver], None]) -> None:
    """The source's side of a migration, to its end."""
    migrated = await asyncio.to_thread(rows.migrate_out, order.rows)
    left = {one.ticket for one in migrated}
    num_bytes = sum(one.cache.nbytes for one in migrated if one.cache is not None)
    comm: Comm | None = None

    def over(num_rows: int, seconds: float, refusal: str | None = None) -> None:
        numbers = (order.number, order.gang, order.index, order.incarnation)
        report(MoveOver(*numbers, num_rows, num_bytes if num_rows else 0, seconds, rows.away, refusal))

    answered = False
    try:
        if left:
            comm = await connect(order.target, timeout=rows.silence_s, **worker.connection_args)
            started = time.perf_counter()
            await asyncio.wait_for(comm.write({"op": ACCEPT, "migrated": to_serialize(migrated)}), rows.silence_s)
            del migrated
            answer = await asyncio.wait_for(comm.read(), rows.silence_s)
            refusal = answer.get("refused")
            if refusal is None:
                over(len(left), time.perf_counter() - started)
                answered = True
                await _collect(comm, rows, left)
            else:
                over(0, 0.0, refusal)
                answered = True
    except (OSError, TimeoutError):
        pass  # the target is gone, or does not answer
    finally:
        if comm is not None:
            comm.abort()
        if left:
            await asyncio.to_thread(rows.give_back, left)
        if not answered:
            over(0, 0.0, "it did not answer" if left else None)


async def _collect(comm: Comm, rows: Rows, left: set[int]) -> None:
    """Hands over what the target finishes, until nothing is left. Raises OSError or TimeoutError when it is lost."""
    while left:
        message = await asyncio.wait_for(comm.read(), rows.silence_s)
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


async def _receive(comm: Comm, rows: Rows, migrated: list[Any]) -> None:
    """The target's side of a migration, to its end."""
    finished: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[OpaqueIncomingRows] = loop.create_future()

    def refuse(error: Exception) -> None:
        if not accepted.done():
            accepted.set_exception(error)

    def host() -> None:
        """A thread of its own: it waits for the engine as long as that takes."""
        try:
            with rows.migrate_in(migrated) as incoming:
                loop.call_soon_threadsafe(accepted.set_result, incoming)
                for item in incoming:
                    loop.call_soon_threadsafe(finished.put_nowait, item)
        except (ValueError, RuntimeError) as error:  # refused; or the engine stopped
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


async def _listen(comm: Comm, incoming: OpaqueIncomingRows) -> None:
    """Hears which rows nobody waits for any more, until the source hangs up."""
    with suppress(OSError):
        while True:
            message = await comm.read()
            incoming.drop(message["dropped"])

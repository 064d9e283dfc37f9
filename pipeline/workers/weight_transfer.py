"""Copy published weights to hosts that lack them, over Dask connections between workers. Each host has its own board,
and a version is copied to each host once.

    reader (its board lacks v)              publisher                          earlier asker (its host has, or gets, v)
    ──────────────────────────              ─────────                          ─────────────
    has the host's lock for v
    ask ──────────────────────────────────► manifest, and whom to ask
                                            └ the first two askers: the publisher
        ◄──manifest, "ask that one"──────── └ asker k: asker (k - 2) / 2
    ask ─────────────────────────────────────────────────────────────────────► as soon as it has them:
        two pieces asked for ahead; checked  ◄─────────pieces────────────────  the bytes of its own file
        and appended in a thread
    link the manifest: v exists here

So the publisher sends two copies, whatever the number of hosts. Every other host passes on the bytes that it has while
more arrive. A sender sends only pieces that were asked for, and no other flow control is needed. A sender may die at
any time: the reader then asks the publisher again, by its name, because a restarted publisher has another address and
the same board. The reader continues where it stopped. Only the publisher's memory has the tree of askers, and losing it
is harmless.

The driver notifies readers when a version is published, so that it has often arrived before it is needed, and when
nobody reads a version any more. Both messages may be lost: a version is fetched when it is needed, and a copy that
stays is removed with the board's directory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from distributed import Client, Status, Worker
from distributed.comm import Comm, connect
from distributed.protocol import to_serialize

from pipeline.workers.messages import MirrorSpec
from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.weight_copies import IncomingVersion, OutgoingVersion, receiving
from storage.weights import Manifest, WeightBoard

SEND, FETCH, RELEASE, REMOVE = (f"stageline_{what}_weights" for what in ("send", "fetch", "release", "remove"))
"""Names of the handlers."""
FAN_OUT = 2
"""Most hosts that one host sends a version to."""
PIECE_BYTES = 16 << 20
"""Bytes of a piece: a multiple of every system's page size."""
_PIECES_AHEAD = 2
"""Most pieces that were asked for and have not arrived: one travels while the sender prepares the next."""
_LOOK_S = 0.005
"""Seconds between two looks at a growing file."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Seconds between two tries."""
_CONNECT_S = 5.0
_VERSIONS_REMEMBERED = 8
_REMOVAL_S = 5.0


@dataclass(frozen=True)
class Fetched:
    """Time and size of the weights that were copied from other hosts."""

    seconds: float = 0.0
    num_bytes: int = 0


class Fetcher(Protocol):
    """The part of a mirror that a runtime uses."""

    def fetch(self, version: int) -> None: ...

    def fetched(self) -> Fetched: ...


class _SourceLost(Exception):
    """The process that was asked has died, hangs, or is not ready."""

    def __init__(self, message: str, redirected: bool) -> None:
        super().__init__(message)
        self.redirected = redirected
        """True if the source was an earlier asker. The publisher itself may still be alive."""


@contextmanager
def _lost_if_it_fails(whom: str, redirected: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError) as error:
        raise _SourceLost(f"{whom}: {type(error).__name__}: {error}", redirected) from error


@dataclass(frozen=True)
class _Source:
    """An open connection to the process that sends a version."""

    comm: Comm
    address: str
    manifest: Manifest
    other: str | None
    """Address of the process to ask instead, or None."""
    redirected: bool


class WeightMirror:
    """Sends and receives versions for the board of a worker's host, from `open` on until the process ends."""

    def __init__(self, worker: Worker, spec: MirrorSpec) -> None:
        self._worker = worker
        self._spec = spec
        self._board = WeightBoard(spec.board)
        self._askers: dict[int, list[str]] = {}
        """Addresses by version, in the order in which they asked this process."""
        self._arriving: set[int] = set()
        """Versions that this process is receiving."""
        self._unread: set[int] = set()
        """Versions that nobody reads any more."""
        self._fetched = Fetched()
        self._counting = threading.Lock()

    def open(self) -> None:
        """Begin to answer askers and to obey the driver's orders."""
        self._worker.handlers |= {SEND: self._send, FETCH: self._ahead, RELEASE: self._release, REMOVE: self._remove}

    # ---- for the runtime -------------------------------------------------------------------------------------

    def fetch(self, version: int) -> None:
        """Wait until the board has the version. Do not call this in the worker's own thread.

        Raises:
            MissingOutput: the publisher does not have it, or nobody reads it any more.
            StoreError: it did not arrive in time; the message says why.
            OSError: there is no space for it here.
        """
        self._fetch(version, wait=True)

    def fetched(self) -> Fetched:
        """Return the time and size of the copies that this process received since the last call."""
        with self._counting:
            fetched, self._fetched = self._fetched, Fetched()
        return fetched

    # ---- orders --------------------------------------------------------------------------------------------------

    async def _ahead(self, version: int) -> None:
        """Fetch a version before anybody needs it. An error is only printed: it occurs again, and is reported, when the
        version is needed."""

        def work() -> None:
            try:
                self._fetch(version, wait=False)
            except (StoreError, OSError) as error:
                print(f"weights v{version} were not fetched ahead: {error}", flush=True)

        threading.Thread(target=work, name="weights-ahead", daemon=True).start()

    async def _release(self, versions: list[int]) -> None:
        self._unread.update(versions)
        for version in self._unread.intersection(self._board.available()):
            await asyncio.to_thread(self._board.release, version)

    async def _remove(self) -> None:
        await asyncio.to_thread(self._board.close)

    # ---- sending -------------------------------------------------------------------------------------------------

    async def _send(self, comm: Comm, version: int, asker: str | None, digest: str | None) -> Status:
        """Answer with a version's manifest and its source. If this process is the source, send the pieces that are
        asked for until the other side closes. `asker`: it may be redirected to another source; None: it was redirected
        already. `digest`: the digest that the version must have."""
        try:
            with await self._find(version, digest) as outgoing:
                source = self._other_source(version, asker) if asker is not None else None
                await comm.write({"manifest": outgoing.manifest.to_json(), "source": source})
                while source is None:
                    request = await comm.read()
                    offset, num_bytes = request["offset"], request["num_bytes"]
                    while outgoing.num_ready() < offset + num_bytes:
                        await asyncio.sleep(_LOOK_S)
                    await comm.write({"piece": to_serialize(outgoing.read(offset, num_bytes))})
        except MissingOutput as error:
            with suppress(OSError):
                await comm.write({"missing": str(error)})
        except OSError:
            comm.abort()
        return Status.dont_reply

    async def _find(self, version: int, digest: str | None) -> OutgoingVersion:
        """Return a version to send. Raises MissingOutput if it is neither here nor arriving."""
        while True:
            arriving = version in self._arriving
            try:
                return OutgoingVersion(self._board, version, digest)
            except MissingOutput:
                if not arriving:
                    raise
            await asyncio.sleep(_LOOK_S)

    def _other_source(self, version: int, asker: str) -> str | None:
        """Return the earlier asker that should serve this one, or None for the first `FAN_OUT` askers."""
        if version not in self._askers and len(self._askers) == _VERSIONS_REMEMBERED:
            del self._askers[next(iter(self._askers))]
        askers = self._askers.setdefault(version, [])
        if asker not in askers:
            askers.append(asker)
        number = askers.index(asker)
        return askers[(number - FAN_OUT) // FAN_OUT] if number >= FAN_OUT else None

    # ---- receiving -----------------------------------------------------------------------------------------------

    def _fetch(self, version: int, *, wait: bool) -> None:
        while not self._board.has(version):
            wait_s = 2 * self._spec.timeout_s if wait else 0.0  # the receiving process gives up earlier
            with receiving(self._board, version, wait_s=wait_s) as ours:
                if not ours:
                    return
                if not self._board.has(version):
                    asyncio.run_coroutine_threadsafe(self._copy(version), self._worker.loop.asyncio_loop).result()
                    return

    async def _copy(self, version: int) -> None:
        """Ask until the version has arrived. Keep the pieces that came from a lost source."""
        started = time.perf_counter()
        give_up, furthest, pause_s = time.monotonic() + self._spec.timeout_s, 0, _SHORTEST_PAUSE_S
        incoming: IncomingVersion | None = None
        may_redirect = True
        self._arriving.add(version)
        try:
            while incoming is None or not incoming.complete:
                try:
                    async with self._source(version, may_redirect) as source:
                        if incoming is None or incoming.manifest.digest != source.manifest.digest:
                            if incoming is not None:
                                incoming.close()
                            incoming = IncomingVersion(self._board, source.manifest)
                        await self._receive(source, incoming)
                        continue
                except _SourceLost as error:
                    may_redirect, reason = may_redirect and not error.redirected, str(error)
                except DamagedWeights as error:  # damaged by the source or on the way: trust no piece
                    assert incoming is not None
                    incoming.close()
                    incoming, may_redirect, reason = None, False, str(error)
                if incoming is not None and incoming.num_bytes > furthest:
                    furthest, pause_s = incoming.num_bytes, _SHORTEST_PAUSE_S
                    give_up = time.monotonic() + self._spec.timeout_s
                if time.monotonic() > give_up:
                    raise StoreError(
                        f"weights v{version} did not arrive from {self._spec.publisher}: nothing for "
                        f"{self._spec.timeout_s:g} s (cluster.start_timeout_s, or a third of cluster.deadline_s, if "
                        f"that is less); last: {reason}"
                    )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            manifest = incoming.finish()
        finally:
            self._arriving.discard(version)
            if incoming is not None:
                incoming.close()
        with self._counting:
            seconds = self._fetched.seconds + time.perf_counter() - started
            self._fetched = Fetched(seconds, self._fetched.num_bytes + manifest.num_bytes)
        if version in self._unread:
            await asyncio.to_thread(self._board.release, version)

    @asynccontextmanager
    async def _source(self, version: int, may_redirect: bool) -> AsyncIterator[_Source]:
        """Yield the process that sends a version: the publisher, or the process that it names. Raises MissingOutput if
        the publisher does not have the version."""
        with _lost_if_it_fails(self._spec.publisher, False):
            identity = self._worker.scheduler.identity()
            workers = (await asyncio.wait_for(identity, self._spec.message_timeout_s))["workers"]
        address = next((a for a, worker in workers.items() if worker["name"] == self._spec.publisher), None)
        if address is None:
            raise _SourceLost(f"{self._spec.publisher} is not connected", False)
        question = {"version": version, "asker": self._worker.address if may_redirect else None, "digest": None}
        async with self._connected(address, question, redirected=False) as source:
            if source.other is None:
                yield source
                return
        question |= {"asker": None, "digest": source.manifest.digest}
        async with self._connected(source.other, question, redirected=True) as source:
            yield source

    @asynccontextmanager
    async def _connected(self, address: str, question: dict[str, Any], *, redirected: bool) -> AsyncIterator[_Source]:
        message_timeout_s = self._spec.message_timeout_s
        with _lost_if_it_fails(address, redirected):
            comm = await connect(address, timeout=min(_CONNECT_S, message_timeout_s), **self._worker.connection_args)
        try:
            with _lost_if_it_fails(address, redirected):
                await comm.write({"op": SEND, **question})
                answer = await asyncio.wait_for(comm.read(), message_timeout_s)
            if answer is None:  # the process has just started
                raise _SourceLost(f"{address} does not send weights yet", redirected)
            if "missing" in answer:
                raise _SourceLost(answer["missing"], True) if redirected else MissingOutput(answer["missing"])
            yield _Source(comm, address, Manifest.from_json(answer["manifest"]), answer["source"], redirected)
        finally:
            comm.abort()

    async def _receive(self, source: _Source, incoming: IncomingVersion) -> None:
        """Receive the missing pieces. Each piece is checked and written while the next one arrives."""
        total = incoming.manifest.file_bytes
        asked = arrived = incoming.num_bytes
        appending: asyncio.Task[None] | None = None
        try:
            while arrived < total:
                with _lost_if_it_fails(source.address, source.redirected):
                    while asked < min(total, arrived + _PIECES_AHEAD * PIECE_BYTES):
                        num_bytes = min(PIECE_BYTES, total - asked)
                        await source.comm.write({"offset": asked, "num_bytes": num_bytes})
                        asked += num_bytes
                    answer = await asyncio.wait_for(source.comm.read(), self._spec.message_timeout_s)
                if "missing" in answer:
                    raise _SourceLost(answer["missing"], source.redirected)
                if incoming.manifest.version in self._unread:
                    raise MissingOutput(f"weights v{incoming.manifest.version} are not read any more")
                arrived += answer["piece"].nbytes
                if appending is not None:
                    await appending
                appending = asyncio.create_task(asyncio.to_thread(incoming.append, answer["piece"]))
        finally:
            if appending is not None:
                await appending


# ---- the driver's side ---------------------------------------------------------------------------------------------


def order_fetch(client: Client, workers: Iterable[str], version: int) -> None:
    """Order readers, by address, to copy a version to their hosts. Does not wait."""
    notify(client, workers, FETCH, version=version)


def order_release(client: Client, workers: Iterable[str], versions: Iterable[int]) -> None:
    """Tell readers, by address, that nobody reads these versions any more. Does not wait."""
    notify(client, workers, RELEASE, versions=sorted(versions))


def remove_boards(client: Client, workers: Iterable[str]) -> None:
    """Make the hosts of these workers remove their boards. Waits a few seconds for workers that do not answer."""

    async def remove() -> None:
        orders = [asyncio.create_task(getattr(client.rpc(worker), REMOVE)()) for worker in workers]
        if orders:
            _, unanswered = await asyncio.wait(orders, timeout=_REMOVAL_S)
            for order in unanswered:
                order.cancel()
            await asyncio.gather(*orders, return_exceptions=True)

    client.sync(remove)


def notify(client: Client, workers: Iterable[str], order: str, **what: Any) -> None:
    """Send an order to workers, by address. Does not wait; the order may be lost."""

    async def send(worker: str) -> None:
        with suppress(OSError):
            await getattr(client.rpc(worker), order)(**what)

    for worker in workers:
        client.loop.add_callback(send, worker)

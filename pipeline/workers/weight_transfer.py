"""Copy published weights to hosts that lack them. Each host has its own board of published weights
(storage/weights.py), and a version is copied to each host once.

The publisher's host sends a version to two hosts only, whatever the number of hosts. Each further host gets it from a
host that asked earlier. The publisher numbers the readers that ask for a version from 0, in the order of asking.
Readers 0 and 1 get it from the publisher, and reader k gets it from reader (k - 2) // 2. So the hosts form a binary
tree.

    reader k                                publisher                          reader (k - 2) // 2
    ────────                                ─────────                          ───────────────────
    takes its host's lock for version v
    asks for v ───────────────────────────►
        ◄──────── manifest, whom to ask ─── notes k as the next reader
    asks for v ──────────────────────────────────────────────────────────────►
        ◄───────────────────────────────────────────── address of its sender ─
    connects to the sender ══════════════════════════════════════════════════►
        ◄════════════════════════════════════════ pieces, as they get there ══
    checks and appends the pieces, then links the manifest: v exists here

Questions go over Dask's connections. The pieces come over separate connections, from a process that only sends
(`weight_sender.py`). A host passes on the bytes that it has while more arrive.

A sender may die at any time. The reader then asks the publisher again and continues where it stopped. It finds the
publisher by its name, because a restarted publisher has another address and the same board. Only the publisher's memory
has the numbers of the readers, and losing them is harmless.

The driver notifies readers when a version is published, so that the version has often arrived before it is needed. The
driver also notifies readers when nobody reads a version any more. Both messages may be lost. Then the version is
fetched when it is needed, and the copy is removed together with the board's directory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from distributed import Client, Worker
from distributed.comm import get_address_host

from pipeline.workers.messages import MirrorSpec
from pipeline.workers.weight_sender import WeightSender, received
from storage.errors import DamagedWeights, MissingOutput, StoreError
from storage.weight_copies import IncomingVersion, OutgoingVersion, receiving
from storage.weights import Manifest, WeightBoard

ASK, FETCH, RELEASE, REMOVE = (f"stageline_{what}_weights" for what in ("ask", "fetch", "release", "remove"))
"""Names of the Dask handlers to which the orders and questions of this module go."""
FAN_OUT = 2
"""Maximum number of hosts that one host sends a version to."""
_LOOK_S = 0.005
"""Seconds between two checks for a version that is about to arrive."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Shortest and longest pause between two tries, in seconds. The pause doubles after each try without new bytes."""
_VERSIONS_REMEMBERED = 8
_REMOVAL_S = 5.0


@dataclass(frozen=True)
class TransferStats:
    """Time and size of the weights that were copied from other hosts."""

    seconds: float = 0.0
    num_bytes: int = 0


class Fetcher(Protocol):
    """The methods of a `WeightMirror` that a runtime uses."""

    def fetch(self, version: int) -> None: ...

    def take_stats(self) -> TransferStats: ...


class _SourceLost(Exception):
    """A version cannot be received from the process that was asked for it. There are two cases:

    - The process has died, hangs, or is not ready.
    - The publisher named another worker to ask, and that worker does not have the version.
    """

    def __init__(self, message: str, redirected: bool) -> None:
        super().__init__(message)
        self.redirected = redirected
        """True if the source was an earlier asker. The publisher itself may still be alive."""


@contextmanager
def _raise_as_lost(whom: str, redirected: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError) as error:
        raise _SourceLost(f"{whom}: {type(error).__name__}: {error}", redirected) from error


@dataclass(frozen=True)
class _Source:
    """The process that sends a version."""

    sender: tuple[str, int]
    """Host and port of the process."""
    worker: str
    """Dask address of the worker that the process belongs to."""
    manifest: Manifest
    redirected: bool


class WeightMirror:
    """Owns the sending and receiving of versions for the board of a worker's host. Call `open` to begin."""

    def __init__(self, worker: Worker, spec: MirrorSpec) -> None:
        self._worker = worker
        self._spec = spec
        self._board = WeightBoard(spec.board)
        certificate = worker.security.get_tls_config_for_role("worker")
        self._sender = WeightSender(spec.board, get_address_host(worker.address), certificate)
        self._askers: dict[int, list[str]] = {}
        """Version -> addresses of the workers that asked this process for it, in the order of asking."""
        self._arriving: set[int] = set()
        """Versions that this process is receiving."""
        self._unread: set[int] = set()
        """Versions that nobody reads any more."""
        self._fetched = TransferStats()
        self._counting = threading.Lock()

    def open(self) -> None:
        """Register the Dask handlers of this mirror. From now on it answers workers that ask for a version. It also
        obeys the driver's orders to fetch or release versions, and to remove the board."""
        self._worker.handlers |= {
            ASK: self._answer,
            FETCH: self._fetch_ahead,
            RELEASE: self._release,
            REMOVE: self._remove,
        }

    def close(self) -> None:
        """Stop sending. The worker's process may get another mirror afterwards."""
        self._sender.close()

    # ---- for the runtime -------------------------------------------------------------------------------------

    def fetch(self, version: int) -> None:
        """Copy a version from another host, unless this host has it already. Wait until it has arrived. Do not call
        this in the thread of the worker's event loop.

        Raises:
            MissingOutput: the publisher does not have the version, or nobody reads the version any more.
            StoreError: the version did not arrive in time; the message says why.
            OSError: there is no space for the version on this host.
        """
        self._fetch(version, wait=True)

    def take_stats(self) -> TransferStats:
        """Return the time and size of the copies that this process received since the last call."""
        with self._counting:
            fetched, self._fetched = self._fetched, TransferStats()
        return fetched

    # ---- orders --------------------------------------------------------------------------------------------------

    async def _fetch_ahead(self, version: int) -> None:
        """Fetch a version before anybody needs it. An error is only printed. If the error lasts, it is reported when
        the version is needed."""

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

    async def _answer(self, version: int, asker: str | None, digest: str | None) -> dict[str, Any]:
        """Return a version's manifest with the address of this host's sender, or of another worker to ask; or the
        reason why it is `missing`. `asker`: worker that may be redirected. `digest`: required digest, if any."""
        try:
            manifest = await self._manifest_to_send(version, digest)
        except MissingOutput as error:
            return {"missing": str(error)}
        other = self._earlier_asker(version, asker) if asker is not None else None
        sender = await asyncio.to_thread(self._sender.address) if other is None else None
        return {"manifest": manifest.to_json(), "other": other, "sender": sender}

    async def _manifest_to_send(self, version: int, digest: str | None) -> Manifest:
        """Return the manifest of a version to send. Raises MissingOutput if the version is neither here nor
        arriving."""
        while True:
            arriving = version in self._arriving
            try:
                with OutgoingVersion(self._board, version, digest) as outgoing:
                    return outgoing.manifest
            except MissingOutput:
                if not arriving:
                    raise
            await asyncio.sleep(_LOOK_S)

    def _earlier_asker(self, version: int, asker: str) -> str | None:
        """Return the worker, among earlier askers, that should send the version to `asker`. None for the first
        `FAN_OUT`, to which this host sends: so no host sends a version to more than `FAN_OUT` others."""
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
                    self._copy(version)
                    return

    def _copy(self, version: int) -> None:
        """Ask for a version until it has arrived. If a source is lost, the pieces that it sent are kept. If a piece is
        damaged, all pieces are dropped. Raises StoreError if no new piece arrives for `MirrorSpec.timeout_s`."""
        started = time.perf_counter()
        give_up, furthest, pause_s = time.monotonic() + self._spec.timeout_s, 0, _SHORTEST_PAUSE_S
        incoming: IncomingVersion | None = None
        may_redirect = True
        self._arriving.add(version)
        try:
            while incoming is None or not incoming.complete:
                try:
                    finding = self._source(version, may_redirect)
                    source = asyncio.run_coroutine_threadsafe(finding, self._worker.loop.asyncio_loop).result()
                    if incoming is None or incoming.manifest.digest != source.manifest.digest:
                        if incoming is not None:
                            incoming.close()
                        incoming = IncomingVersion(self._board, source.manifest)
                    self._receive(source, incoming)
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
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            manifest = incoming.finish()
        finally:
            self._arriving.discard(version)
            if incoming is not None:
                incoming.close()
        with self._counting:
            seconds = self._fetched.seconds + time.perf_counter() - started
            self._fetched = TransferStats(seconds, self._fetched.num_bytes + manifest.num_bytes)
        if version in self._unread:
            self._board.release(version)

    async def _source(self, version: int, may_redirect: bool) -> _Source:
        """Return the process from which this host can receive a version. The publisher may name an earlier asker in its
        place if `may_redirect`. Raises MissingOutput if the publisher does not have the version, _SourceLost if one of
        them does not answer, or the named worker does not have it."""
        with _raise_as_lost(self._spec.publisher, False):
            identity = self._worker.scheduler.identity()
            workers = (await asyncio.wait_for(identity, self._spec.message_timeout_s))["workers"]
        worker = next((a for a, worker in workers.items() if worker["name"] == self._spec.publisher), None)
        if worker is None:
            raise _SourceLost(f"{self._spec.publisher} is not connected", False)
        asker = self._worker.address if may_redirect else None
        answer, redirected = await self._ask(worker, version, asker, None, redirected=False), False
        manifest = Manifest.from_json(answer["manifest"])
        if answer["other"] is not None:
            worker, redirected = answer["other"], True
            answer = await self._ask(worker, version, None, manifest.digest, redirected=True)
        host, port = answer["sender"]
        return _Source((host, port), worker, manifest, redirected)

    async def _ask(
        self, worker: str, version: int, asker: str | None, digest: str | None, *, redirected: bool
    ) -> dict[str, Any]:
        """Return the answer of a worker that may have the version (`_answer`). Raises MissingOutput or _SourceLost, as
        described at `_source`."""
        with _raise_as_lost(worker, redirected):
            asked = getattr(self._worker.rpc(worker), ASK)(version=version, asker=asker, digest=digest)
            answer: dict[str, Any] | None = await asyncio.wait_for(asked, self._spec.message_timeout_s)
        if answer is None:  # the process has just started
            raise _SourceLost(f"{worker} does not send weights yet", redirected)
        if "missing" in answer:
            raise _SourceLost(answer["missing"], True) if redirected else MissingOutput(answer["missing"])
        return answer

    def _receive(self, source: _Source, incoming: IncomingVersion) -> None:
        """Receive the missing pieces. Each piece is checked and written while the next ones arrive. Raises _SourceLost
        if the source is lost, MissingOutput if nobody reads the version any more, and DamagedWeights if a piece is
        damaged."""
        context = self._worker.connection_args["ssl_context"]
        manifest, timeout_s = incoming.manifest, self._spec.message_timeout_s
        with closing(received(source.sender, context, manifest, incoming.num_bytes, timeout_s)) as pieces:
            while not incoming.complete:
                with _raise_as_lost(source.worker, source.redirected):
                    piece = next(pieces)
                if manifest.version in self._unread:
                    raise MissingOutput(f"weights v{manifest.version} are not read any more")
                incoming.append(piece)


# ---- the driver's side ---------------------------------------------------------------------------------------------


def order_fetch(client: Client, workers: Iterable[str], version: int) -> None:
    """Order the workers at these Dask addresses to copy a version to their hosts. Does not wait."""
    notify(client, workers, FETCH, version=version)


def order_release(client: Client, workers: Iterable[str], versions: Iterable[int]) -> None:
    """Tell the workers at these Dask addresses that nobody reads these versions any more. Does not wait."""
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
    """Send an order to the workers at these Dask addresses. Does not wait; the order may be lost. `order`: name of the
    handler. `what`: its arguments."""

    async def send(worker: str) -> None:
        with suppress(OSError):
            await getattr(client.rpc(worker), order)(**what)

    for worker in workers:
        client.loop.add_callback(send, worker)

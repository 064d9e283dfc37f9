"""Weights between hosts, without a run around them: Dask workers in this process, each with a board of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Scheduler, Worker
from distributed.security import Security

from pipeline.workers import weight_sender, weight_transfer
from pipeline.workers.messages import MirrorSpec
from pipeline.workers.weight_sender import WeightSender, received, serve, serving_context
from pipeline.workers.weight_transfer import FAN_OUT, TransferStats, WeightMirror
from storage.errors import MissingOutput, StoreError
from storage.weight_copies import IncomingVersion, OutgoingVersion
from storage.weights import WeightBoard

PIECE = 1 << 16
NUM_PIECES = 12
VERSION = 3
WEIGHTS = {f"w{i}": np.full(NUM_PIECES * PIECE // 16, i, np.float32) for i in range(4)}
SECURITY = Security.temporary()


@dataclass
class Wires:
    """Record of sent pieces, with a gate."""

    pieces: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Number of times that a board sent the piece at an offset."""
    held: str = ""
    """A board that sends no more than `ready` pieces."""
    ready: int = 0
    lost: str = ""
    """A board whose sender closes its connections."""
    counting: threading.Lock = field(default_factory=threading.Lock)

    def sent_by(self, board: WeightBoard) -> dict[int, int]:
        return {at // PIECE: n for (name, at), n in self.pieces.items() if name == str(board.directory)}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sender, "PIECE_BYTES", PIECE)


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch, pieces: None) -> Wires:
    """The senders are threads of this process."""
    wires = Wires()

    class Seen(OutgoingVersion):
        def __init__(self, board: WeightBoard, version: int, digest: str | None = None) -> None:
            super().__init__(board, version, digest)
            self.name = str(board.directory)

        def num_ready(self) -> int:
            if wires.lost == self.name:
                raise MissingOutput("as ordered")
            ready = super().num_ready()
            return min(ready, wires.ready * PIECE) if wires.held == self.name else ready

        def read(self, offset: int, nbytes: int) -> memoryview:
            with wires.counting:
                wires.pieces[self.name, offset] += 1
            return super().read(offset, nbytes)

    class ThreadSender:
        """Owns the socket of a sender."""

        def __init__(self, board: str, host: str, certificate: Mapping[str, str]) -> None:
            self._listener = socket.create_server((host, 0))
            self._board, self._context = WeightBoard(board), serving_context(certificate)
            threading.Thread(target=self._serve, daemon=True).start()

        def _serve(self) -> None:
            with suppress(OSError):  # it was closed
                serve(self._listener, self._board, self._context)

        def address(self) -> tuple[str, int]:
            host, port = self._listener.getsockname()
            return host, port

        def close(self) -> None:
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake its thread
            self._listener.close()

    monkeypatch.setattr(weight_sender, "OutgoingVersion", Seen)
    monkeypatch.setattr(weight_transfer, "WeightSender", ThreadSender)
    return wires


@dataclass
class Host:
    worker: Worker
    mirror: WeightMirror
    board: WeightBoard

    async def fetch(self, version: int = VERSION) -> None:
        """In a thread of its own: the loop answers questions meanwhile."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            try:
                self.mirror.fetch(version)
            except Exception as error:
                loop.call_soon_threadsafe(ended.set_exception, error)
            else:
                loop.call_soon_threadsafe(ended.set_result, None)

        threading.Thread(target=work, daemon=True).start()
        await ended

    def arrived(self) -> int:
        """Pieces that lie there."""
        return sum(path.stat().st_size for path in self.board.directory.glob("*.copy")) // PIECE


@dataclass
class Cluster:
    folder: Path
    scheduler: Scheduler
    stack: AsyncExitStack
    timeout_s: float = 60.0

    async def host(self, name: str, board: str | None = None) -> Host:
        worker = await self.stack.enter_async_context(
            Worker(
                self.scheduler.address, name=name, nthreads=1, memory_limit=0, dashboard=False, nanny=None,
                security=SECURITY,
            )
        )  # fmt: skip
        spec = MirrorSpec(str(self.folder / (board or name)), "train-0", self.timeout_s, message_timeout_s=20.0)
        mirror = WeightMirror(worker, spec)
        mirror.open()
        self.stack.enter_context(closing(mirror))
        return Host(worker, mirror, WeightBoard(spec.board))

    async def hosts(self, number: int) -> list[Host]:
        return [await self.host(f"generate-{i}") for i in range(number)]


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Cluster, Host]]:
    """A scheduler, and the publisher with its version."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", port=0, protocol="tls://", security=SECURITY, dashboard=False)
        )
        opened = Cluster(folder, scheduler, stack)
        publisher = await opened.host("train-0")
        publisher.board.publish(VERSION, WEIGHTS)
        yield opened, publisher


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def until(happened: Callable[[], bool], *working: asyncio.Task[None]) -> None:
    while not happened():
        for task in working:
            assert not task.done(), "it ended too early"
        await asyncio.sleep(0.01)


def check(host: Host, version: int = VERSION) -> None:
    with host.board.open(version) as lease:
        lease.verify()
        for name, expected in WEIGHTS.items():
            np.testing.assert_array_equal(lease.tensors[name], expected, strict=True)


def test_the_publisher_sends_two_copies_however_many_hosts_there_are(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            hosts = await others.hosts(7)
            await asyncio.gather(*(host.fetch() for host in hosts))
            for host in hosts:
                check(host)
                assert host.mirror.take_stats().num_bytes == publisher.board.open(VERSION).manifest.num_bytes
                assert host.mirror.take_stats() == TransferStats()
            assert wires.sent_by(publisher.board) == dict.fromkeys(range(NUM_PIECES), FAN_OUT)
            for host in hosts:
                assert max(wires.sent_by(host.board).values(), default=0) <= FAN_OUT
            assert sum(wires.pieces.values()) == 7 * NUM_PIECES

    run(test)


def test_what_has_arrived_is_handed_on_while_the_rest_is_on_its_way(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            wires.held, wires.ready = str(publisher.board.directory), 5
            hosts = await others.hosts(3)
            fetches = []
            for host in hosts:  # in this order: the third is sent to the first
                fetches.append(asyncio.create_task(host.fetch()))
                await until(lambda host=host: host.arrived() == 5, *fetches)
            assert not any(host.board.has(VERSION) for host in hosts)
            assert wires.sent_by(hosts[0].board) == dict.fromkeys(range(5), 1)
            wires.ready = NUM_PIECES
            await asyncio.gather(*fetches)
            for host in hosts:
                check(host)

    run(test)


def test_if_an_earlier_asker_dies_the_publisher_sends_the_rest(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            first, second = await others.hosts(2)
            await first.fetch()  # in this order: the third is sent to the first
            await second.fetch()
            wires.held, wires.ready = str(first.board.directory), 7
            third = await others.host("generate-2")
            before = wires.sent_by(publisher.board)
            fetch = asyncio.create_task(third.fetch())
            await until(lambda: third.arrived() == 7, fetch)
            assert wires.sent_by(publisher.board) == before
            wires.lost = str(first.board.directory)
            await first.worker.close()
            await fetch
            check(third)
            sent = {piece for piece, times in wires.sent_by(publisher.board).items() if times > before[piece]}
            assert sent == set(range(7, NUM_PIECES)), "it goes on where it stopped"

    run(test)


def test_a_damaged_copy_is_not_handed_on(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            first, second = await others.hosts(2)
            await first.fetch()  # in this order: the third is sent to the first
            await second.fetch()
            manifest = first.board.manifest(VERSION)
            with open(first.board.directory / manifest.file, "r+b") as stream:
                stream.seek(manifest.file_bytes - 1)
                stream.write(b"\x01")
            third = await others.host("generate-2")
            await third.fetch()
            check(third)
            assert wires.sent_by(first.board) == dict.fromkeys(range(NUM_PIECES), 1), "it was asked first"
            assert wires.sent_by(publisher.board) == dict.fromkeys(range(NUM_PIECES), FAN_OUT + 1)

    run(test)


def test_another_copy_under_the_same_number_is_not_handed_on(tmp_path: Path, wires: Wires) -> None:
    """One that a killed run left there, say."""

    async def test() -> None:
        async with cluster(tmp_path) as (others, _):
            first, second = await others.hosts(2)
            await first.fetch()  # in this order: the third is sent to the first
            await second.fetch()
            first.board.release(VERSION)
            first.board.publish(VERSION, {"w": np.zeros(PIECE)})
            third = await others.host("generate-2")
            await third.fetch()
            check(third)
            assert wires.sent_by(first.board) == {}

    run(test)


def test_a_publisher_that_comes_back_elsewhere_is_found_and_sends_the_rest(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            wires.held, wires.ready = str(publisher.board.directory), 4
            reader = await others.host("generate-0")
            fetch = asyncio.create_task(reader.fetch())
            await until(lambda: reader.arrived() == 4, fetch)
            wires.lost = str(publisher.board.directory)
            await publisher.worker.close()
            wires.held = wires.lost = ""
            again = await others.host("train-0")
            assert again.worker.address != publisher.worker.address
            await fetch
            check(reader)
            sent = wires.sent_by(publisher.board)
            assert sent.keys() == {*range(NUM_PIECES)}
            assert [sent[piece] for piece in range(4)] == [1] * 4, "it goes on where it stopped"

    run(test)


def test_processes_of_one_host_fetch_once(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            wires.held, wires.ready = str(publisher.board.directory), 4
            first = await others.host("generate-0", board="shared")
            second = await others.host("generate-1", board="shared")
            fetches = [asyncio.create_task(host.fetch()) for host in (first, second)]
            await until(lambda: first.arrived() == 4, *fetches)
            wires.held = ""
            await asyncio.gather(*fetches)
            check(second)
            assert wires.sent_by(publisher.board) == dict.fromkeys(range(NUM_PIECES), 1)
            assert sorted(host.mirror.take_stats().num_bytes > 0 for host in (first, second)) == [False, True]

    run(test)


def test_a_version_that_nobody_has_is_an_error_at_once(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, _):
            reader = await others.host("generate-0")
            with pytest.raises(MissingOutput, match="v4 are not in"):
                await reader.fetch(4)
            assert list(reader.board.directory.iterdir()) == []

    run(test)


def test_without_a_publisher_retries_end(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            others.timeout_s = 0.2
            reader = await others.host("generate-0")
            await publisher.worker.close()
            with pytest.raises(
                StoreError, match=r"v3 did not arrive from train-0: nothing for 0.2 s .*train-0 is not con"
            ):
                await reader.fetch()
            assert list(reader.board.directory.iterdir()) == []

    run(test)


def test_no_room_here_is_not_the_senders_fault(tmp_path: Path, wires: Wires, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, _):
            reader = await others.host("generate-0")

            def full(self: Any, piece: memoryview) -> None:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(weight_transfer.IncomingVersion, "append", full)
            with pytest.raises(OSError, match="No space left"):
                await reader.fetch()
            assert list(reader.board.directory.iterdir()) == []

    run(test)


async def call(host: Host, order: str, **what: Any) -> None:
    await getattr(host.worker.rpc(host.worker.address), order)(**what)


def test_orders(tmp_path: Path, wires: Wires) -> None:
    """Fetch ahead, release when nobody reads it any more (not under a lease), remove the board."""

    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            reader = await others.host("generate-0")
            await call(reader, weight_transfer.FETCH, version=VERSION)
            await until(lambda: reader.board.has(VERSION))
            lease = reader.board.open(VERSION)
            await call(reader, weight_transfer.RELEASE, versions=[VERSION])
            check(reader)
            lease.close()
            await call(reader, weight_transfer.RELEASE, versions=[])
            assert reader.board.available() == []
            await call(reader, weight_transfer.REMOVE)
            assert not reader.board.directory.exists()
            check(publisher)

    run(test)


def test_a_version_that_is_released_while_it_arrives_does_not_stay(tmp_path: Path, wires: Wires) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            wires.held, wires.ready = str(publisher.board.directory), 4
            reader = await others.host("generate-0")
            fetch = asyncio.create_task(reader.fetch())
            await until(lambda: reader.arrived() == 4, fetch)
            await call(reader, weight_transfer.RELEASE, versions=[VERSION])
            wires.held = ""
            with pytest.raises(MissingOutput, match="v3 are not read any more"):
                await fetch
            assert list(reader.board.directory.iterdir()) == []

    run(test)


# ---- the sender's process ----------------------------------------------------------------------------------------


@pytest.fixture
def sender(tmp_path: Path, pieces: None) -> Iterator[WeightSender]:
    with WeightBoard(tmp_path) as board:
        board.publish(VERSION, WEIGHTS)
        with closing(WeightSender(str(tmp_path), "127.0.0.1", SECURITY.get_tls_config_for_role("worker"))) as sender:
            yield sender


def test_only_who_has_the_certificate_is_answered(sender: WeightSender, tmp_path: Path) -> None:
    manifest = WeightBoard(tmp_path).manifest(VERSION)
    given: ssl.SSLContext = SECURITY.get_connection_args("worker")["ssl_context"]
    arrived = bytearray()
    for piece in received(sender.address(), given, manifest, 0, 60.0):
        time.sleep(0.02)  # the next pieces arrive meanwhile, and must not replace this one
        arrived += piece
    assert arrived == (tmp_path / manifest.file).read_bytes()
    strangers = [ssl.create_default_context(), Security.temporary().get_connection_args("worker")["ssl_context"]]
    for stranger in strangers:
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE  # it asks for no certificate itself
        with pytest.raises((ssl.SSLError, ConnectionError)):
            next(received(sender.address(), stranger, manifest, 0, 60.0))


def test_a_sender_that_was_killed_is_started_again(tmp_path: Path, pieces: None) -> None:
    """It sends a version that has arrived in part. The reader continues where it stopped."""

    async def test() -> None:
        async with cluster(tmp_path) as (others, publisher):
            reader, origin, half = await others.host("generate-0"), WeightBoard(tmp_path / "origin"), NUM_PIECES // 2
            manifest = origin.publish(VERSION + 1, WEIGHTS)
            with OutgoingVersion(origin, VERSION + 1) as whole, IncomingVersion(publisher.board, manifest) as incoming:
                incoming.append(whole.read(0, half * PIECE))
                fetch = asyncio.create_task(reader.fetch(VERSION + 1))
                await until(lambda: reader.arrived() == half, fetch)
                first = publisher.mirror._sender._process
                first.kill()
                incoming.append(whole.read(half * PIECE, manifest.file_bytes - half * PIECE))
                incoming.finish()
                await fetch
            assert publisher.mirror._sender._process is not first
            check(reader, VERSION + 1)

    run(test)

"""`stageline worker`: one worker of an attached run, on whatever host this is, from joining to its end.

    scheduler file? ──► connect ──► join (joining.py) ──► nanny ──fork──► worker process, which the nanny starts again
        │ none yet, or nobody listens there:                │                            when it dies
        └── look again until the deadline                   │
                     the connection ends, the run is over, SIGTERM or SIGINT ──► the process is killed, this one ends

Nothing outlives it: the worker process ends when this one does, however that ends, and this one ends when the driver
does. The last worker of a run on a host removes the host's board of published weights (host_boards.py).

May import dask and distributed, pipeline.config, storage.errors and, of this folder, host_boards, joining,
messages, network, scheduler_file and worker_process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from distributed import Nanny
from distributed.comm import Comm, connect, get_address_host
from distributed.comm.core import FatalCommClosedError
from distributed.security import Security

from pipeline.config.devices import visible_devices
from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.gangs import Gang
from pipeline.workers.host_boards import board_of_host
from pipeline.workers.joining import JOIN, JoinRequest, look_at_host
from pipeline.workers.messages import worker_name
from pipeline.workers.network import interface_address, interface_with, interfaces, route_address
from pipeline.workers.scheduler_file import (
    SchedulerFile,
    file_of_attempt,
    host_name,
    newest_attempt,
    read_scheduler_file,
)
from pipeline.workers.worker_process import (
    dask_settings,
    nanny_options,
    shares_cores,
    start_forkserver,
)
from storage.errors import StoreError

_PEM = re.compile(r"\s*-----BEGIN [A-Z ]+-----\n")
_LOOK_S = 0.2
"""Between looks at what is not there yet."""
_CONNECT_S = 5.0
_ANSWER_S = 60.0
"""For the scheduler to judge a request."""
_LAST_WORDS_S = 2.0
"""For the driver to say why, after Dask has let go of the worker."""


class WorkerRefused(RuntimeError):
    """This worker cannot be one of the run's: the message says why, and names the host."""


class Ending(Enum):
    """Why a worker ended."""

    RUN_OVER = "the run has ended"
    DRIVER_LOST = "the driver is gone"
    TERMINATED = "terminated by a signal"
    PROCESS_GONE = "its process ended for good"


@dataclass(frozen=True)
class WantedWorker:
    """Which worker of which run, and how it is found."""

    gang: str
    index: int
    run_dir: Path | None
    file: Path | None
    """The scheduler file; None: the newest one in the run's directory."""
    interface: str | None
    wait_s: float
    """For the scheduler file to be there, and the scheduler to answer."""

    @property
    def name(self) -> str:
        return worker_name(self.gang, self.index)


def run_worker(wanted: WantedWorker, say: Callable[[str], None]) -> Ending:
    """Joins a run as one of its workers, until either ends. `say` is given what a person should read.

    Raises:
        WorkerRefused: there is no such run, its scheduler file is another user's or none, or it does not want this
            worker or this host.
        StoreError: this host's GPUs cannot be asked for.
    """
    # Dask's own messages are of no use to anybody here; the driver's journal says what is lost.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    return asyncio.run(_AttachedWorker(wanted, say).run())


class _AttachedWorker:
    """Owns one worker's way through one attempt of a driver."""

    def __init__(self, wanted: WantedWorker, say: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._say = say
        self._terminated = asyncio.Event()

    async def run(self) -> Ending:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminated.set)
        finding = asyncio.ensure_future(self._find())
        if not await self._before_signal(finding):
            return Ending.TERMINATED
        file, comm = finding.result()
        try:
            return await self._join(file, comm)
        finally:
            comm.abort()

    async def _before_signal(self, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Whether something is done before a signal comes; what is not is given up."""
        signalled = asyncio.ensure_future(self._terminated.wait())
        await asyncio.wait({work, signalled}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if work.done():
            return True
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        return False

    async def _find(self) -> tuple[SchedulerFile, Comm]:
        """A scheduler file, and a connection to who wrote it: one that a killed driver left is passed over when the
        next driver has written its own."""
        give_up, why = time.monotonic() + self._wanted.wait_s, ""
        while True:
            path = self._wanted.file or _newest_file(self._wanted.run_dir)
            try:
                file = _read(path)
            except FileNotFoundError:
                why = f"there is no scheduler file in {path.parent}: has the run begun, with cluster.kind=attached, "
                why += "and is this directory on a filesystem that the driver's host mounts, too?"
            except OSError as error:  # of a network filesystem, and may pass
                why = f"{path} cannot be read: {error.strerror}"
            else:
                _gang_of(_config_of(file, path), self._wanted)
                try:
                    return file, await connect(file.address, timeout=_CONNECT_S, **_arguments(file, path))
                except OSError as error:
                    why = f"the driver does not answer at {file.address} (process {file.process} on host {file.host}): "
                    why += f"{error}"
                    # Of a run's directory a later attempt's file would count; a file of its own is what it is.
                    if isinstance(error, FatalCommClosedError) and path == self._wanted.file and _still(file, path):
                        need = f"who listens there has another certificate than {path}"
                        raise WorkerRefused(f"host {host_name()}: {why}: {need}") from error
            if time.monotonic() > give_up:
                raise WorkerRefused(f"host {host_name()}: {why} (waited {self._wanted.wait_s:g} s)")
            await asyncio.sleep(_LOOK_S)

    async def _join(self, file: SchedulerFile, comm: Comm) -> Ending:
        _enter(file.working_dir)
        config = load_yaml(file.config)
        gang = _gang_of(config, self._wanted)
        board = RunPaths(Path(file.run_dir)).board(config.weights_dir(gang.name))
        address = _own_address(file, self._wanted.interface or config.cluster.interface)
        request = await asyncio.to_thread(look_at_host, file, gang.name, self._wanted.index, board)
        devices = await self._ask(comm, request)
        if devices is None:
            return Ending.TERMINATED if self._terminated.is_set() else Ending.DRIVER_LOST
        os.environ.update(_network_environment(address))
        gpus = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES")) if request.gpus else None
        shared = shares_cores(config)
        options = nanny_options(config, gang, self._wanted.index, security_of(file), shared=shared, gpus=gpus)
        with dask_settings(), board_of_host(board):
            start_forkserver()
            nanny = Nanny(file.address, host=address, **options)
            try:
                starting = asyncio.ensure_future(nanny.start())
                ending = await self._until_the_end(comm, nanny, starting)
            finally:
                await _end(nanny)
        return ending

    async def _ask(self, comm: Comm, request: JoinRequest) -> list[int] | None:
        """Joins; returns the GPUs that this worker has, of those that it sees, or None where the driver or this process
        ends before."""

        async def exchange() -> Any:
            await comm.write({"op": JOIN, **request.message()})
            return await asyncio.wait_for(comm.read(), _ANSWER_S)

        asking = asyncio.ensure_future(exchange())
        if not await self._before_signal(asking):
            return None
        try:
            answer = asking.result()
        except (OSError, TimeoutError):
            return None
        if "refused" in answer:
            raise WorkerRefused(answer["refused"])
        return list(answer["devices"])

    async def _until_the_end(self, comm: Comm, nanny: Nanny, starting: asyncio.Future[Any]) -> Ending:
        over = asyncio.ensure_future(_over(comm))
        signalled = asyncio.ensure_future(self._terminated.wait())
        gone = asyncio.ensure_future(nanny.finished())
        waits: set[asyncio.Future[Any]] = {over, signalled, gone}
        await asyncio.wait({*waits, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None and not any(wait.done() for wait in waits):
            self._say(f"{self._wanted.name} on host {host_name()}: joined, process {os.getpid()}, worker {nanny.pid}")
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.cancelled() and starting.exception() is not None:
            self._say(f"{self._wanted.name} on host {host_name()}: its process did not start: {starting.exception()}")
        if not (over.done() or signalled.done()):
            await asyncio.wait({over}, timeout=_LAST_WORDS_S)
        ending = over.result() if over.done() else Ending.PROCESS_GONE
        for wait in (*waits, starting):
            wait.cancel()
        await asyncio.gather(*waits, starting, return_exceptions=True)
        return Ending.TERMINATED if self._terminated.is_set() else ending


async def _over(comm: Comm) -> Ending:
    """Waits for the driver's end."""
    try:
        while "over" not in await comm.read():
            pass
    except OSError:
        return Ending.DRIVER_LOST
    return Ending.RUN_OVER


async def _end(nanny: Nanny) -> None:
    """Ends the worker process at once, whatever it does, and does not start it again."""
    nanny.close_gracefully()
    if nanny.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(nanny.pid, signal.SIGKILL)
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(nanny.close(timeout=_LAST_WORDS_S), 2 * _LAST_WORDS_S)


def security_of(file: SchedulerFile) -> Security:
    """The run's certificate, for whoever reads the scheduler file."""
    both = {f"tls_{role}_cert": file.certificate for role in ("scheduler", "worker", "client")}
    both |= {f"tls_{role}_key": file.key for role in ("scheduler", "worker", "client")}
    return Security(require_encryption=True, tls_ca_file=file.certificate, **both)


def _arguments(file: SchedulerFile, path: Path) -> dict[str, Any]:
    """Of a connection to the scheduler. Raises WorkerRefused where certificate or key is missing, or none."""

    def refused(part: str, why: object) -> WorkerRefused:
        return WorkerRefused(f"host {host_name()}: the {part} in {path} cannot be used: {why}")

    for part, text in (("certificate", file.certificate), ("key", file.key)):
        if not _PEM.match(str(text)):  # Dask would take it for the name of a file
            raise refused(part, "it is no PEM" if text else "it is empty")
    try:
        ssl.create_default_context(cadata=file.certificate)
    except (OSError, ValueError) as error:
        raise refused("certificate", error) from error
    try:
        return dict(security_of(file).get_connection_args("worker"))
    except OSError as error:
        raise refused("key", error) from error


def _read(path: Path) -> SchedulerFile:
    """Raises WorkerRefused for what is none, or another user's; OSError where there is none yet, or it may be readable
    soon."""
    try:
        return read_scheduler_file(path)
    except StoreError as error:
        raise WorkerRefused(f"host {host_name()}: {error}") from error


def _still(file: SchedulerFile, path: Path) -> bool:
    """Whether a scheduler file says what it said. If so, who answers with another certificate is not the next attempt's
    driver: that one removes what is left before it listens."""
    try:
        return read_scheduler_file(path) == file
    except (OSError, StoreError):
        return False


def _config_of(file: SchedulerFile, path: Path) -> RunConfig:
    try:
        return load_yaml(file.config)
    except ConfigError as error:
        first = error.each[0]  # the others say no more of why, and a worker's refusal is one line
        raise WorkerRefused(f"host {host_name()}: the config in {path} is none of this version's: {first}") from error


def _newest_file(run_dir: Path | None) -> Path:
    """The newest scheduler file of a run; where there is none, one that is not there."""
    assert run_dir is not None
    return file_of_attempt(run_dir, newest_attempt(run_dir))


def _gang_of(config: RunConfig, wanted: WantedWorker) -> Gang:
    """Raises WorkerRefused for a worker that the run does not have."""
    gangs = {gang.name: gang for gang in config.gangs()}
    if wanted.gang not in gangs:
        has = ", ".join(sorted(gangs))
        raise WorkerRefused(f"host {host_name()}: the run has no gang {wanted.gang!r}; it has {has}")
    workers = gangs[wanted.gang].workers
    if not 0 <= wanted.index < workers:
        need = f"gang {wanted.gang} has no index {wanted.index}; it has 0 to {workers - 1}"
        raise WorkerRefused(f"host {host_name()}: {need}")
    return gangs[wanted.gang]


def _enter(directory: str) -> None:
    """The driver's working directory, which relative paths of the config begin at."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise WorkerRefused(
            f"host {host_name()}: the driver's working directory {directory} cannot be entered here: {error.strerror}. "
            "Start the run in a directory that all hosts mount"
        ) from error


def _own_address(file: SchedulerFile, interface: str | None) -> str:
    """Of this host, for the driver and the other workers: the interface's, or that of the route to the scheduler."""
    if interface is None:
        return route_address(get_address_host(file.address))
    found = interface_address(interface)
    if found is None:
        raise WorkerRefused(
            f"host {host_name()}: it has no interface {interface!r} with an address; it has {', '.join(interfaces())}"
        )
    return found


def _network_environment(address: str) -> dict[str, str]:
    """The interface that gloo and NCCL use, unless that is set already: the one that has the address."""
    name = interface_with(address)
    wanted = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - os.environ.keys()
    return {} if name is None else dict.fromkeys(wanted, name)

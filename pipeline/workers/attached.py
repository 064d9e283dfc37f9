"""`stageline worker`: one worker of an attached run (`cluster.kind: attached`) on any host, from joining to the end.

    scheduler file? ──► connect ──► join ──► nanny ──fork──► worker process; when it dies, the nanny starts a new one
        │ none yet, or nobody listens there            │
        └── look again until the deadline              │
             the connection ends, the run is over, or a signal comes ──► kill the worker process and end

The worker process ends when this process ends, and this process ends when the driver ends. This also holds if the
process that ends first is killed.

**Joining.** The worker describes itself and its host, and the driver's scheduler decides
(`driver/attached_workers.py`):

    `stageline worker`                                        the driver's scheduler
      looks at its host ──JoinRequest──────────────────────►  accepts or refuses
                        ◄──{"devices": ...} or {"refused": why}──
      starts its nanny  ◄════ the connection stays open ════► when one side ends, so does the other
                        ◄──{"over": why}──────────────────    the run has ended

**Boards of published weights on a host.** All users of a board share a lock:

    stageline-NAME-HASH         the board (storage/weights.py)
    stageline-NAME-HASH.lock    locked by every process that uses the board: a local run's driver, each attached
                                worker. In an attached run this file contains the path of the driver's lock file

The system releases a lock when its process ends, even by a kill. The last user removes the board if it ends normally.
If all users were killed, the board stays until its run is dead. Then the next user of any board in the same folder
removes the dead run's board:

- A local run is dead if nobody holds the board's lock, because its driver would hold it.
- An attached run's driver may run on any host, and workers that need the board may be started here again. So the run
  is dead only if nobody holds the board's lock and nobody holds the driver's lock (storage/locks.py).

A new user locks its own board before it looks at others, so no run removes its own board.

The last two sections of this file find this host's network addresses, and keep the reason why a worker process ended
itself. Dask tells the driver only that the process ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

import psutil
from distributed import Nanny
from distributed.comm import Comm, connect, get_address_host
from distributed.comm.core import FatalCommClosedError
from distributed.security import Security

from pipeline.config.devices import visible_devices
from pipeline.config.fitting import descriptors_of_worker, raise_descriptor_limit
from pipeline.config.loading import load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.graph.graph import Gang
from pipeline.workers.messages import worker_name
from pipeline.workers.scheduler_file import (
    SchedulerFile,
    file_of_driver,
    host_name,
    newest_driver,
    read_scheduler_file,
)
from pipeline.workers.worker_process import dask_settings, ending_signals, nanny_options, shares_cores, start_forkserver
from stages.native.software import installed_versions
from storage import files
from storage.errors import StoreError
from storage.host import route_address
from storage.locks import holder, is_named, open_lock, take_lock

_PEM = re.compile(r"\s*-----BEGIN [A-Z ]+-----\n")
_POLL_S = 0.2
"""Seconds between two attempts to read the scheduler file and to connect to the driver."""
_GONE_S = 0.05
"""Seconds between two checks whether a killed process is gone."""
_CONNECT_S = 5.0
_ANSWER_S = 60.0
"""Longest time to wait for the driver's answer to a join request."""
_REASON_S = 2.0
"""Longest time to wait for the driver's reason after Dask has dropped the worker."""
_ENDS_S = 20.0
"""Longest time to wait for the start of a worker whose process was killed meanwhile."""


class WorkerRefused(RuntimeError):
    """The run cannot use this worker. The message names the host and the reason."""


class EndReason(Enum):
    """Reason why a worker ended."""

    RUN_OVER = "the run has ended"
    DRIVER_LOST = "the driver is gone"
    TERMINATED = "terminated by a signal"
    PROCESS_GONE = "its process ended for good"


@dataclass(frozen=True)
class WorkerOptions:
    """The worker that this process is to become, and where to find its run."""

    gang: str
    index: int
    run_dir: Path | None
    file: Path | None
    """The scheduler file; None: the newest scheduler file in the run's directory."""
    interface: str | None
    wait_s: float
    """Seconds to wait for a scheduler file and a connection to its driver."""

    @property
    def name(self) -> str:
        return worker_name(self.gang, self.index)


def run_worker(options: WorkerOptions, print_text: Callable[[str], None]) -> EndReason:
    """Join a run as one of its workers, and return the reason when the worker ends. `print_text` receives text for a
    person.

    Raises:
        WorkerRefused: there is no such run; its scheduler file is invalid or belongs to another user; or the driver
            refuses this worker or this host.
        StoreError: the GPUs of this host cannot be listed.
    """
    # Dask's own messages help nobody here. The driver's journal records losses.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    return asyncio.run(_AttachedWorker(options, print_text).run())


class _AttachedWorker:
    """Owns one worker: finds one driver, joins it, and runs until the worker ends."""

    def __init__(self, options: WorkerOptions, print_text: Callable[[str], None]) -> None:
        self._options = options
        self._print_text = print_text
        self._terminated = asyncio.Event()

    async def run(self) -> EndReason:
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._terminated.set)
        finding = asyncio.ensure_future(self._find())
        if not await self._wait_unless_signalled(finding):
            return EndReason.TERMINATED
        file, comm = finding.result()
        try:
            return await self._join(file, comm)
        finally:
            comm.abort()

    async def _wait_unless_signalled(self, work: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
        """Wait for `work`, a signal or the time limit. Return True if the work is done; otherwise cancel it."""
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
        """Return a scheduler file and a connection to the driver that wrote it. The file of a killed driver is skipped
        as soon as the next driver has written its own file. Raises WorkerRefused if no driver answers in time, if
        the file is invalid, or if its run has no such worker."""
        give_up, why = time.monotonic() + self._options.wait_s, ""
        while True:
            path = self._options.file or _newest_file(self._options.run_dir)
            try:
                file = _read_file(path)
            except FileNotFoundError:
                why = f"there is no scheduler file in {path.parent}: has the run started with cluster.kind=attached, "
                why += "and is this directory on a filesystem that the driver's host mounts too?"
            except OSError as error:  # a network filesystem may recover
                why = f"{path} cannot be read: {error.strerror}"
            else:
                _gang_of(_config_of(file, path), self._options)
                try:
                    return file, await connect(file.address, timeout=_CONNECT_S, **_connection_arguments(file, path))
                except OSError as error:
                    why = f"the driver does not answer at {file.address} (process {file.process} on host {file.host}): "
                    why += f"{error}"
                    # A run's directory may get a later driver's file. A file that the user named stays the same.
                    if (
                        isinstance(error, FatalCommClosedError)
                        and path == self._options.file
                        and _is_unchanged(file, path)
                    ):
                        need = f"who listens there has another certificate than {path}"
                        raise WorkerRefused(f"host {host_name()}: {why}: {need}") from error
            if time.monotonic() > give_up:
                raise WorkerRefused(f"host {host_name()}: {why} (waited {self._options.wait_s:g} s)")
            await asyncio.sleep(_POLL_S)

    async def _join(self, file: SchedulerFile, comm: Comm) -> EndReason:
        _change_directory(file.working_dir)
        config = load_yaml(file.config)
        gang = _gang_of(config, self._options)
        board = RunPaths(Path(file.run_dir)).board(config.weights_dir(gang.name))
        interface = self._options.interface or config.cluster.interface
        address = _own_address(file, interface)
        request = await asyncio.to_thread(describe_host, file, gang.name, self._options.index, board)
        devices = await self._ask(comm, request)
        if devices is None:
            return EndReason.TERMINATED if self._terminated.is_set() else EndReason.DRIVER_LOST
        os.environ.update(_network_environment(address, is_configured=interface is not None))
        gpus = visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES")) if request.gpus else None
        shared = shares_cores(config)
        options = nanny_options(config, gang, self._options.index, security_of(file), shared=shared, gpus=gpus)
        with dask_settings(), board_of_host(board, RunPaths(Path(file.run_dir)).lock):
            raise_descriptor_limit(descriptors_of_worker(gang))
            start_forkserver(shared=shared)
            nanny = Nanny(file.address, host=address, **options)
            starting = asyncio.ensure_future(nanny.start())
            try:
                ending = await self._run_until_end(comm, nanny, starting)
            finally:
                await kill_worker(nanny, starting)
        return ending

    async def _ask(self, comm: Comm, request: JoinRequest) -> list[int] | None:
        """Join the run, and return the indices of the GPUs that this worker gets. Return None if a signal comes first,
        or if the driver does not answer. Raises WorkerRefused if the driver refuses this worker."""

        async def exchange() -> Any:
            await comm.write({"op": JOIN, **asdict(request)})
            return await asyncio.wait_for(comm.read(), _ANSWER_S)

        asking = asyncio.ensure_future(exchange())
        if not await self._wait_unless_signalled(asking):
            return None
        try:
            answer = asking.result()
        except (OSError, TimeoutError):
            return None
        if "refused" in answer:
            raise WorkerRefused(answer["refused"])
        return list(answer["devices"])

    async def _run_until_end(self, comm: Comm, nanny: Nanny, starting: asyncio.Future[Any]) -> EndReason:
        over = asyncio.ensure_future(_wait_for_end(comm))
        signalled = asyncio.ensure_future(self._terminated.wait())
        gone = asyncio.ensure_future(nanny.finished())
        waits: set[asyncio.Future[Any]] = {over, signalled, gone}
        await asyncio.wait({*waits, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is None and not any(wait.done() for wait in waits):
            self._print_text(
                f"{self._options.name} on host {host_name()}: joined, process {os.getpid()}, worker {nanny.pid}"
            )
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not starting.cancelled() and starting.exception() is not None:
            self._print_text(
                f"{self._options.name} on host {host_name()}: its process did not start: {starting.exception()}"
            )
        if not (over.done() or signalled.done()):
            await asyncio.wait({over}, timeout=_REASON_S)
        ending = over.result() if over.done() else EndReason.PROCESS_GONE
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return EndReason.TERMINATED if self._terminated.is_set() else ending


async def _wait_for_end(comm: Comm) -> EndReason:
    """Wait for one of two events, and return it as the reason: the run has ended, or the connection to the driver is
    lost."""
    try:
        while "over" not in await comm.read():
            pass
    except OSError:
        return EndReason.DRIVER_LOST
    return EndReason.RUN_OVER


async def kill_worker(nanny: Nanny, starting: asyncio.Future[Any]) -> None:
    """End the worker process at once, whatever it is doing. The nanny does not restart it. `starting`: the nanny's
    start, which fails when the process that it waits for is killed. A start that does not fail in time is cancelled."""
    nanny.close_gracefully()
    await _kill_until(nanny, starting.done, _ENDS_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await _kill_until(nanny, lambda: nanny.pid is None, _REASON_S)
    # AssertionError: Dask expects that a start has ended, and a cancelled one may not have. `close` frees everything
    # before it raises this.
    with suppress(OSError, TimeoutError, AssertionError):
        await asyncio.wait_for(nanny.close(timeout=_REASON_S), 2 * _REASON_S)


async def _kill_until(nanny: Nanny, is_over: Callable[[], bool], limit_s: float) -> None:
    """Kill the worker process, if there is one, again and again until `is_over` returns True, or for `limit_s`."""
    give_up = time.monotonic() + limit_s
    while True:
        if nanny.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGKILL)
        if is_over() or time.monotonic() > give_up:
            return
        await asyncio.sleep(_GONE_S)


def security_of(file: SchedulerFile) -> Security:
    """Return the TLS settings of a connection within the run. Everyone who can read the scheduler file can connect."""
    both = {f"tls_{role}_cert": file.certificate for role in ("scheduler", "worker", "client")}
    both |= {f"tls_{role}_key": file.key for role in ("scheduler", "worker", "client")}
    return Security(require_encryption=True, tls_ca_file=file.certificate, **both)


def _connection_arguments(file: SchedulerFile, path: Path) -> dict[str, Any]:
    """Return the arguments of a connection to the scheduler. Raises WorkerRefused if the certificate or the key is
    missing or invalid."""

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


def _read_file(path: Path) -> SchedulerFile:
    """Read a scheduler file. Raises WorkerRefused if a later try would fail too, OSError if it may succeed."""
    try:
        return read_scheduler_file(path)
    except StoreError as error:
        raise WorkerRefused(f"host {host_name()}: {error}") from error


def _is_unchanged(file: SchedulerFile, path: Path) -> bool:
    """Return True if the scheduler file still has this content. Then no later driver listens yet, because each removes
    the files of earlier ones first."""
    try:
        return read_scheduler_file(path) == file
    except (OSError, StoreError):
        return False


def _config_of(file: SchedulerFile, path: Path) -> RunConfig:
    try:
        return load_yaml(file.config)
    except ConfigError as error:
        first = error.errors[0]  # one line is enough for a refusal
        raise WorkerRefused(f"host {host_name()}: this version cannot read the config in {path}: {first}") from error


def _newest_file(run_dir: Path | None) -> Path:
    """Return the path of a run's newest scheduler file. If there is none, the path does not exist."""
    assert run_dir is not None
    return file_of_driver(run_dir, newest_driver(run_dir))


def _gang_of(config: RunConfig, options: WorkerOptions) -> Gang:
    """Return the gang that `options` names. Raises WorkerRefused if the run has no such gang, or if the gang has no
    worker with this index."""
    gangs = {gang.name: gang for gang in config.gangs()}
    if options.gang not in gangs:
        has = ", ".join(sorted(gangs))
        raise WorkerRefused(f"host {host_name()}: the run has no gang {options.gang!r}; it has {has}")
    workers = gangs[options.gang].workers
    if not 0 <= options.index < workers:
        need = f"gang {options.gang} has no index {options.index}; it has 0 to {workers - 1}"
        raise WorkerRefused(f"host {host_name()}: {need}")
    return gangs[options.gang]


def _change_directory(directory: str) -> None:
    """Change to the driver's working directory, where relative paths of the config begin."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise WorkerRefused(
            f"host {host_name()}: the driver's working directory {directory} cannot be entered here: {error.strerror}. "
            "Start the run in a directory that all hosts mount"
        ) from error


def _own_address(file: SchedulerFile, interface: str | None) -> str:
    """Return the address at which the driver and the other workers reach this host. This is the address of `interface`.
    If `interface` is None, it is the address of the route to the scheduler. Raises WorkerRefused if the host has no
    such interface, or if the interface has no address."""
    if interface is None:
        return route_address(get_address_host(file.address))
    address = interface_address(interface)
    if address is None:
        raise WorkerRefused(
            f"host {host_name()}: it has no interface {interface!r} with an address; it has {', '.join(interfaces())}"
        )
    return address


def _network_environment(address: str, *, is_configured: bool) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the interface with this address. Set ones win, unless
    `is_configured`: the config or the command line names the interface."""
    name = interface_with(address)
    wanted = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - (set() if is_configured else os.environ.keys())
    return {} if name is None else dict.fromkeys(wanted, name)


# ---- joining ---------------------------------------------------------------------------------------------

JOIN = "stageline_join"
"""Name of the scheduler's handler of join requests."""
REFUSALS = "stageline-refusals"
"""Dask topic on which the scheduler reports workers that it refused: `JoinRefused` as a dict."""
_MUST_AGREE = ("stageline", "dask", "distributed", "msgpack", "cloudpickle")
"""Packages whose versions must agree between processes that exchange objects. Python's version must agree too."""
_GPU_IDENTITIES = (
    "import torch; [print(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]"
)


@dataclass(frozen=True)
class JoinRequest:
    """A worker's request to join."""

    gang: str
    index: int
    host: str
    process: int
    """Process id of `stageline worker` on its host."""
    clock: float
    """Time of the request by the clock of the worker's host, in seconds since the epoch."""
    versions: dict[str, str]
    gpus: list[str]
    """UUIDs of the GPUs that the worker sees. The index of a GPU is its position in this list."""
    shared: str
    """Fault of the run's directory, as seen from the worker's host. Empty if it has no fault."""
    wrote: str
    """Name of the file that the worker wrote into the run's `attached` directory, for the driver to read."""
    board_free: int
    """Bytes for published weights on the worker's host: the free bytes, plus the bytes that this run's weights take
    already."""


@dataclass(frozen=True)
class JoinRefused:
    """The driver's refusal of a worker that asked to join the run."""

    gang: str
    index: int
    text: str
    """Reason, with the host's name."""
    fatal: bool
    """True: the worker belongs to the run, but its host is unfit. False: the run does not need this worker."""


def local_versions() -> dict[str, str]:
    """Return package (or `python`) -> its version here. Two processes that exchange objects must have the same
    versions."""
    return {"python": platform.python_version()} | installed_versions(_MUST_AGREE)


def describe_host(file: SchedulerFile, gang: str, index: int, board: Path) -> JoinRequest:
    """Return the join request of a worker on this host. `board`: directory of the host's published weights."""
    wrote = f"from-{gang}-{index}-{uuid.uuid4().hex[:8]}"
    return JoinRequest(
        gang=gang,
        index=index,
        host=host_name(),
        process=os.getpid(),
        versions=local_versions(),
        gpus=gpu_identities(),
        shared=_directory_fault(file, wrote),
        wrote=wrote,
        board_free=_free_bytes(board),
        # Read last: the lines above may take longer than the clocks may differ.
        clock=time.time(),
    )


def gpu_identities() -> list[str]:
    """Return the UUIDs of the GPUs that this process may see, in the order of their indices. A child process lists the
    GPUs, so that this process opens no device. Raises StoreError if the child process fails."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    done = subprocess.run([sys.executable, "-c", _GPU_IDENTITIES], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"host {host_name()}: its GPUs cannot be asked for: {done.stderr.strip()[-500:]}")
    return done.stdout.split()


def _directory_fault(file: SchedulerFile, wrote: str) -> str:
    """Return what is wrong with the run's directory as this host sees it, or an empty text. This host must be able to
    read and write there, and an exclusive create must fail if the file exists."""
    folder = RunPaths(Path(file.run_dir)).attached
    root = files.open_root(str(folder))
    try:
        content = files.read(root, file.shared.name)
        if content is None or content.decode() != file.nonce:
            return (
                f"{file.shared} is not what the driver wrote: is {file.run_dir} on a filesystem that both hosts mount?"
            )
        if files.write_new(root, file.shared.name, b""):
            return f"an exclusive create of {file.shared} succeeded, and the file was there: commits need it to fail"
        files.write(root, wrote, file.nonce.encode())
    except (OSError, StoreError) as error:
        return f"{folder} cannot be read and written: {error}"
    return ""


def _free_bytes(board: Path) -> int:
    existing = next(path for path in (board, *board.parents) if path.exists())
    space = os.statvfs(existing)
    own = sum(path.stat().st_size for path in board.glob("v*.bin")) if board.is_dir() else 0
    return space.f_bavail * space.f_frsize + own


# ---- host boards -----------------------------------------------------------------------------------------

BOARD_PREFIX = "stageline-"
_LOCK = ".lock"
_REMOVAL_S = 120.0
"""Longest time to wait for the last user of a board to remove it."""


@contextmanager
def board_of_host(board: Path, driver_lock: Path | None = None) -> Iterator[None]:
    """Keep a board in use during the block. A board is a directory of the published weights of one run, usually in
    shared memory.

    At the beginning, take a shared lock on the board's lock file, and then remove the boards of dead runs in the same
    folder. At the end, release the lock, and remove the board itself unless another process still uses it.

    Args:
        board: directory of the board. It need not exist yet.
        driver_lock: path of the lock file that the driver of an attached run holds. From it, other processes can tell
            whether the run is dead. None: a local run.

    Raises:
        StoreError: the board's lock file belongs to another user, or another process keeps an exclusive lock on it for
            120 s.
    """
    board.parent.mkdir(parents=True, exist_ok=True)
    path = board.with_name(f"{board.name}{_LOCK}")
    with _shared_lock(path) as lock:
        if driver_lock is not None and not lock.read():
            lock.write(str(driver_lock.resolve()))
            lock.flush()
        _remove_boards_of_dead_runs(board.parent)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # if two end at once, the second must find the lock free
            _remove_if_unused(lock, path)


def _remove_boards_of_dead_runs(folder: Path) -> None:
    for path in folder.glob(f"{BOARD_PREFIX}*{_LOCK}"):
        with suppress(OSError):  # removed meanwhile, owned by another user, or the driver's filesystem is not mounted
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with path.open("r+") as lock:
                driver_lock = lock.read()
                if not driver_lock or _is_dead(Path(driver_lock)):
                    _remove_if_unused(lock, path)


def _is_dead(driver_lock: Path) -> bool:
    """Return True if no driver holds this lock, and the lock's filesystem is mounted here."""
    return driver_lock.parents[1].is_dir() and holder(driver_lock) is None


def _remove_if_unused(lock: IO[str], path: Path) -> None:
    """Remove the directory of published weights (the board) and its lock file, unless another process holds a lock on
    the file. `lock`: the opened lock file. `path`: path of the lock file."""
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_named(lock, path):  # otherwise the lock was removed, and the board belongs to a later user
            shutil.rmtree(path.with_name(path.name.removesuffix(_LOCK)), ignore_errors=True)
            path.unlink(missing_ok=True)


def _shared_lock(path: Path) -> IO[str]:
    """Open the lock file at `path` and take a shared lock on it. Raises StoreError if the file belongs to another user,
    or if another process keeps an exclusive lock on it for `_REMOVAL_S`."""
    while True:
        held = open_lock(path)
        try:
            take_lock(held, path, _REMOVAL_S, shared=True)
        except BaseException:
            held.close()
            raise
        if is_named(held, path):
            return held
        held.close()  # the last user had removed the file in the meantime


# ---- network ---------------------------------------------------------------------------------------------


def interface_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface, or else its IPv6 address; None if it has neither."""
    addresses = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    return None


def interfaces() -> list[str]:
    """Return the names of the interfaces that have an IP address."""
    return sorted(name for name in psutil.net_if_addrs() if interface_address(name) is not None)


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has this address; None if no interface has it."""
    names = (
        name for name, addresses in psutil.net_if_addrs().items() if any(one.address == address for one in addresses)
    )
    return next(names, None)


# ---- reason of an end ------------------------------------------------------------------------------------------

_MAX_REASON_CHARS = 500
"""Maximum number of characters of the reason that a worker process records when it ends itself. A longer reason is cut,
because it becomes part of an event in the run's journal."""


def write_exit_reason(log: str | None, reason: str) -> None:
    """Write the reason why this process ends into a file beside `log`, the process's log. None: write nothing."""
    if log is not None:
        with suppress(OSError):  # the process ends even if the disk is full
            _reason_file(log).write_text(" ".join(reason.split())[:_MAX_REASON_CHARS], "utf8")


def with_exit_reason(driver_reason: str, log: str | None) -> str:
    """Return the driver's reason why a process ended, followed by the process's own reason if it left one. Remove the
    file with the process's reason."""
    reason = "" if log is None else _read_and_remove(_reason_file(log))
    return f"{driver_reason}: {reason}" if reason else driver_reason


def clear_exit_reason(log: str | None) -> None:
    """Remove the file beside `log` in which an earlier process left the reason why it ended itself. The file is still
    there if no driver has read it."""
    if log is not None:
        _read_and_remove(_reason_file(log))


def _read_and_remove(file: Path) -> str:
    try:
        reason = file.read_text("utf8")
        file.unlink()
    except (OSError, UnicodeDecodeError):
        return ""
    return reason


def _reason_file(log: str) -> Path:
    return Path(f"{log}.exit_reason")

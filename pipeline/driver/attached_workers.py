"""Workers on any hosts: the driver starts only the scheduler, and `stageline worker` joins from other hosts.

    scheduler file (address, certificate) ──► `stageline worker` ──joins──► WorkerRegistry ──► worker's nanny joins Dask

`WorkerRegistry` decides who may join, in the scheduler's thread. `pipeline/workers/attached.py` has the worker's side.

    JoinRequest ──► does the run wait for this worker? ──► is its host fit? ──► free GPUs ──► joined
                          │ no: refused, a warning                │ no: refused; the run leaves out the worker, or ends
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from distributed import Status
from distributed.security import Security
from distributed.utils import get_ip

from pipeline.config.devices import Worker, devices_of_joining_worker
from pipeline.config.hardware import GIB
from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import listening
from pipeline.driver.cluster import Cluster
from pipeline.errors import ConfigError
from pipeline.workers.attached import (
    JOIN,
    REFUSALS,
    JoinRefused,
    JoinRequest,
    interface_address,
    interfaces,
    local_versions,
)
from pipeline.workers.messages import worker_name
from pipeline.workers.scheduler_file import (
    SchedulerFile,
    file_of_driver,
    host_name,
    newest_driver,
    remove_scheduler_file,
    write_scheduler_file,
)
from stages.models.protocol import Role
from storage import codec, files
from storage.errors import StoreError
from storage.host import family_of, private_directory

_COUNT = "attempts"
"""Name of the file that holds the number of the newest driver. The file is in the run's directory `attached`."""
_CLOCK_SKEW_S = 5.0
"""Maximum number of seconds by which a host's clock may differ from the driver's."""


class AttachedWorkers(Cluster):
    """A cluster whose workers join from other hosts. Owns the run's scheduler file."""

    def __init__(self, config: RunConfig, board_bytes: int) -> None:
        """`board_bytes`: bytes that published weights can take on a host, in all versions that exist at the same time.

        Raises:
            ConfigError: the interface or address is not this host's, or the port is taken.
        """
        listening_host, port = listening(config.cluster)
        host = listening_address(config.cluster.interface, listening_host)
        _check_port(host, port)
        driver = next_driver_number(config.run_dir)
        security = Security.temporary()
        super().__init__(config, security, host, port)
        with self._stack.pop_all() as stack:  # closes the cluster if a later part fails
            self.file = _new_scheduler_file(config, driver, self._cluster.scheduler_address, security)
            self._registry = WorkerRegistry(config, self.file, board_bytes, self._report)
            stack.callback(lambda: self.client.sync(self._registry.end, "the run has ended"))
            self._cluster.scheduler.handlers[JOIN] = self._join
            self.path = self._publish(config, stack)
            self._stack = stack.pop_all()

    async def _join(self, comm: Any, **message: Any) -> Status:
        """Handle a join request to the scheduler. Returns when the worker is refused or its connection ends."""
        try:
            await self._registry.serve(comm, message)
        finally:
            await comm.close()
        return Status.dont_reply

    def _report(self, refusal: dict[str, Any]) -> None:
        self._cluster.scheduler.log_event(REFUSALS, refusal)

    def _publish(self, config: RunConfig, stack: ExitStack) -> Path:
        """Write the scheduler file, and return its path. The file is removed when the cluster closes."""
        self.file.shared.write_text(self.file.nonce)
        path = file_of_driver(config.run_dir, self.file.driver)
        write_scheduler_file(path, self.file)
        stack.callback(remove_scheduler_file, path, self.file.nonce)
        return path


def listening_address(interface: str | None, host: str | None) -> str:
    """Return the address that the scheduler listens on: the address of `interface`, or else of `host`, or else the
    address that Dask finds for this host. Raises ConfigError if this host has no such interface or address."""
    if interface is not None:
        address = interface_address(interface)
        if address is None:
            need = f"host {host_name()} has no such interface with an address; it has {', '.join(interfaces())}"
            raise ConfigError("cluster.interface", f"given {interface!r}; {need}")
        return address
    if host is None:
        return str(get_ip())
    try:
        numeric = str(socket.getaddrinfo(host, None)[0][4][0])
        with socket.socket(family_of(numeric)) as probe:
            probe.bind((numeric, 0))
    except OSError as error:
        need = f"is no address of this host ({error}): a name or an address that workers reach it by"
        raise ConfigError("cluster.address", f"given {host!r}; {need}") from error
    return numeric


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError if the port cannot be used. Dask would only show a traceback."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            need = f"cannot listen there on host {host_name()} ({host}): {error.strerror}. Another, or 0 for any"
            raise ConfigError("cluster.address", f"given port {port}; {need}") from error


def next_driver_number(run_dir: Path) -> int:
    """Return the number of a new driver of a run (1 for the first), and remove the files that earlier drivers left.
    Call this before the scheduler listens, so that no worker joins this driver with an earlier driver's certificate.
    Raises OSError and StoreError."""
    folder = RunPaths(run_dir.resolve()).attached
    private_directory(folder)
    driver = 1 + max(newest_driver(run_dir), _read_number(folder / _COUNT))
    files.write_local(folder / _COUNT, str(driver).encode())
    for left in folder.iterdir():
        if left.name != _COUNT:
            left.unlink(missing_ok=True)
    return driver


def _read_number(count: Path) -> int:
    """Return the number of a run's newest driver, or 0 if the file is missing or cut off (a full disk). A wrong 0 is
    harmless: `next_driver_number` also looks at the newest scheduler file, and removes earlier drivers' files."""
    try:
        return int(count.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _new_scheduler_file(config: RunConfig, driver: int, address: str, security: Security) -> SchedulerFile:
    """Return the scheduler file of this driver."""
    run_dir = config.run_dir.resolve()
    certificate = security.get_tls_config_for_role("scheduler")
    return SchedulerFile(
        driver=driver,
        address=address,
        host=host_name(),
        process=os.getpid(),
        run_dir=str(run_dir),
        working_dir=os.getcwd(),
        nonce=secrets.token_hex(16),
        certificate=certificate["cert"],
        key=certificate["key"],
        config=to_yaml(config),
    )


# ---- Registry of joined workers --------------------------------------------------------------------------

_SEEN_WITHIN_S = 10.0
"""A file written by a worker's host must appear on this host within this number of seconds."""
_POLL_S = 0.1


class Connection(Protocol):
    """The part of a Dask connection that we use."""

    async def read(self) -> Any: ...

    async def write(self, message: Any) -> Any: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class _Joined:
    """A joined worker, whose connection is open."""

    connection: Connection
    request: JoinRequest
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that the worker was given."""


class WorkerRegistry:
    """Owns the connections of the workers that have joined."""

    def __init__(
        self, config: RunConfig, file: SchedulerFile, board_bytes: int, report: Callable[[dict[str, Any]], None]
    ) -> None:
        """`board_bytes`: bytes that published weights can take on a host, in all versions that exist at the same time.
        `report`: called with each refusal, a JoinRefused as a dict."""
        self._config = config
        self._file = file
        self._board_bytes = board_bytes
        self._report = report
        self._gangs = {gang.name: gang for gang in config.gangs()}
        self._joined: dict[Worker, _Joined] = {}

    async def serve(self, connection: Connection, message: dict[str, Any]) -> None:
        """Answer a join request. If the worker joins, return when its connection ends."""
        now = time.time()
        try:
            request = codec.from_document(JoinRequest, message)
        except codec.NotARecord as error:
            await self._refuse(connection, self._refuse_other_version(message, error))
            return
        refused = self._refuse_unwanted(request.gang, request.index, request.host)
        if refused is None:
            worker = request.gang, request.index
            unfit = [*host_problems(request, self._config, now, local_versions(), self._board_bytes_of(request))]
            unfit += [] if unfit else await self._directory_problems(request)
            gpus = self._gpus_for(request)
            unfit += [gpus] if isinstance(gpus, str) else []
            refused = self._refuse_unwanted(*worker, request.host)  # another worker may have joined meanwhile
            if refused is None and unfit:
                refused = JoinRefused(*worker, f"host {request.host}: {unfit[0]}", fatal=True)
        if refused is not None:
            await self._refuse(connection, refused)
            return
        assert not isinstance(gpus, str)
        self._joined[worker] = _Joined(connection, request, tuple(request.gpus[index] for index in gpus))
        try:
            await connection.write({"devices": list(gpus)})
            while True:
                await connection.read()  # the worker sends nothing: this waits for the connection to end
        except OSError:
            pass
        finally:
            if self._joined[worker].connection is connection:
                del self._joined[worker]

    async def end(self, reason: str) -> None:
        """Tell every joined worker to end, together with all processes that it started."""
        for joined in list(self._joined.values()):
            with suppress(OSError):
                await joined.connection.write({"over": reason})

    async def _refuse(self, connection: Connection, refused: JoinRefused) -> None:
        self._report(asdict(refused))
        with suppress(OSError):
            await connection.write({"refused": refused.text})

    def _refuse_other_version(self, message: Mapping[str, Any], error: codec.NotARecord) -> JoinRefused:
        """Return the refusal of a worker whose request does not have the format of this version of Stageline."""
        gang, index, host = str(message.get("gang")), message.get("index"), message.get("host")
        index, versions = index if isinstance(index, int) else -1, message.get("versions")
        differ = version_problems(versions if isinstance(versions, dict) else {}, local_versions())
        why = next(differ, f"its request is none of this version of Stageline: {error}")
        unwanted = self._refuse_unwanted(gang, index, str(host))
        return unwanted or JoinRefused(gang, index, f"host {host}: {why}", fatal=True)

    def _refuse_unwanted(self, name: str, index: int, host: str) -> JoinRefused | None:
        """Return a refusal if the run has no such gang or index, or if this worker has joined already. Otherwise return
        None."""
        gang, text = self._gangs.get(name), None
        if gang is None:
            text = f"host {host}: the run has no gang {name!r}; it has {', '.join(sorted(self._gangs))}"
        elif not 0 <= index < gang.workers:
            text = f"host {host}: gang {name} has no index {index}; it has 0 to {gang.workers - 1}"
        elif (name, index) in self._joined:
            there = self._joined[name, index].request
            who = worker_name(name, index)
            text = f"host {host}: {who} is there already: process {there.process} on host {there.host}"
        return None if text is None else JoinRefused(name, index, text, fatal=False)

    def _board_bytes_of(self, request: JoinRequest) -> int:
        """Return the bytes of published weights that this worker's host needs room for."""
        return 0 if self._gangs[request.gang].roles.isdisjoint({Role.GENERATE, Role.POLICY}) else self._board_bytes

    def _gpus_for(self, request: JoinRequest) -> tuple[int, ...] | str:
        gang = self._gangs[request.gang]
        alike = next((one.request for (name, _), one in self._joined.items() if name == gang.name), None)
        placement = self._config.placement
        if alike is not None and bool(alike.gpus) != bool(request.gpus) and gang.gpus:
            some = "sees GPUs" if request.gpus else "sees no GPU"
            return f"it {some}, unlike {worker_name(alike.gang, alike.index)} on host {alike.host}"
        share, device_sharing = bool(placement.oversubscribe), placement.device_sharing
        return devices_of_joining_worker(
            gang, request.gpus, self._gpus_in_use(), share=share, device_sharing=device_sharing
        )

    def _gpus_in_use(self) -> Mapping[str, list[Worker]]:
        taken: dict[str, list[Worker]] = {}
        for worker, joined in self._joined.items():
            for gpu in joined.gpus:
                taken.setdefault(gpu, []).append(worker)
        return taken

    async def _directory_problems(self, request: JoinRequest) -> list[str]:
        """Wait until this host sees the file that the worker wrote into the run's directory, and remove the file.
        Return an empty list, or a list of one text if this host does not see or cannot read the file."""
        root = files.open_root(str(RunPaths(self._config.run_dir).attached))
        give_up = time.monotonic() + _SEEN_WITHIN_S
        while True:
            try:
                content = await asyncio.to_thread(files.read, root, request.wrote)
                if content is not None and content.decode() == self._file.nonce:
                    await asyncio.to_thread(files.remove, root, request.wrote)
                    return []
            except (OSError, StoreError) as error:
                return [f"what it wrote to the run's directory cannot be read: {error}"]
            if time.monotonic() > give_up:
                return [
                    f"what it wrote to {self._file.run_dir} was not seen by the driver's host within "
                    f"{_SEEN_WITHIN_S:g} s: both must mount the same filesystem"
                ]
            await asyncio.sleep(_POLL_S)


def host_problems(
    request: JoinRequest, config: RunConfig, now: float, versions: Mapping[str, str], board_bytes: int
) -> Iterator[str]:
    """Yield the problems of a worker's host for this run. `now`: time of the driver's host, in seconds since the epoch.
    `versions`: package -> version that the driver uses. `board_bytes`: bytes that published weights will take on the
    worker's host."""
    yield from version_problems(request.versions, versions)
    if request.shared:
        yield request.shared
    skew = request.clock - now
    if abs(skew) > _CLOCK_SKEW_S:
        side = "ahead of" if skew > 0 else "behind"
        yield (f"its clock is {abs(skew):.1f} s {side} the driver's, more than {_CLOCK_SKEW_S:g} s: set it by NTP")
    if request.board_free < board_bytes:
        yield (
            f"published weights will take {board_bytes / GIB:.2f} GiB (staleness + 2 versions) and its shared memory "
            f"has {request.board_free / GIB:.2f}: make /dev/shm larger, or set cluster.weights_dir"
        )


def version_problems(worker_versions: Mapping[str, object], driver_versions: Mapping[str, str]) -> Iterator[str]:
    """Yield one text about all packages whose versions differ from the driver's. Yield nothing if all versions are
    equal."""
    differ = [
        f"{name} {worker_versions.get(name)} (the driver: {driver_versions[name]})"
        for name in driver_versions
        if worker_versions.get(name) != driver_versions[name]
    ]
    if differ:
        yield f"it has other versions than the driver: {'; '.join(differ)}. Use one environment on all hosts"

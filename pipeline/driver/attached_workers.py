"""Workers on any hosts: the scheduler is here, and `stageline worker` joins from wherever it was started.

    scheduler file: address, certificate ──► `stageline worker` on a host ──joins──► roster ──► its nanny registers

Nothing is started here but the scheduler. May import dask and distributed, pipeline.config,
pipeline.driver.{cluster, roster}, pipeline.workers and storage.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed import Client, Scheduler, SpecCluster, Status
from distributed.security import Security
from distributed.utils import get_ip

from pipeline.config.errors import ConfigError
from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import dashboard_link, scheduler_spec
from pipeline.driver.roster import Roster
from pipeline.workers.joining import JOIN, REFUSALS
from pipeline.workers.network import family_of, interface_address, interfaces
from pipeline.workers.scheduler_file import (
    SchedulerFile,
    driver_answers,
    file_of_attempt,
    host_name,
    newest_attempt,
    read_scheduler_file,
    remove_scheduler_file,
    write_scheduler_file,
)
from pipeline.workers.worker_process import dask_settings
from storage import files
from storage.errors import StoreError
from storage.private import private_directory

_ATTEMPTS = "attempts"
"""File beside the scheduler file that says how many there were."""
_FILE_KEY = "cluster.scheduler_file"
_OWN_FILE = "A file of this run's own, in a directory that can be written; null for one in the run's directory"


class AttachedWorkers:
    """Owns the scheduler of a run whose workers join from outside, its scheduler file, and the client connected to
    it."""

    def __init__(self, config: RunConfig, board_bytes: int) -> None:
        """`board_bytes`: of all versions of the weights that a host may have published at once.

        Raises:
            ConfigError: the interface or the address is not this host's, the port is taken, or the scheduler file
                cannot be where the config says.
        """
        # For the whole process, and for good, as local workers have it.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        host = listening_address(config.cluster.interface, config.cluster.host)
        _check_port(host, config.cluster.port)
        if config.cluster.scheduler_file is not None:
            make_way(config.cluster.scheduler_file)
        attempt = begin_attempt(config.run_dir)
        security = Security.temporary()
        of_scheduler = scheduler_spec(config, security, host, config.cluster.port)
        with ExitStack() as stack:  # what is open is closed again if the rest cannot be opened
            stack.enter_context(dask_settings())
            self._cluster = SpecCluster(
                workers={}, scheduler=of_scheduler, security=security, silence_logs=logging.CRITICAL
            )
            stack.callback(self._cluster.close)
            self._dashboard = config.cluster.dashboard
            self.client = stack.enter_context(Client(self._cluster))
            self.file = _new_file(config, attempt, self._cluster.scheduler_address, security)
            self._roster = Roster(config, self.file, board_bytes, self._report)
            stack.callback(lambda: self.client.sync(self._roster.end, "the run has ended"))
            self._cluster.scheduler.handlers[JOIN] = self._join
            self.path = self._publish(config, stack)
            self._stack = stack.pop_all()

    @property
    def dashboard(self) -> str | None:
        """Address of the Dask dashboard, where there is one."""
        return None if self._dashboard is None else dashboard_link(self.client.dashboard_link, self._dashboard)

    @property
    def scheduler(self) -> Scheduler:
        """Which runs in this process, in a thread of its own."""
        found: Scheduler = self._cluster.scheduler
        return found

    def close(self) -> None:
        """Has every worker end at once, in the middle of whatever it does, and removes the scheduler file."""
        self._stack.close()

    async def _join(self, comm: Any, **message: Any) -> Status:
        """The scheduler's handler: open as long as the worker is there."""
        try:
            await self._roster.serve(comm, message)
        finally:
            await comm.close()
        return Status.dont_reply

    def _report(self, refusal: dict[str, Any]) -> None:
        self._cluster.scheduler.log_event(REFUSALS, refusal)

    def _publish(self, config: RunConfig, stack: ExitStack) -> Path:
        """Lets workers know where the scheduler is, until the end."""
        self.file.shared.write_text(self.file.nonce)
        given = config.cluster.scheduler_file
        path = file_of_attempt(config.run_dir, self.file.attempt) if given is None else Path(given).absolute()
        try:
            write_scheduler_file(path, self.file)
        except OSError as error:
            if given is None:
                raise
            raise ConfigError(_FILE_KEY, f"given {given!r}; it cannot be written: {error}. {_OWN_FILE}") from error
        stack.callback(remove_scheduler_file, path, self.file.nonce)
        return path

    def __enter__(self) -> AttachedWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def listening_address(interface: str | None, host: str | None) -> str:
    """The address of this host that a scheduler listens on. Raises ConfigError where that is none of it."""
    if interface is not None:
        address = interface_address(interface)
        if address is None:
            need = f"host {host_name()} has no such interface with an address; it has {', '.join(interfaces())}"
            raise ConfigError("cluster.interface", f"given {interface!r}; {need}")
        return address
    if host is None:
        return str(get_ip())
    try:
        found = str(socket.getaddrinfo(host, None)[0][4][0])
        with socket.socket(family_of(found)) as probe:
            probe.bind((found, 0))
    except OSError as error:
        need = f"is no address of this host ({error}): a name or an address that workers reach it by"
        raise ConfigError("cluster.host", f"given {host!r}; {need}") from error
    return found


def _check_port(host: str, port: int) -> None:
    """Dask would say it in a traceback."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            need = f"cannot listen there on host {host_name()} ({host}): {error.strerror}. Another, or 0 for any"
            raise ConfigError("cluster.port", f"given {port}; {need}") from error


def make_way(given: str) -> None:
    """Removes what a driver that is gone left under the scheduler file's name. Raises ConfigError where another driver
    is there, or no such file can be written."""
    path = Path(given).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise StoreError(f"{path.parent} cannot be written")
        left = read_scheduler_file(path)
        if driver_answers(left):
            who = f"process {left.process} on host {left.host}"
            raise StoreError(f"the driver of {left.run_dir} has it ({who})")
        remove_scheduler_file(path, left.nonce)
    except FileNotFoundError:
        return
    except (OSError, StoreError) as error:
        raise ConfigError(_FILE_KEY, f"given {given!r}; {error}. {_OWN_FILE}") from error


def begin_attempt(run_dir: Path) -> int:
    """Counts an attempt at a run, and removes what earlier ones left, whose drivers are gone, before anybody listens: a
    worker must not ask this attempt's driver with the certificate of the last. Raises OSError and StoreError."""
    folder = RunPaths(run_dir.resolve()).attached
    private_directory(folder)
    attempt = 1 + max(newest_attempt(run_dir), _counted(folder / _ATTEMPTS))
    files.write(files.open_root(str(folder)), _ATTEMPTS, str(attempt).encode())
    for left in folder.iterdir():
        if left.name != _ATTEMPTS:
            left.unlink(missing_ok=True)
    return attempt


def _counted(attempts: Path) -> int:
    """What is written there; 0 for what was cut off on a full disk: the newest scheduler file counts, too, and a number
    that comes twice only names a file."""
    try:
        return int(attempts.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _new_file(config: RunConfig, attempt: int, address: str, security: Security) -> SchedulerFile:
    """What workers of this attempt are told."""
    run_dir = config.run_dir.resolve()
    certificate = security.get_tls_config_for_role("scheduler")
    return SchedulerFile(
        attempt=attempt,
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

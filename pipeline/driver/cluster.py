"""The cluster of a run as its driver sees it: workers that are there or come, and how they are ended. Two owners make
one: `local_workers` starts the processes itself, `attached_workers` waits for those that `stageline worker` starts on
any host.

    local                                            attached
    driver: scheduler, nannies                       driver: scheduler, bound to an interface
              │ fork                                           ▲ TLS, with the certificate of the scheduler file
              ▼                                                │
            worker processes, on 127.0.0.1                   host: `stageline worker`: a nanny ──fork──► worker process

Whoever can talk to a scheduler or worker of Dask's can have it run anything, and every user of a host can connect to
its ports. So all of them speak TLS, and answer only who shows the run's own certificate: it is made when the driver
begins, lives in the memory of these processes (and, of an attached run, in its scheduler file, of mode 0600 in a folder
of mode 0700) and ends with them.

May import distributed and pipeline.config.{errors, run}.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from distributed import Client, Scheduler, scheduler
from distributed.protocol.pickle import dumps
from distributed.security import Security

from pipeline.config.errors import ConfigError
from pipeline.config.run import RunConfig

_KILL_S = 5.0
"""Of the driver's time, for processes to be killed: a host that is gone answers nobody."""


class Cluster(Protocol):
    """Owns a run's scheduler and the client connected to it, and the workers as far as this process starts them."""

    @property
    def client(self) -> Client: ...

    @property
    def dashboard(self) -> str | None:
        """Address of the Dask dashboard, where there is one."""
        ...

    @property
    def scheduler(self) -> Scheduler:
        """Which runs in this process, in a thread of its own."""
        ...

    def close(self) -> None:
        """Ends every worker at once, in the middle of whatever it does: what counts is committed, and a stage that
        hangs must not hold up the end of the run."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def scheduler_extensions() -> dict[str, Any]:
    """Dask's, less those that are of no use here. Spans are kept for ever, and one begins whenever nothing is running:
    6 KB each in the scheduler, and counters for each in every worker, two a step."""
    return {name: kind for name, kind in scheduler.DEFAULT_EXTENSIONS.items() if name not in ("spans", "stealing")}


def scheduler_spec(config: RunConfig, security: Security, host: str, port: int = 0) -> dict[str, Any]:
    """A run's scheduler, for Dask's `SpecCluster`, in this process and listening there. `port` 0: any."""
    return {
        "cls": Scheduler,
        "options": {
            "host": host,
            "port": port,
            "protocol": "tls://",
            "security": security,
            "dashboard_address": free_address(config.cluster.dashboard),
            "dashboard": config.cluster.dashboard is not None,
            "extensions": scheduler_extensions(),
        },
    }


def free_address(wanted: str | None) -> str:
    """The dashboard's address, with any port where that one is taken (Dask would warn), or is the system's. Raises
    ConfigError where the host is none of this one's."""
    host, _, port = (wanted or "127.0.0.1:0").rpartition(":")
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                need = f"{host} is no address of this host ({error}): 127.0.0.1, or 0.0.0.0 for all that it has"
                raise ConfigError("cluster.dashboard", f"given {wanted!r}; {need}") from error
            return f"{host}:0"
    return f"{host}:{port}"


def dashboard_link(link: str, wanted: str) -> str:
    """The dashboard's address, as a URL. `link`: Dask's, which names the scheduler's host wherever the dashboard
    listens; `wanted`: where that is."""
    host, parts = wanted.rpartition(":")[0], urlsplit(link)
    return link if host in ("", "0.0.0.0", "[::]") else parts._replace(netloc=f"{host}:{parts.port}").geturl()


def kill_workers(client: Client, addresses: Iterable[str]) -> None:
    """Ends processes, whatever state they are in (also stopped, also stuck in a collective), and waits until the
    scheduler has seen it, lest it send them work; their nannies start new ones. Unknown addresses are passed over:
    those have ended. One that the scheduler still believes in after `_KILL_S` (its host is gone) gets no work any
    more."""
    client.run_on_scheduler(_kill_and_wait, sorted(addresses))


async def _kill_and_wait(addresses: list[str], dask_scheduler: Any) -> None:
    """Runs in the scheduler, whose list of workers cannot change between a look and the message."""
    here = [address for address in addresses if address in dask_scheduler.workers]
    message = {"op": "run", "function": dumps(_kill_process), "args": dumps(()), "kwargs": dumps({}), "wait": True}
    with suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            if here:
                await dask_scheduler.broadcast(msg=message, workers=here, nanny=True, on_error="ignore")
            while any(address in dask_scheduler.workers for address in here):
                await asyncio.sleep(0.01)
    for address in here:
        if address in dask_scheduler.workers:
            # Every task names a resource. Removing the worker would have it end for good, with its nanny, if it is
            # there after all; so it can be killed later, and come back.
            for resource in dask_scheduler.workers[address].resources:
                dask_scheduler.resources[resource][address] = 0


def workers_by_address(client: Client) -> dict[str, str]:
    """Names of the worker processes that the scheduler knows, by their addresses."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {address: str(info["name"]) for address, info in workers.items()}


def heartbeats(client: Client) -> dict[str, float]:
    """When each worker process that the scheduler knows last said that it lives, by name and the scheduler's clock."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {str(info["name"]): float(info["last_seen"]) for info in workers.values()}


def _kill_process(dask_worker: Any) -> None:
    if dask_worker.pid is not None:
        os.kill(dask_worker.pid, signal.SIGKILL)

"""The Dask cluster of a run, as its driver sees it. `LocalWorkers` starts the worker processes itself;
`attached_workers.AttachedWorkers` waits for workers that `stageline worker` starts on any host.

    local                                            attached
    driver: scheduler, nannies                       driver: scheduler, bound to an interface
              │ fork                                           ▲ TLS, with the certificate of the scheduler file
              ▼                                                │
            worker processes, on 127.0.0.1                   host: `stageline worker`: a nanny ──fork──► worker process

Anyone who can talk to a Dask scheduler or worker can make it run any code, and every user of a host can connect to its
ports. So the scheduler and all workers use TLS and accept only the run's own certificate. The driver makes this
certificate when it starts. The certificate exists only in the memory of these processes and, in an attached run, in the
scheduler file (mode 0600, in a folder of mode 0700).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, Nanny, Scheduler, SpecCluster, scheduler
from distributed.protocol.pickle import dumps
from distributed.security import Security

from pipeline.config.devices import THIS_HOST, Worker, place_all_here, plan_devices, visible_devices
from pipeline.config.fitting import descriptors_needed, raise_descriptor_limit
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.workers.messages import worker_name
from pipeline.workers.worker_process import dask_settings, nanny_options, shares_cores, start_forkserver
from storage.files import Closing
from storage.host import loopback_only

_KILL_S = 5.0
"""Longest time that the driver waits for processes to be killed. A host that is gone never answers."""


def scheduler_extensions() -> dict[str, Any]:
    """Return Dask's scheduler extensions without `stealing` and `spans`, which we do not use. Dask never deletes a
    span, and begins one whenever nothing is running. A step would leave two spans, each with 6 KB in the scheduler and
    counters in every worker."""
    return {name: kind for name, kind in scheduler.DEFAULT_EXTENSIONS.items() if name not in ("spans", "stealing")}


def scheduler_spec(config: RunConfig, security: Security, host: str, port: int) -> dict[str, Any]:
    """Return the spec of a scheduler in this process, for Dask's `SpecCluster`. `port` 0: any free port."""
    return {
        "cls": Scheduler,
        "options": {
            "host": host,
            "port": port,
            "protocol": "tls://",
            "security": security,
            "dashboard_address": dashboard_address(config.cluster.dashboard),
            "dashboard": config.cluster.dashboard is not None,
            "extensions": scheduler_extensions(),
        },
    }


def dashboard_address(address: str | None) -> str:
    """Return the address, HOST:PORT, on which the dashboard will listen. `address` None: any free port of 127.0.0.1. If
    the given port is taken (Dask would warn about that) or reserved for the system, the returned port is 0 (any free
    port). Raises ConfigError if the address does not belong to this host."""
    host, _, port = (address or "127.0.0.1:0").rpartition(":")
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                need = f"{host} is no address of this host ({error}): 127.0.0.1, or 0.0.0.0 for all that it has"
                raise ConfigError("cluster.dashboard", f"given {address!r}; {need}") from error
            return f"{host}:0"
    return f"{host}:{port}"


def dashboard_link(link: str, address: str) -> str:
    """Return the dashboard's URL. `link`: Dask's URL, which always names the scheduler's host. `address`: the address
    that the dashboard listens on."""
    host, parts = address.rpartition(":")[0], urlsplit(link)
    return link if host in ("", "0.0.0.0", "[::]") else parts._replace(netloc=f"{host}:{parts.port}").geturl()


def kill_workers(client: Client, addresses: Iterable[str]) -> None:
    """Kill the worker processes at these addresses, even if they are stopped or stuck in a collective. Their nannies
    start new processes. Wait until the scheduler has noticed, so that it sends no work to the dead processes. Unknown
    addresses are ignored, since their processes have ended. If the scheduler still lists a process after `_KILL_S`, for
    example because its host is gone, the process gets no work any more."""
    client.run_on_scheduler(_kill_and_wait, sorted(addresses))


async def _kill_and_wait(addresses: list[str], dask_scheduler: Any) -> None:
    """Do the work of `kill_workers` inside the scheduler's process. There the list of workers cannot change between
    finding the addresses that are still in it and sending them the kill message."""
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
            # Every task needs a resource, so a worker without resources gets no tasks. Removing the worker instead
            # would end it for good, with its nanny, if it is alive after all. Without resources it can be killed later,
            # and its nanny restarts it.
            for resource in dask_scheduler.workers[address].resources:
                dask_scheduler.resources[resource][address] = 0


def workers_by_address(client: Client) -> dict[str, str]:
    """Return address -> name of each worker process that the scheduler knows."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {address: str(info["name"]) for address, info in workers.items()}


def last_heartbeats(client: Client) -> dict[str, float]:
    """Return worker name -> time of the last heartbeat of its process, in seconds of the scheduler's clock."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {str(info["name"]): float(info["last_seen"]) for info in workers.values()}


def _kill_process(dask_worker: Any) -> None:
    if dask_worker.pid is not None:
        os.kill(dask_worker.pid, signal.SIGKILL)


def begin_forkserver(config: RunConfig) -> None:
    """Start the process that local workers are forked from, unless it is running. First raise this process's limit of
    open files, because the workers inherit it."""
    raise_descriptor_limit(descriptors_needed(config))
    start_forkserver(shared=shares_cores(config))


class Cluster(Closing):
    """Owns a run's scheduler, the client connected to it, and the workers that this process starts."""

    def __init__(
        self, config: RunConfig, security: Security, host: str, port: int = 0, workers: dict[str, Any] | None = None
    ) -> None:
        """`host`, `port`: the scheduler's address; port 0: any free port. `workers`: Dask's specs of the workers."""
        # This level stays until the process ends: Dask's threads still log after the close. The journal reports losses.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        self._dashboard = config.cluster.dashboard
        of_scheduler = scheduler_spec(config, security, host, port)
        with ExitStack() as stack:  # closes what was opened if a later part fails
            stack.enter_context(dask_settings())
            if workers:
                begin_forkserver(config)
            else:
                raise_descriptor_limit(descriptors_needed(config))
            self._cluster = SpecCluster(
                workers=workers or {}, scheduler=of_scheduler, security=security, silence_logs=logging.CRITICAL
            )
            stack.callback(self._close_cluster)
            self.client = stack.enter_context(Client(self._cluster))
            self._stack = stack.pop_all()

    @property
    def dashboard(self) -> str | None:
        """Address of the Dask dashboard; None if there is none."""
        return None if self._dashboard is None else dashboard_link(self.client.dashboard_link, self._dashboard)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which runs in this process, in its own thread."""
        scheduler: Scheduler = self._cluster.scheduler
        return scheduler

    def close(self) -> None:
        """End every worker at once, whatever it is doing. All results that count are committed, and a hung stage must
        not delay the end of the run."""
        self._stack.close()

    def _close_cluster(self) -> None:
        for nanny in self._cluster.workers.values():
            nanny.close_gracefully()  # from here on the nanny does not restart its process
            if nanny.pid is not None:
                os.kill(nanny.pid, signal.SIGKILL)
        self._cluster.close()


def visible_gpus_of_workers(config: RunConfig, num_gpus: int, inherited: str | None) -> dict[Worker, str]:
    """Return `CUDA_VISIBLE_DEVICES` for each worker of a run whose workers are all on this host. `inherited`: the
    variable's value in this process."""
    gangs, sharing = config.gangs(), config.placement.device_sharing
    plan = plan_devices(gangs, place_all_here(gangs), {THIS_HOST: num_gpus}, sharing)
    return {worker: visible_devices(gpus, inherited) for worker, gpus in plan.items()}


class LocalWorkers(Cluster):
    """A cluster whose worker processes are all on this host.

    Each rank or replica is one Dask worker, under a nanny that starts it again when it dies. Everything listens on
    127.0.0.1.

        driver ──► forkserver (imports torch; terminal signals blocked) ─fork──► worker processes
          └ threads: scheduler, nannies
    """

    def __init__(self, config: RunConfig, num_gpus: int = 0) -> None:
        """`num_gpus`: number of this host's GPUs to divide among the workers."""
        shown = visible_gpus_of_workers(config, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        security = Security.temporary()
        specs: dict[str, Any] = {}
        for gang in config.gangs():
            for index in range(gang.workers):
                gpus = shown[gang.name, index] if num_gpus else None
                options = nanny_options(config, gang, index, security, shared=shares_cores(config), gpus=gpus)
                options["env"] |= loopback_only()
                specs[worker_name(gang.name, index)] = {"cls": Nanny, "options": {"host": "127.0.0.1", **options}}
        super().__init__(config, security, "127.0.0.1", workers=specs)

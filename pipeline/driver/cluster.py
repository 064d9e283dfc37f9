"""Worker processes: one Dask worker per rank or replica, each under a nanny that starts it again when it dies.

    driver ──► forkserver (distributed imported; SIGINT blocked) ──fork──► worker processes
      └ threads: scheduler, nannies

Whoever can talk to a scheduler or worker of Dask's can have it run anything, and every user of a host can connect to
its loopback ports. So all of them speak TLS, and answer only who shows the run's own certificate: it is made when the
run begins, lives in the memory of these processes (and, while one reads it, in a file of mode 0600 in a folder of mode
0700) and ends with them.

May import dask and distributed, pipeline.config, pipeline.graph, pipeline.workers.messages and storage.processes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster, scheduler, worker
from distributed.protocol.pickle import dumps
from distributed.security import Security
from distributed.utils import get_mp_context

from pipeline.config.devices import THIS_HOST, all_here, plan_devices, visible_devices
from pipeline.config.run import RunConfig
from pipeline.graph.dispatch import Gang
from pipeline.workers.messages import pin_resource, slot_resource, worker_name
from stages.models.protocol import Role
from storage.processes import process_alive

_DASK_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.work-stealing": False,
    # A death fails what ran there at once: the driver decides what is lost, Dask must not run a collective again alone.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": None,  # long native calls hold the GIL; `cluster.deadline_s` is our own
    # Whoever is not registered so long after a death is closed for good, also if that was another, later death.
    "distributed.deploy.lost-worker-timeout": "1000 days",
    "distributed.worker.daemon": False,
    # Processes fork from a clean one that has imported distributed (not torch): they start in a tenth of the time.
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.connect": "60s",
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.low-level-log-length": 100,  # of each of many logs that hold on to whole messages
    "distributed.nanny.pre-spawn-environ": {},  # it would be set in the driver itself; see _FORKSERVER_ENVIRONMENT
}


def _malloc_thresholds() -> tuple[int, int]:
    """Bytes of an allocation from which glibc maps pages for it alone, and of free memory at the heap's end from which
    it gives pages back. Both are as high as can be, for a step allocates and frees the same large buffers (activations,
    gradients, logits) again and again: a page that was given back is faulted in and zeroed anew, which took a quarter
    of a training step. Setting either switches off glibc's own adaptation of both (which stops at 32 MiB), so that both
    are needed. The cost: what a process has freed stays with it, its resident memory is its peak.

    glibc 2.36 is measured to take 1 GiB and 1 TiB; older ones may refuse more than 32 MiB and stay at 128 KiB."""
    libc, version = platform.libc_ver()
    current = libc == "glibc" and tuple(int(part) for part in version.split(".")[:2]) >= (2, 36)
    return (1 << 30, 1 << 40) if current else (1 << 25, 1 << 25)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = _malloc_thresholds()
_FORKSERVER_ENVIRONMENT = {
    # Dask runs tasks in threads of their own, whose heaps glibc limits to 64 MiB each: what is larger, or does not fit,
    # would be mapped and unmapped every time
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD),
    "OPENBLAS_NUM_THREADS": "1",  # numpy's, which is loaded before the fork; torch has `placement.gangs.*.threads`
    "DASK_LOGGING__DISTRIBUTED": "warning",
}
_KILL_S = 5.0
"""Of the driver's time, for processes to be killed: a host that is gone answers nobody."""
_SCRATCH = "stageline-dask-"
"""Begins the name of a driver's directory in the temporary folder; its process id follows."""
_ANY = 1_000_000.0
"""Capacity of a pin that limits nothing: threads do."""


def _scheduler_extensions() -> dict[str, Any]:
    """Dask's, less those that are of no use here. Spans are kept for ever, and one begins whenever nothing is running:
    6 KB each in the scheduler, and counters for each in every worker, two a step."""
    return {name: kind for name, kind in scheduler.DEFAULT_EXTENSIONS.items() if name not in ("spans", "stealing")}


def _worker_extensions() -> dict[str, Any]:
    return {name: kind for name, kind in worker.DEFAULT_EXTENSIONS.items() if name != "spans"}


def worker_environment(threads: int, shared: bool, gpus: str | None = None) -> dict[str, str]:
    """Environment of a worker's process. Processes that share cores must not spin while they wait (5-17x slower).
    `gpus`: `CUDA_VISIBLE_DEVICES`, so that whatever runs in the process finds its own devices alone, from 0 on; None:
    as this process has it."""
    return {
        **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE" if shared else "ACTIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            p for p in (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")) if p
        ),
    }


def worker_resources(gang: Gang, index: int, waiting: int = 0) -> dict[str, float]:
    """Dask resources of one worker: slots, and a pin for what needs no slot. `waiting`: shards that have no slot any
    more, and wait for rows in other replicas."""
    return {
        slot_resource(gang.name, index): 1.0 if gang.ordered else float(gang.slots + waiting),
        pin_resource(gang.name, index): _ANY,
    }


def worker_threads(gang: Gang, waiting: int = 0) -> int:
    """Tasks a worker runs at once: one in an ordered gang; a replica's slots, those that `waiting` says, and one more
    where it also scores."""
    if gang.ordered:
        return 1
    return gang.slots + waiting + (1 if Role.GENERATE in gang.roles and gang.roles != {Role.GENERATE} else 0)


def _processes(config: RunConfig, gang: Gang) -> int:
    """That do maths in each worker: its own, and those that an engine starts (they inherit its environment)."""
    return config.replica_ranks if Role.GENERATE in gang.roles else 1


class LocalWorkers:
    """Owns the scheduler and all worker processes of a run on this machine, and the client connected to them."""

    def __init__(self, config: RunConfig, num_gpus: int = 0) -> None:
        """`num_gpus`: those of this host that the workers divide among them."""
        # For the whole process, and for good: the journal reports what dies, and Dask's threads talk after they closed.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        gangs = config.gangs()
        shared = sum(config.placement.gangs[g.name].threads * g.workers * _processes(config, g) for g in gangs) > 1
        plan = plan_devices(gangs, config.replica_ranks, all_here(gangs), {THIS_HOST: num_gpus})
        inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
        security = Security.temporary()
        encrypted = {"host": "127.0.0.1", "protocol": "tls://", "security": security}
        specs: dict[str, Any] = {}
        for gang in gangs:
            waiting = gang.slots if config.cluster.move_rows_below and Role.GENERATE in gang.roles else 0
            for index in range(gang.workers):
                gpus = visible_devices(plan[gang.name, index], inherited) if num_gpus else None
                specs[worker_name(gang.name, index)] = {
                    "cls": Nanny,
                    "options": {
                        **encrypted,
                        "nthreads": worker_threads(gang, waiting),
                        "resources": worker_resources(gang, index, waiting),
                        "memory_limit": 0,
                        "extensions": _worker_extensions(),
                        "env": worker_environment(config.placement.gangs[gang.name].threads, shared, gpus),
                    },
                }
        of_scheduler = {
            "cls": Scheduler,
            "options": {
                **encrypted,
                "dashboard_address": _free_address(config.cluster.dashboard),
                "dashboard": config.cluster.dashboard is not None,
                "extensions": _scheduler_extensions(),
            },
        }
        with ExitStack() as stack:  # what is open is closed again if the rest cannot be opened
            remove_abandoned_scratch(Path(tempfile.gettempdir()))
            prefix = f"{_SCRATCH}{os.getpid()}-"
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
            stack.enter_context(dask.config.set({**_DASK_SETTINGS, "temporary-directory": scratch}))
            _start_forkserver()
            self._cluster = SpecCluster(
                workers=specs, scheduler=of_scheduler, security=security, silence_logs=logging.CRITICAL
            )
            stack.callback(self._close_cluster)
            self._has_dashboard = config.cluster.dashboard is not None
            self.client = stack.enter_context(Client(self._cluster))
            self._stack = stack.pop_all()

    @property
    def dashboard(self) -> str | None:
        """Address of the Dask dashboard, where there is one."""
        return self.client.dashboard_link if self._has_dashboard else None

    @property
    def scheduler(self) -> Scheduler:
        """Which runs in this process, in a thread of its own."""
        return self._cluster.scheduler

    def close(self) -> None:
        """Ends every process at once, in the middle of whatever it does: what counts is committed, and a stage that
        hangs must not hold up the end of the run."""
        self._stack.close()

    def _close_cluster(self) -> None:
        for nanny in self._cluster.workers.values():
            nanny.close_gracefully()  # from here on an ended process is not started again
            if nanny.pid is not None:
                os.kill(nanny.pid, signal.SIGKILL)
        self._cluster.close()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def remove_abandoned_scratch(folder: Path) -> None:
    """Removes what drivers of this user that were killed have left of Dask's in the temporary folder."""
    for path in folder.glob(f"{_SCRATCH}*-*"):
        owner = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if owner.isdigit() and not process_alive(int(owner)) and path.lstat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def _start_forkserver() -> None:
    """Starts the process that all workers are forked from, unless this one has it already. It has SIGINT blocked, and
    so have they: Ctrl-C reaches the whole terminal, but it is the driver that must end the run."""
    before = {name: os.environ.get(name) for name in _FORKSERVER_ENVIRONMENT}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.environ.update(_FORKSERVER_ENVIRONMENT)
        get_mp_context()  # tells the server what to import
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _free_address(wanted: str | None) -> str:
    """The dashboard's address, with any port where that one is taken (Dask would warn)."""
    host, _, port = (wanted or "127.0.0.1:0").rpartition(":")
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port)))
        except OSError:
            return f"{host}:0"
    return f"{host}:{port}"


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


def _kill_process(dask_worker: Any) -> None:
    if dask_worker.pid is not None:
        os.kill(dask_worker.pid, signal.SIGKILL)

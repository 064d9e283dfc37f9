"""Worker processes: one Dask worker per rank or replica, each under a nanny that starts it again when it dies.

May import dask and distributed.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from pipeline.calls import pin_resource, slot_resource, worker_name
from pipeline.config import RunConfig
from pipeline.dispatch import Gang
from stages.models.protocol import Role

_DASK_SETTINGS = {
    "distributed.scheduler.work-stealing": False,
    # A death fails what ran there at once: the driver decides what is lost, Dask must not run a collective again alone.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": None,  # long native calls hold the GIL; `cluster.deadline_s` is our own
    "distributed.worker.daemon": False,
    "distributed.worker.multiprocessing-method": "spawn",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.connect": "60s",
    "distributed.admin.tick.limit": "60s",
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": "65536",
    "distributed.nanny.pre-spawn-environ.OMP_NUM_THREADS": None,  # each gang has its own, below
    "distributed.nanny.pre-spawn-environ.MKL_NUM_THREADS": None,
    "distributed.nanny.pre-spawn-environ.OPENBLAS_NUM_THREADS": None,
}
_ANY = 1_000_000.0
"""Capacity of a pin that limits nothing: threads do."""


def worker_environment(threads: int, shared: bool) -> dict[str, str]:
    """Environment of a worker's process. Processes that share cores must not spin while they wait (5-17x slower)."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE" if shared else "ACTIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            p for p in (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")) if p
        ),
    }


def worker_resources(gang: Gang, index: int) -> dict[str, float]:
    """Dask resources of one worker: slots, and a pin for what needs no slot."""
    return {
        slot_resource(gang.name, index): 1.0 if gang.ordered else float(gang.slots),
        pin_resource(gang.name, index): _ANY,
    }


def worker_threads(gang: Gang) -> int:
    """Tasks a worker runs at once: one in an ordered gang; a replica's slots, and one more where it also scores."""
    if gang.ordered:
        return 1
    return gang.slots + (1 if Role.GENERATE in gang.roles and gang.roles != {Role.GENERATE} else 0)


class LocalWorkers:
    """Owns the scheduler and all worker processes of a run on this machine, and the client connected to them."""

    def __init__(self, config: RunConfig) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="stageline-")
        self._dask_config = dask.config.set({**_DASK_SETTINGS, "temporary-directory": self._scratch.name})
        self._dask_config.__enter__()
        gangs = config.gangs()
        shared = sum(config.placement.gangs[g.name].threads * g.workers for g in gangs) > 1
        specs: dict[str, Any] = {}
        for gang in gangs:
            for index in range(gang.workers):
                specs[worker_name(gang.name, index)] = {
                    "cls": Nanny,
                    "options": {
                        "nthreads": worker_threads(gang),
                        "host": "127.0.0.1",
                        "resources": worker_resources(gang, index),
                        "memory_limit": 0,
                        "env": worker_environment(config.placement.gangs[gang.name].threads, shared),
                    },
                }
        scheduler = {
            "cls": Scheduler,
            "options": {
                "host": "127.0.0.1",
                "dashboard_address": config.cluster.dashboard,
                "dashboard": config.cluster.dashboard is not None,
            },
        }
        self._cluster = SpecCluster(workers=specs, scheduler=scheduler, silence_logs=logging.CRITICAL)
        self.client = Client(self._cluster)

    @property
    def dashboard(self) -> str | None:
        """Address of the Dask dashboard, where there is one."""
        return self.client.dashboard_link if "dashboard" in self._cluster.scheduler.services else None

    def close(self) -> None:
        self.client.close()
        self._cluster.close()
        self._dask_config.__exit__(None, None, None)
        self._scratch.cleanup()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def kill_worker(client: Client, name: str) -> None:
    """Ends a worker's process, whatever state it is in (also stopped, also stuck in a collective); its nanny starts a
    new one. Nothing happens if the scheduler does not know it: then it is already being replaced."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    addresses = [address for address, info in workers.items() if info["name"] == name]
    if addresses:
        client.run(_kill_process, workers=addresses, nanny=True, on_error="ignore")


def _kill_process(dask_worker: Any) -> None:
    if dask_worker.pid is not None:
        os.kill(dask_worker.pid, signal.SIGKILL)

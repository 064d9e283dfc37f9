"""Worker processes on the driver's own host: one Dask worker per rank or replica, each under a nanny that starts it
again when it dies.

    driver ──► forkserver (distributed imported; SIGINT blocked) ──fork──► worker processes
      └ threads: scheduler, nannies

Everything listens on 127.0.0.1. May import dask and distributed, pipeline.config, pipeline.driver.cluster and
pipeline.workers.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from distributed import Client, Nanny, Scheduler, SpecCluster
from distributed.security import Security

from pipeline.config.devices import THIS_HOST, all_here, plan_devices, visible_devices
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import scheduler_spec
from pipeline.workers.messages import worker_name
from pipeline.workers.worker_process import (
    dask_settings,
    nanny_options,
    shares_cores,
    start_forkserver,
)


class LocalWorkers:
    """Owns the scheduler and all worker processes of a run on this machine, and the client connected to them."""

    def __init__(self, config: RunConfig, num_gpus: int = 0) -> None:
        """`num_gpus`: those of this host that the workers divide among them."""
        # For the whole process, and for good: the journal reports what dies, and Dask's threads talk after they closed.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        gangs = config.gangs()
        plan = plan_devices(gangs, config.replica_ranks, all_here(gangs), {THIS_HOST: num_gpus})
        inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
        security = Security.temporary()
        specs: dict[str, Any] = {}
        for gang in gangs:
            for index in range(gang.workers):
                gpus = visible_devices(plan[gang.name, index], inherited) if num_gpus else None
                options = nanny_options(config, gang, index, security, shared=shares_cores(config), gpus=gpus)
                specs[worker_name(gang.name, index)] = {"cls": Nanny, "options": {"host": "127.0.0.1", **options}}
        of_scheduler = scheduler_spec(config, security, "127.0.0.1")
        with ExitStack() as stack:  # what is open is closed again if the rest cannot be opened
            stack.enter_context(dask_settings())
            start_forkserver()
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
        found: Scheduler = self._cluster.scheduler
        return found

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

"""What a worker that joins over a network listens on there: Dask's own port, which asks for the run's certificate, and
no page. Dask would serve metrics in plain HTTP on the same address."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path

import psutil
import pytest
from distributed import Nanny, Scheduler
from distributed.security import Security

from pipeline.workers.worker_process import dask_settings, nanny_options
from tests.support.runs import configure

pytestmark = pytest.mark.processes

CLUSTER = "127.0.0.2"
"""Stands for the address of the cluster's interface: Linux routes all of 127.0.0.0/8 to this host."""


def page_at(address: str, port: int) -> int | None:
    """Return the status of `/metrics` in plain HTTP; None where nobody speaks it."""
    connection = http.client.HTTPConnection(address, port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()


async def listening(config_folder: Path) -> dict[str, list[int | None]]:
    """Return what each port of a worker and its nanny answers to who asks for `/metrics`, by address."""
    config = configure(config_folder, "ports")
    [gang, *_] = config.gangs()
    security = Security.temporary()
    options = nanny_options(config, gang, 0, security, shared=True, gpus=None)
    at = {"host": CLUSTER, "protocol": "tls://", "security": security}
    async with (
        Scheduler(dashboard_address="127.0.0.1:0", dashboard=False, **at) as scheduler,
        Nanny(scheduler.address, **{**options, "host": CLUSTER}) as nanny,
    ):
        worker = psutil.Process(nanny.pid)
        found: dict[str, list[int | None]] = {}
        for process in (worker, psutil.Process()):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port != scheduler.http_server.port:
                    status = await asyncio.to_thread(page_at, one.laddr.ip, one.laddr.port)
                    found.setdefault(one.laddr.ip, []).append(status)
        return found


def test_a_worker_shows_no_page_to_the_cluster(tmp_path: Path) -> None:
    with dask_settings():
        found = asyncio.run(listening(tmp_path))
    assert found == {CLUSTER: [None, None, None], "127.0.0.1": [404]}, (
        "worker, nanny, scheduler; and HTTP without pages"
    )

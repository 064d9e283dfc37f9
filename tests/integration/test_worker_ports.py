"""A worker that joins over a network listens there on Dask's own port alone, which asks for the run's certificate. Dask
would serve metrics in plain HTTP on the same address. And a worker whose nanny still starts it can be ended."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from distributed import Nanny, Scheduler
from distributed.security import Security

from pipeline.workers import attached
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


@asynccontextmanager
async def scheduler_and_nanny(config_folder: Path) -> AsyncIterator[tuple[Scheduler, Nanny]]:
    """Yield a scheduler, and the nanny of a worker, which has not been started."""
    config = configure(config_folder, "ports")
    [gang, *_] = config.gangs()
    security = Security.temporary()
    options = nanny_options(config, gang, 0, security, shared=True, gpus=None)
    at = {"host": CLUSTER, "protocol": "tls://", "security": security}
    async with Scheduler(dashboard_address="127.0.0.1:0", dashboard=False, **at) as scheduler:
        yield scheduler, Nanny(scheduler.address, **{**options, "host": CLUSTER})


async def listening(config_folder: Path) -> dict[str, list[int | None]]:
    """Return what each port of a worker and its nanny answers to who asks for `/metrics`, by address."""
    async with scheduler_and_nanny(config_folder) as (scheduler, started), started as nanny:
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


async def ended_while_it_starts(config_folder: Path) -> psutil.Process:
    async with scheduler_and_nanny(config_folder) as (_, nanny):
        starting = asyncio.ensure_future(nanny.start())
        while nanny.pid is None:
            await asyncio.sleep(0.01)
        worker = psutil.Process(nanny.pid)
        await attached.kill_worker(nanny, starting)
        return worker


@pytest.mark.parametrize("ends_s", [attached._ENDS_S, 0.0], ids=["the start fails", "the start is cancelled"])
def test_a_worker_that_starts_can_be_ended(tmp_path: Path, ends_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the nanny may not notice in time that its process was killed."""
    monkeypatch.setattr(attached, "_ENDS_S", ends_s)
    with dask_settings():
        worker = asyncio.run(ended_while_it_starts(tmp_path))
    worker.wait(60)

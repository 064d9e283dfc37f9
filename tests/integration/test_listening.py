"""Local gangs and engines listen nowhere that another host could connect to: gloo authenticates nobody, and its
ranks unpickle what they receive."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import closing
from ipaddress import ip_address
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import torch.distributed as dist

from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.models import parallel
from stages.models.config import LayoutConfig
from stages.models.protocol import ALONE, Rank
from stages.models.spec import RANDOM_TINY
from tests.contracts.engine_contract import make_requests

pytestmark = pytest.mark.processes


def listening(process: psutil.Process) -> set[str]:
    """Addresses that a process takes connections at, by /proc/net/tcp and tcp6."""
    connections = process.net_connections(kind="tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def elsewhere() -> str | None:
    """An interface by which other hosts reach this one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and not ip_address(a.address).is_loopback for a in addresses):
            return name
    return None


def work(index: int, size: int, rendezvous: str, listening_at: socket.socket | None, driver: Connection) -> None:
    """A rank that, if nobody said otherwise, would listen on an address of the network, as on a host whose name
    resolves to one."""
    if (name := elsewhere()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    kept = None if listening_at is None else listening_at.detach()
    parallel.join(Rank(index, size, rendezvous, 1, listening=kept), LayoutConfig(tensor=size), 0)
    dist.barrier(dist.new_group(backend="gloo"))
    driver.send(listening(psutil.Process()))
    driver.recv()


@pytest.mark.parametrize("size", [1, 2])
def test_a_gang_on_one_host_listens_on_loopback_alone(size: int) -> None:
    """A gang of one rank is what `export` and `replay` use."""
    context = multiprocessing.get_context("forkserver")
    ends = [context.Pipe() for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        where = f"tcp://127.0.0.1:{rendezvous.getsockname()[1]}" if size > 1 else ALONE
        ranks = [
            context.Process(target=work, args=(i, size, where, None if i or size == 1 else rendezvous, theirs))
            for i, (_, theirs) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
    for _, theirs in ends:
        theirs.close()
    found = [ours.recv() for ours, _ in ends]
    for ours, _ in ends:
        ours.send("end")
    for rank in ranks:
        rank.join()
    assert found == [{"127.0.0.1"}] * size


def test_the_ranks_of_an_engine_listen_on_loopback_alone() -> None:
    before = set(psutil.Process().children())
    engine = build_embedded(
        RANDOM_TINY, EngineConfig(tensor_parallel=2), max_seq=64, threads=1, device=torch.device("cpu")
    )
    with closing(engine):
        list(engine.generate(make_requests(2)))
        processes = [psutil.Process(), *(set(psutil.Process().children()) - before)]
        assert len(processes) == 2
        assert set[str]().union(*map(listening, processes)) == {"127.0.0.1"}

"""A rank that hangs is named by the others, with the node that they wait in: real processes over gloo, of which one is
held by a pipe."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from pipeline.workers.worker_process import PRELOADED
from stages.models import parallel
from stages.models.config import LayoutConfig
from stages.models.protocol import Rank, RanksMissing

pytestmark = pytest.mark.processes

TIMEOUT_S = 6.0


def work(index: int, hangs: int, rendezvous: str, listening: socket.socket | None, driver: Connection) -> None:
    """A rank of three, tensor-parallel: all agree at one node, then one does not come to the next. Of the others the
    first waits in the gang's own group, the second in Megatron's."""
    kept = None if listening is None else listening.detach()
    rank = Rank(index, 3, rendezvous, 1, collective_timeout_s=TIMEOUT_S, listening=kept)
    gang = parallel.join(rank, LayoutConfig(tensor=3), 0)
    with gang.missing_ranks.collectives_of("logprob[3,1]"):
        dist.barrier()
    driver.send("came")
    driver.recv()  # one hangs here
    if index != hangs:
        first = index == min({0, 1, 2} - {hangs})
        group = dist.group.WORLD if first else parallel_state.get_tensor_model_parallel_group()
        try:
            with gang.missing_ranks.collectives_of("update_policy[3]"):
                dist.all_reduce(torch.ones(1), group=group)
        except RanksMissing as error:
            driver.send(pickle.dumps(error))
        else:
            driver.send("nothing was wrong")
    driver.recv()


@pytest.mark.parametrize(
    ("hangs", "stopped", "said"),
    [
        (2, False, "rank 2 (last seen at logprob[3,1]) of 3"),
        (0, False, "rank 0 (last seen at logprob[3,1]) of 3"),
        (0, True, "rank 0 (which keeps the gang's notes, and does not answer) of 3"),
    ],
)
def test_the_ranks_that_wait_name_the_node_and_the_rank_that_hangs(hangs: int, stopped: bool, said: str) -> None:
    """`stopped`: its whole process, not only the thread that works."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    ends = [context.Pipe() for _ in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        rendezvous = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        ranks = [
            context.Process(target=work, args=(i, hangs, rendezvous, None if i else listening, theirs))
            for i, (_, theirs) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
    waiting = [ours for i, (ours, _) in enumerate(ends) if i != hangs]
    for _, theirs in ends:
        theirs.close()
    assert [ours.recv() for ours, _ in ends] == ["came"] * 3
    if stopped:
        os.kill(int(ranks[hangs].pid or 0), signal.SIGSTOP)
    for driver in waiting:
        driver.send("go on")
    for driver in waiting:
        error = pickle.loads(driver.recv())  # as it travels to the driver
        assert isinstance(error, RanksMissing)
        assert (error.where, error.ranks) == ("update_policy[3]", (hangs,))
        assert said in str(error)
        assert "cluster.collective_timeout_s = 6" in str(error)
    for rank in ranks:
        rank.kill()
        rank.join()


def test_an_error_of_the_rank_itself_stays_what_it_is(tmp_path: Path) -> None:
    """Nobody is asked: its peers will not see a collective fail for minutes."""
    rank = Rank(0, 1, f"file://{tmp_path}/rendezvous", 1, collective_timeout_s=TIMEOUT_S)
    try:
        gang = parallel.join(rank, LayoutConfig(), 0)
        gang.missing_ranks._size = 2  # a peer that never answers
        with pytest.raises(RuntimeError, match="not enough memory"), gang.missing_ranks.collectives_of("value[0,0]"):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] not enough memory")
    finally:
        parallel.leave()

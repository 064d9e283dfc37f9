"""A gang's calls: the driver gives a call to rank 0, which passes it on to its peers, over Dask's connections between
the processes.

    driver ──task──► rank 0 ──call──► rank 1 … n: run it in the thread that runs tasks
           ◄─outcome─       ◄─outcome─
           ◄─────────── failure ──────    of a peer, at once: rank 0 may wait for it in a collective

So a node of a gang of hundreds of ranks costs the scheduler one task. Rank 0 is done when all are; of its peers'
outcomes it reports those that stand out.

May import distributed, pipeline.workers.{messages, reports} and stages.models.errors (which loads nothing).
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from distributed import Worker

from pipeline.workers.messages import FAILURES, Call, Outcome, RankFailure, WorkerLost, worker_name
from pipeline.workers.reports import failure_to_json

RUN = "stageline_run_call"
"""Name of the handler."""
_TOLERANCE_S = 0.1


class PeerFailed(RuntimeError):
    """What rank 0 raises where it did its own part, and a peer did not: the driver knows the peer's error already."""


def open_for_calls(worker: Worker, run: Callable[[Call], Outcome]) -> None:
    """From now on this process runs what its rank 0 passes on, one call after the other."""

    async def answer(call: bytes) -> dict[str, bytes]:
        sent: Call = pickle.loads(call)
        running = asyncio.get_running_loop().run_in_executor(worker.executors["default"], run, sent)
        await asyncio.wait([running])
        error = running.exception()
        if error is not None:
            traceback.print_exception(error)  # into its log, as Dask does with what a task raises
            _report(worker, sent, error)
            return {}
        return {"outcome": pickle.dumps(running.result())}

    worker.handlers[RUN] = answer


class PassedOn:
    """Owns the requests of one call to the gang's other ranks (none, where the gang has one), until `outcomes`."""

    def __init__(self, worker: Worker, call: Call) -> None:
        loop = worker.loop.asyncio_loop
        self._asked: list[Future[Outcome | None]] = [
            asyncio.run_coroutine_threadsafe(_ask(worker, address, peers_call(call, index)), loop)
            for index, address in enumerate(call.peers, 1)
        ]

    def outcomes(self) -> list[Outcome]:
        """Those of the peers, by rank, as soon as all are there. Raises PeerFailed where one is not."""
        found = [asked.result() for asked in self._asked]
        failed = [index for index, outcome in enumerate(found, 1) if outcome is None]
        if failed:
            raise PeerFailed(f"ranks {failed} did not do their part")
        return [outcome for outcome in found if outcome is not None]


def peers_call(call: Call, index: int) -> Call:
    """The call as it is for another rank."""
    return replace(call, worker=worker_name(call.gang, index), peers=())


async def _ask(worker: Worker, address: str, call: Call) -> Outcome | None:
    """What a peer made of a call; None where that is an error, which the driver knows then."""
    try:
        answer: dict[str, Any] = await getattr(worker.rpc(address), RUN)(call=pickle.dumps(call))
    except (OSError, AttributeError):  # the process is gone; or it has come back, and is not this rank yet
        _report(worker, call, WorkerLost(call.worker, call.incarnation))
        return None
    return pickle.loads(answer["outcome"]) if "outcome" in answer else None


def _report(worker: Worker, call: Call, error: BaseException) -> None:
    worker.log_event(FAILURES, failure_to_json(RankFailure.of(call, error)))


def outliers(first: Outcome, others: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Of the peers' outcomes those that have something to say: a warning, or a beginning or an end that is apart from
    rank 0's by more than a tenth of its seconds (and 0.1 s)."""
    tolerance_s = max(_TOLERANCE_S, 0.1 * (first.finished - first.started))
    return tuple(other for other in others if _stands_out(first, tolerance_s, other))


def _stands_out(first: Outcome, tolerance_s: float, other: Outcome) -> bool:
    differences = other.started - first.started, other.finished - first.finished
    return bool(other.warnings) or max(map(abs, differences)) > tolerance_s

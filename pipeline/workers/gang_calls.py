"""Calls of a gang: the driver sends a call to rank 0, which forwards it to the other ranks over Dask connections.

    driver ──task──► rank 0 ──call──► rank 1 … n: run it in the thread that runs tasks
           ◄─outcome─       ◄─outcome─
           ◄─────────── failure ──────    sent at once: rank 0 may wait for this rank in a collective

So the scheduler has one task per node, even for a gang of hundreds of ranks. Rank 0 ends when all ranks have ended. It
reports only the outcomes of other ranks that differ from its own.
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

from pipeline.workers.messages import REPORTS, Call, Outcome, RankFailure, WorkerLost, worker_name
from storage import codec

RUN = "stageline_run_call"
"""Name of the Dask handler."""
_TOLERANCE_S = 0.1


class PeerFailed(RuntimeError):
    """Another rank failed, and rank 0 did not. The driver already has the other rank's error."""


def open_for_calls(worker: Worker, run: Callable[[Call], Outcome]) -> None:
    """Let rank 0 run calls in this process, one after another."""

    async def answer(call: bytes) -> dict[str, str]:
        sent: Call = pickle.loads(call)
        running = asyncio.get_running_loop().run_in_executor(worker.executors["default"], run, sent)
        await asyncio.wait([running])
        error = running.exception()
        if error is not None:
            traceback.print_exception(error)  # into the log, as Dask does for tasks
            _report(worker, sent, error)
            return {}
        return {"outcome": codec.encode(running.result())}

    worker.handlers[RUN] = answer


class PassedOn:
    """One call's requests to the gang's other ranks, if there are any."""

    def __init__(self, worker: Worker, call: Call) -> None:
        loop = worker.loop.asyncio_loop
        self._asked: list[Future[Outcome | None]] = [
            asyncio.run_coroutine_threadsafe(_ask(worker, address, peers_call(call, index)), loop)
            for index, address in enumerate(call.peers, 1)
        ]

    def outcomes(self) -> list[Outcome]:
        """Wait for the other ranks and return their outcomes, by rank. Raises PeerFailed if a rank failed."""
        found = [asked.result() for asked in self._asked]
        failed = [index for index, outcome in enumerate(found, 1) if outcome is None]
        if failed:
            raise PeerFailed(f"ranks {failed} did not do their part")
        return [outcome for outcome in found if outcome is not None]


def peers_call(call: Call, index: int) -> Call:
    """Return the call for another rank."""
    return replace(call, worker=worker_name(call.gang, index), peers=())


async def _ask(worker: Worker, address: str, call: Call) -> Outcome | None:
    """Run the call on another rank and return its outcome; None if it failed, which is then reported to the driver."""
    try:
        answer: dict[str, Any] = await getattr(worker.rpc(address), RUN)(call=pickle.dumps(call))
    except (OSError, AttributeError):  # the process has died, or was restarted and is not built yet
        _report(worker, call, WorkerLost(call.worker, call.incarnation))
        return None
    return codec.decode(Outcome, answer["outcome"]) if "outcome" in answer else None


def _report(worker: Worker, call: Call, error: BaseException) -> None:
    worker.log_event(REPORTS, codec.encode(RankFailure.of(call, error)))


def outliers(first: Outcome, others: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes with a warning, and those that started or finished more than a tenth of rank 0's seconds (and
    0.1 s) apart from rank 0's."""
    tolerance_s = max(_TOLERANCE_S, 0.1 * (first.finished - first.started))
    return tuple(other for other in others if _stands_out(first, tolerance_s, other))


def _stands_out(first: Outcome, tolerance_s: float, other: Outcome) -> bool:
    differences = other.started - first.started, other.finished - first.finished
    return bool(other.warnings) or max(map(abs, differences)) > tolerance_s

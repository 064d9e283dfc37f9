"""Entry points in a Dask worker: turn the process into a rank or a replica, then run nodes.

The runtime is a module global, because a Dask task is a plain function and models outlive tasks. If a worker's
process dies, a new process takes its place and has no runtime yet. Calls to the new process raise WorkerLost, and the
driver builds the worker again.

The driver sends a gang's call to rank 0, which forwards it to the other ranks over Dask connections:

    driver ──task──► rank 0 ──call──► rank 1 … n: run it in the thread that runs tasks
           ◄─outcome─       ◄─outcome─
           ◄─────────── failure ──────    sent at once: rank 0 may wait for this rank in a collective

So the scheduler has one task per node, even for a gang of hundreds of ranks. Rank 0's task ends when all ranks have
done their part. It reports only those outcomes of other ranks that differ noticeably from its own
(`differing_outcomes`).
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import pickle
import socket
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distributed import Worker, get_worker
from distributed.comm import get_address_host

from pipeline.workers.messages import REPORTS, Built, Call, Outcome, RankFailure, WorkerLost, WorkerSpec, worker_name
from pipeline.workers.orders import accept_refit_orders, accept_sleep_orders
from pipeline.workers.row_migration import open_for_rows
from pipeline.workers.weight_transfer import Fetcher, WeightMirror
from storage import codec
from storage.address import Address, Ref
from storage.ledger import Ledger

if TYPE_CHECKING:  # this module imports torch, which the driver does not load
    from pipeline.workers.replica_rows import ReplicaRows


class Runtime:
    """The code that a worker process runs. `WorkerSpec.runtime` names the subclass. The constructor of the subclass
    takes the WorkerSpec. A subclass without an engine or models needs only `run`."""

    numerics: Mapping[str, str] = MappingProxyType({})
    """Name -> fact on which the last bits of the worker's results depend, such as the version of a library."""
    rows: ReplicaRows | None = None
    """The rows of a replica, if they may migrate to other replicas; otherwise None."""

    def run(self, call: Call) -> Outcome:
        """Return the outcome of a call. Run the call's node first, unless the node has a commit already."""
        raise NotImplementedError

    def connect(self, worker: Worker) -> None:
        """Exchange messages with the runtimes of other processes from now on. `worker`: this process's Dask worker."""

    def set_fetcher(self, fetcher: Fetcher) -> None:
        """Use `fetcher` from now on to get versions of the weights that this host lacks."""

    def load_in_flight(self, version: int) -> None:
        """Load a version of the weights for the rows in flight. Do nothing if no rows are in flight, or if the engine
        takes no new weights while rows are in flight. Raises StoreError or OSError if the version cannot be read."""

    def sleep(self) -> None:
        """Free the devices until the next call. Do nothing if they are free. Raises RuntimeError during a call."""

    def close(self) -> None:
        """End every process and thread that this runtime started."""


@dataclass(frozen=True)
class _Resident:
    spec: WorkerSpec
    runtime: Runtime
    mirror: WeightMirror | None = None
    begun_calls: OrderedDict[tuple[Address, str], None] = field(default_factory=OrderedDict)
    """Keys (address, attempt) of the latest calls that began in this process, at most `_MAX_REMEMBERED_CALLS`. They
    serve to recognise a call that Dask repeats. Dask repeats no older calls, because the driver limits how many tasks
    Dask remembers."""


_resident: _Resident | None = None
_listening: socket.socket | None = None
"""Socket that listens at the gang's rendezvous. Only rank 0's process has this socket, and only until rank 0 is
built."""
_MAX_RANKS = 4096
"""Maximum number of ranks that may wait at once until rank 0 accepts their connections."""
_MAX_REMEMBERED_CALLS = 16384
"""Number of calls that a worker remembers, to recognise a call that Dask repeats. Dask can repeat the calls of the last
8 steps (`attempts.MAX_LINEAGE`). Even with 256 shards per step, a worker gets fewer calls than this number in 8 steps.
"""


def open_rendezvous(spec: WorkerSpec) -> str:
    """Open the rendezvous of a gang in rank 0's process and return its address. The other ranks may connect at once.
    They are answered when rank 0 is built."""
    global _listening
    if _listening is not None:
        _listening.close()  # the socket of an incarnation that was not built
    host = get_address_host(get_worker().address)
    family, shown = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
    _listening = socket.create_server((host, 0), family=family, backlog=_MAX_RANKS)
    return f"tcp://{shown}:{_listening.getsockname()[1]}"


def build_worker(spec: WorkerSpec, rendezvous: str | None = None) -> Built:
    """Make this process the worker that `spec` describes, and close the worker that it was before. `rendezvous`:
    address where the ranks of the worker's gang find each other, if the gang has several ranks. Raises WorkerLost if
    this is rank 0 and another process opened the rendezvous."""
    global _resident, _listening
    if rendezvous is not None:
        spec = replace(spec, rendezvous=rendezvous)
    if rendezvous is not None and spec.index == 0:
        if _listening is None:
            raise WorkerLost(spec.name, spec.incarnation)  # another process opened the rendezvous
        spec = replace(spec, listening=_listening.detach())
        _listening = None
    if spec.log is not None:
        _write_to(Path(spec.log), f"---- {spec.name}, incarnation {spec.incarnation}, process {os.getpid()}")
    if _resident is not None:
        _resident.runtime.close()
        if _resident.mirror is not None:
            _resident.mirror.close()
        _resident = None
    mirror = WeightMirror(get_worker(), spec.mirror) if spec.mirror is not None else None
    if mirror is not None:
        mirror.open()  # before the models are loaded, because other hosts may wait for versions on this host's board
    module, _, name = spec.runtime.partition(":")
    runtime: Runtime = getattr(importlib.import_module(module), name)(spec)
    _resident = _Resident(spec, runtime, mirror)
    runtime.connect(get_worker())
    if runtime.rows is not None:
        open_for_rows(get_worker(), spec, runtime.rows)
    if spec.size > 1 and spec.index:
        open_for_calls(get_worker(), run_node)
    accept_sleep_orders(get_worker(), spec, runtime.sleep)
    accept_refit_orders(get_worker(), runtime.load_in_flight)
    if mirror is not None:
        runtime.set_fetcher(mirror)
    return Built(str(get_worker().address), dict(runtime.numerics), socket.gethostname())


def _write_to(path: Path, headline: str) -> None:
    """Append `headline` to a file, and from now on everything that this process prints. This includes output of native
    code and of a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("a", buffering=1) as log:
        log.write(headline + "\n")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(file=2)


def run_node_task(call: Call, *parents: object) -> Ref | None:
    """Run a node as a Dask task. Return the reference of the node's commit, and send the outcome to the driver in a
    message.

    The message is needed because the returned result stays in this process. The process may be dead or stopped when the
    driver asks for the result.

    If a process dies, Dask runs again the finished tasks whose results were in that process, and perhaps their
    ancestors. A repeated call is not run a second time: its result is looked up in the ledger.

    Args:
        parents: references to the commits of the parent nodes. They only give Dask the edges of its graph. The node
            reads its inputs from the store.

    Raises:
        WorkerLost: this process must not run the call (see `run_node`), and the ledger has no commit of the node.
        PeerFailed: another rank of the gang failed, and rank 0 did not.
    """
    del parents
    if not _is_for_this_process(call):
        commit = Ledger(call.ledger).find(call.address) if call.ledger is not None else None
        if commit is None:
            raise WorkerLost(call.worker, call.incarnation)
        return commit.ref()
    forwarded = ForwardedCall(get_worker(), call)
    outcome = run_node(call)
    outcome = replace(outcome, peers=differing_outcomes(outcome, forwarded.wait_for_outcomes()))
    get_worker().log_event(REPORTS, codec.encode(outcome))
    return outcome.ref


def _is_for_this_process(call: Call) -> bool:
    """Return True if the call was sent to this incarnation of this worker, and this attempt has not begun here."""
    resident = _resident
    if resident is None or (resident.spec.name, resident.spec.incarnation) != (call.worker, call.incarnation):
        return False
    return (call.address, call.attempt) not in resident.begun_calls


def run_node(call: Call) -> Outcome:
    """Run one attempt at a node in this process, and return its outcome.

    Raises:
        WorkerLost: the call was sent to another worker or to another incarnation of this worker (the incarnation counts
            how often a worker was built anew). Or this attempt has begun here before, and Dask repeats it.
    """
    resident = _resident
    if resident is None or not _is_for_this_process(call):
        raise WorkerLost(call.worker, call.incarnation)
    resident.begun_calls[call.address, call.attempt] = None
    if len(resident.begun_calls) > _MAX_REMEMBERED_CALLS:
        resident.begun_calls.popitem(last=False)
    return resident.runtime.run(call)


# ---- calls of a gang -------------------------------------------------------------------------------------


RUN = "stageline_run_call"
"""Name of the Dask handler that runs a forwarded call."""
_TOLERANCE_S = 0.1


class PeerFailed(RuntimeError):
    """Rank 0's error if another rank of the gang failed in a call and rank 0 did not. The other rank has already
    reported its own error to the driver."""


def open_for_calls(worker: Worker, run: Callable[[Call], Outcome]) -> None:
    """Register the Dask handler `RUN`, with which rank 0 runs calls in this process, one after another. `run`: runs a
    call and returns its outcome."""

    async def answer(call: bytes) -> dict[str, str]:
        sent: Call = pickle.loads(call)
        running = asyncio.get_running_loop().run_in_executor(worker.executors["default"], run, sent)
        await asyncio.wait([running])
        error = running.exception()
        if error is not None:
            traceback.print_exception(error)  # into the log, as Dask does for tasks
            _report_failure(worker, sent, error)
            return {}
        return {"outcome": codec.encode(running.result())}

    worker.handlers[RUN] = answer


class ForwardedCall:
    """The requests that forward one call to the gang's other ranks. There are none if the node needs one rank."""

    def __init__(self, worker: Worker, call: Call) -> None:
        loop = worker.loop.asyncio_loop
        self._asked: list[Future[Outcome | None]] = [
            asyncio.run_coroutine_threadsafe(_run_on_rank(worker, address, call_for_rank(call, index)), loop)
            for index, address in enumerate(call.peers, 1)
        ]

    def wait_for_outcomes(self) -> list[Outcome]:
        """Wait for the other ranks. Return their outcomes in the order of the ranks. Raises PeerFailed if a rank
        failed."""
        outcomes = [asked.result() for asked in self._asked]
        failed = [index for index, outcome in enumerate(outcomes, 1) if outcome is None]
        if failed:
            raise PeerFailed(f"ranks {failed} did not do their part")
        return [outcome for outcome in outcomes if outcome is not None]


def call_for_rank(call: Call, index: int) -> Call:
    """Return the copy of a call that rank 0 forwards to rank `index`. The copy names the worker of that rank. It has no
    `peers`, so that rank does not forward it again."""
    return replace(call, worker=worker_name(call.gang, index), peers=())


async def _run_on_rank(worker: Worker, address: str, call: Call) -> Outcome | None:
    """Run the call on another rank and return its outcome. Return None if the rank failed; the driver gets a report."""
    try:
        answer: dict[str, Any] = await getattr(worker.rpc(address), RUN)(call=pickle.dumps(call))
    except (OSError, AttributeError):  # the process has died, or was restarted and is not built yet
        _report_failure(worker, call, WorkerLost(call.worker, call.incarnation))
        return None
    return codec.decode(Outcome, answer["outcome"]) if "outcome" in answer else None


def _report_failure(worker: Worker, call: Call, error: BaseException) -> None:
    worker.log_event(REPORTS, codec.encode(RankFailure.from_error(call, error)))


def differing_outcomes(first: Outcome, others: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes of `others` that have a warning, or whose start or end differs noticeably from rank 0's
    (`first`): by more than 0.1 s, and by more than a tenth of rank 0's duration."""
    tolerance_s = max(_TOLERANCE_S, 0.1 * (first.finished - first.started))
    return tuple(other for other in others if _differs(first, tolerance_s, other))


def _differs(first: Outcome, tolerance_s: float, other: Outcome) -> bool:
    differences = other.started - first.started, other.finished - first.finished
    return bool(other.warnings) or max(map(abs, differences)) > tolerance_s

"""What runs inside a Dask worker: build this process into a rank or a replica, then run nodes.

The process holds one runtime in a module global, because a Dask task is a plain function and models outlive tasks. A
process that died and came back holds none: its calls raise WorkerLost, and the driver builds it again.

May import distributed, this folder and storage; the runtime's class is named by the driver and imported here, so that
the scheduler, which must import this module too, needs no torch.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from distributed import get_worker
from distributed.comm import get_address_host

from pipeline.workers.gang_calls import PassedOn, open_for_calls, outliers
from pipeline.workers.messages import OUTCOMES, Built, Call, Outcome, WorkerLost, WorkerSpec
from pipeline.workers.refits import TakesWeights, open_for_refits
from pipeline.workers.reports import outcome_to_json
from pipeline.workers.resting import Rests, open_for_rest
from pipeline.workers.row_transfer import HasRows, open_for_rows
from pipeline.workers.weight_transfer import ReadsWeights, WeightMirror
from storage.address import Address, Ref
from storage.ledger import Ledger


@dataclass(frozen=True)
class CallResult:
    """What a runtime reports of one call."""

    ref: Ref | None
    """None on ranks other than 0."""
    store_s: float
    """Seconds spent on reading and writing store, ledger, weights and checkpoints."""
    reused: bool
    """The output was already committed."""
    warnings: tuple[str, ...] = ()
    """What was not as it should be, and did not keep the call from its end."""


class Runtime(Protocol):
    """Owns everything a worker process holds for its roles."""

    def run(self, call: Call) -> CallResult: ...

    def close(self) -> None: ...


@runtime_checkable
class HasNumerics(Protocol):
    """A runtime that says what the last bits of its results depend on."""

    @property
    def numerics(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class _Resident:
    spec: WorkerSpec
    runtime: Runtime
    begun: OrderedDict[tuple[Address, str], None] = field(default_factory=OrderedDict)
    """The last calls that began here, by address and attempt: Dask never goes further back than the lineage that the
    driver leaves it."""


_resident: _Resident | None = None
_listening: socket.socket | None = None
"""Of rank 0, until it is built: where the ranks of its gang will meet."""
_MOST_RANKS = 4096
"""That wait to be answered at once."""
_REMEMBERED = 16384
"""Calls: the nodes of 8 turns (`attempts.LINEAGE`) of 256 shards on one worker, and some."""


def open_meeting(spec: WorkerSpec) -> str:
    """Rank 0's part before a gang is built: listens where its ranks will meet, on the address by which the others reach
    it, and says where that is. They may come at once; they are answered when rank 0 is built."""
    global _listening
    if _listening is not None:
        _listening.close()  # of an incarnation that was not built
    host = get_address_host(get_worker().address)
    family, shown = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
    _listening = socket.create_server((host, 0), family=family, backlog=_MOST_RANKS)
    return f"tcp://{shown}:{_listening.getsockname()[1]}"


def build_worker(spec: WorkerSpec, meeting: str | None = None) -> Built:
    """Makes this process what `spec` says; whatever it was before is closed. `meeting`: where the ranks of its gang
    meet, where it has several."""
    global _resident, _listening
    if meeting is not None:
        spec = replace(spec, rendezvous=meeting)
    if meeting is not None and spec.index == 0:
        if _listening is None:
            raise WorkerLost(spec.name, spec.incarnation)  # it is not the process that the others were told of
        spec = replace(spec, listening=_listening.detach())
        _listening = None
    if spec.log is not None:
        _write_to(Path(spec.log), f"---- {spec.name}, incarnation {spec.incarnation}, process {os.getpid()}")
    if _resident is not None:
        _resident.runtime.close()
        _resident = None
    mirror = WeightMirror(get_worker(), spec.mirror) if spec.mirror is not None else None
    if mirror is not None:
        mirror.open()  # before the models are loaded: other hosts may wait for what this one's board has
    module, _, name = spec.runtime.partition(":")
    factory = getattr(importlib.import_module(module), name)
    _resident = _Resident(spec, factory(spec))
    if isinstance(_resident.runtime, HasRows) and _resident.runtime.rows is not None:
        open_for_rows(get_worker(), spec, _resident.runtime.rows)
    if spec.size > 1 and spec.index:
        open_for_calls(get_worker(), run_node)
    if isinstance(_resident.runtime, Rests):
        open_for_rest(get_worker(), spec, _resident.runtime)
    if isinstance(_resident.runtime, TakesWeights):
        open_for_refits(get_worker(), _resident.runtime)
    if mirror is not None and isinstance(_resident.runtime, ReadsWeights):
        _resident.runtime.fetch_with(mirror)
    runtime = _resident.runtime
    numerics = runtime.numerics if isinstance(runtime, HasNumerics) else {}
    return Built(str(get_worker().address), numerics, socket.gethostname())


def _write_to(path: Path, headline: str) -> None:
    """Sends what this process prints (also from native code, also the trace of a crash) to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("a", buffering=1) as log:
        log.write(headline + "\n")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(file=2)


def run_node_task(call: Call, *parents: object) -> Ref | None:
    """The Dask task: `run_node`, whose outcome is reported to the driver by a message. A result would have to be
    fetched from this process, which may have died, or been stopped, in the meantime. `parents` are the parents'
    references: Dask needs them for the edges; the node itself reads its inputs from the store.

    Dask runs a finished task again, and all of its ancestors that it has let go of, to recover a result that died with
    a process. Such a call must not reach a runtime that has gone on: it is answered from the ledger.
    """
    del parents
    if not _is_for_this_process(call):
        commit = Ledger(call.ledger).find(call.address) if call.ledger is not None else None
        if commit is None:
            raise WorkerLost(call.worker, call.incarnation)
        return commit.ref()
    passed_on = PassedOn(get_worker(), call)
    outcome = run_node(call)
    outcome = replace(outcome, peers=outliers(outcome, passed_on.outcomes()))
    get_worker().log_event(OUTCOMES, outcome_to_json(call.attempt, outcome))
    return outcome.ref


def _is_for_this_process(call: Call) -> bool:
    """Whether this process was built for the call, and has not begun it before."""
    resident = _resident
    if resident is None or (resident.spec.name, resident.spec.incarnation) != (call.worker, call.incarnation):
        return False
    return (call.address, call.attempt) not in resident.begun


def run_node(call: Call) -> Outcome:
    """Runs one attempt at a node.

    Raises:
        WorkerLost: this process was not built for the call, or has begun it before.
    """
    resident = _resident
    if resident is None or not _is_for_this_process(call):
        raise WorkerLost(call.worker, call.incarnation)
    resident.begun[call.address, call.attempt] = None
    if len(resident.begun) > _REMEMBERED:
        resident.begun.popitem(last=False)
    started = time.time()
    result = resident.runtime.run(call)
    return Outcome(
        address=call.address,
        ref=result.ref,
        worker=resident.spec.name,
        index=resident.spec.index,
        started=started,
        finished=time.time(),
        store_s=result.store_s,
        reused=result.reused,
        warnings=result.warnings,
    )

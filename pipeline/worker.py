"""What runs inside a Dask worker: build this process into a rank or a replica, then run nodes.

The process holds one runtime in a module global, because a Dask task is a plain function and models outlive tasks. A
process that died and came back holds none: its calls raise WorkerLost, and the driver builds it again.

May import pipeline.calls and the standard library; the runtime's class is named by the driver and imported here, so
that the scheduler, which must import this module too, needs no torch.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Protocol

from pipeline.calls import Call, Outcome, WorkerLost, WorkerSpec
from storage.address import Ref


@dataclass(frozen=True)
class Visit:
    """What a runtime reports of one call."""

    ref: Ref | None
    store_s: float
    reused: bool


class Runtime(Protocol):
    """Owns everything a worker process holds for its roles."""

    def run(self, call: Call) -> Visit: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Resident:
    spec: WorkerSpec
    runtime: Runtime


_resident: _Resident | None = None


def build_worker(spec: WorkerSpec) -> None:
    """Makes this process what `spec` says; whatever it was before is closed."""
    global _resident
    if _resident is not None:
        _resident.runtime.close()
        _resident = None
    module, _, name = spec.runtime.partition(":")
    factory = getattr(importlib.import_module(module), name)
    _resident = _Resident(spec, factory(spec))


def run_node(call: Call, *parents: object) -> Outcome:
    """Runs one attempt at a node. `parents` are the parents' references: Dask needs them for the edges; the node itself
    reads its inputs from the store.

    Raises:
        WorkerLost: this process was not built, or for another incarnation.
    """
    del parents
    resident = _resident
    if resident is None or (resident.spec.gang, resident.spec.incarnation) != (call.gang, call.incarnation):
        raise WorkerLost(call.worker)
    started = time.time()
    visit = resident.runtime.run(call)
    return Outcome(
        address=call.address,
        ref=visit.ref,
        worker=resident.spec.name,
        index=resident.spec.index,
        started=started,
        finished=time.time(),
        store_s=visit.store_s,
        reused=visit.reused,
    )

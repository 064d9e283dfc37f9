"""What the driver sends to a worker and gets back: small, picklable, importable by the scheduler.

What workers report to the driver, as text: JSON of nothing but numbers, strings and lists, so that reading a report
runs nothing. (What the driver sends to a worker is a task, which runs there in any case.)

What a command says to its user though a worker raised it; loads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from typing import Any

from stages.engines.row_loads import EngineLoad, MigrationRequest, RowLoad
from stages.models.protocol import ALONE, RanksMissing
from storage.address import Address, Ref
from storage.files import may_pass

OUTCOMES = "stageline-outcomes"
"""Dask topic on which workers report outcomes to the driver, as `reports.outcome_to_json` writes them."""

FAILURES = "stageline-failures"
"""Dask topic on which ranks other than 0 report what they raised: `RankFailure` as JSON (`reports`)."""

MIGRATIONS = "stageline-tails"
"""Dask topic on which replicas tell the driver of rows, as `reports.rows_to_json` writes it."""

SLEEP_REPORTS = "stageline-rested"
"""Dask topic on which workers tell the driver that they have left their devices, as `reports.rested_to_json` writes
it."""

PEER_ERRORS = (RuntimeError, OSError)
"""Errors that a collective raises if a peer is lost; other code raises them too."""

LONGEST_SILENCE_S = 30.0
"""Seconds without a message after which a worker counts as lost while it sends weights or holds accepted rows; less
under a short `cluster.deadline_s`."""


class WorkerLost(RuntimeError):
    """The process that was to run a node is not the one that was built for it: it died and came back empty."""

    def __init__(self, worker: str, incarnation: int) -> None:
        super().__init__(worker, incarnation)
        self.worker = worker
        self.incarnation = incarnation
        """The one that the call was meant for."""


@dataclass(frozen=True)
class MirrorSpec:
    """The place of a host's published weights, and the worker that sends the missing ones."""

    board: str
    """Directory of the host's board."""
    publisher: str
    """Name of the worker that publishes."""
    timeout_s: float
    """Without a byte of a version that is needed, before that is an error."""
    silence_s: float
    """Seconds without a message from a sender before another is asked."""


@dataclass(frozen=True)
class WorkerSpec:
    """Description of the worker that a process must become."""

    gang: str
    index: int
    """Rank of an ordered gang, replica of a pool."""
    size: int
    """Ranks of the gang; 1 for a pool's replica."""
    incarnation: int
    """Number of times that the gang (or replica) was built before; calls of another incarnation are refused."""
    runtime: str
    """module:class of the runtime (`pipeline.workers.runtime:StageRuntime`; tests have others)."""
    config_yaml: str = field(repr=False)
    """The resolved config: workers read the same one as the driver."""
    rendezvous: str = ALONE
    """Address where the ranks of this incarnation meet (`stages/models/parallel.py`); for several ranks it is on rank
    0's host."""
    listening: int | None = None
    """On rank 0, in its process: the descriptor of the socket that listens at `rendezvous`."""
    log: str | None = None
    """File that the process appends its standard output and error to; None: it keeps those it has."""
    mirror: MirrorSpec | None = None
    """None: the worker neither sends weights to other hosts nor gets any from them."""

    @property
    def name(self) -> str:
        return worker_name(self.gang, self.index)


@dataclass(frozen=True)
class Built:
    """A worker's report when it is built."""

    address: str
    """Dask's, of the process; no later process will have it."""
    numerics: Mapping[str, str]
    """Everything that the last bits of its results depend on, by name."""
    host: str
    """Host of the process, for people."""


@dataclass(frozen=True)
class Call:
    """One attempt at one node on one worker."""

    address: Address
    attempt: str
    version: int
    inputs: tuple[Address, ...]
    gang: str
    worker: str
    incarnation: int
    sequence: int | None = None
    """Number in the gang's order; every rank sees the same."""
    ledger: str | None = None
    """URL of the run's ledger, for a process that cannot run the call but can see that it has been."""
    peers: tuple[str, ...] = ()
    """Of a call to rank 0 of a gang: the Dask addresses of the other ranks, which rank 0 passes the call on to."""


@dataclass(frozen=True)
class Outcome:
    """The result of one call on one worker, as a runtime returns it and the driver receives it."""

    address: Address
    ref: Ref | None
    """Reference to the commit; None on ranks other than 0."""
    worker: str
    index: int
    started: float
    """Seconds since the epoch, the worker's clock."""
    finished: float
    store_s: float
    """Seconds of the call spent on reading and writing the store, ledger, weights and checkpoints."""
    warnings: tuple[str, ...] = ()
    """Problems that did not make the call fail."""
    peers: tuple[Outcome, ...] = ()
    """Outcomes of other ranks that differ noticeably from rank 0's (`gang_calls.outliers`). Only rank 0 has any."""


class FailureKind(StrEnum):
    """The reason why a rank did not finish its part of a call."""

    LOST = "lost"
    """Its process is lost."""
    MISSING = "missing"
    """Others did not come to a collective."""
    PEER = "peer"
    """An error that the death of a peer would cause too."""
    OWN = "own"
    """Anything else."""


@dataclass(frozen=True)
class RankFailure:
    """A rank other than 0 did not do its part of a call."""

    address: Address
    attempt: str
    worker: str
    incarnation: int
    index: int
    kind: FailureKind
    error: str
    """The type's name."""
    text: str
    missing: tuple[int, ...] = ()
    passing: bool = False
    """True: a later attempt may succeed, since (for example) the store was not available."""

    @classmethod
    def of(cls, call: Call, error: BaseException) -> RankFailure:
        index = int(call.worker.rpartition("-")[2])
        missing = error.ranks if isinstance(error, RanksMissing) else ()
        kind = FailureKind.PEER if isinstance(error, PEER_ERRORS) else FailureKind.OWN
        if isinstance(error, WorkerLost):
            kind = FailureKind.LOST
        elif missing:
            kind = FailureKind.MISSING
        name, text = type(error).__name__, str(error)
        which = call.address, call.attempt, call.worker, call.incarnation, index
        return cls(*which, kind, name, text, missing, may_pass(error))


@dataclass(frozen=True)
class RowsReport:
    """A replica says what rows it has in flight."""

    gang: str
    index: int
    incarnation: int
    here: EngineLoad
    away: tuple[Address, ...]
    """Nodes that run there and whose unfinished rows are all elsewhere."""


@dataclass(frozen=True)
class SleepReport:
    """A worker says that it has left its devices to others; or why it could not."""

    gang: str
    index: int
    incarnation: int
    number: int
    """Number of the order."""
    seconds: float
    error: str | None


@dataclass(frozen=True)
class MigrationOrder:
    """The driver's order to a replica: send these rows to another."""

    number: int
    gang: str
    index: int
    incarnation: int
    """Incarnation of the source; a process of another one does not answer."""
    target: str
    """Dask address."""
    rows: tuple[MigrationRequest, ...]


@dataclass(frozen=True)
class MigrationDone:
    """A replica says that an order is carried out: its rows were accepted, or have come back."""

    number: int
    gang: str
    index: int
    incarnation: int
    num_rows: int
    """Number of accepted rows."""
    num_bytes: int
    """Bytes of keys and values that were sent."""
    seconds: float
    """Seconds from the first byte to the answer."""
    away: tuple[Address, ...]
    """See `RowsReport`."""
    refusal: str | None = None
    """Why the rows were not accepted."""


def slot_resource(gang: str, index: int) -> str:
    """Return the Dask resource of a worker's slots. It pins a task to one worker of a gang and, unlike an address,
    outlives the process."""
    return f"{gang}.{index}"


def pin_resource(gang: str, index: int) -> str:
    """Return the Dask resource that pins a task to a worker without taking a slot."""
    return f"{gang}.{index}.pin"


def worker_name(gang: str, index: int) -> str:
    return f"{gang}-{index}"


# ---- reports ---------------------------------------------------------------------------------------------


class BadReport(ValueError):
    """A text that is no report of a worker; says what is the matter."""


def outcome_to_json(attempt: str, outcome: Outcome) -> str:
    """Encode an outcome for the topic `OUTCOMES`. Raises TypeError for a reference whose state is not JSON."""
    return json.dumps({"attempt": attempt, "outcome": outcome}, default=_fields)


def outcome_from_json(text: str) -> tuple[str, Outcome]:
    """Decode what `outcome_to_json` wrote: the attempt and its outcome. Raises BadReport."""
    try:
        document = json.loads(text)
        given = document["outcome"]
        return str(document["attempt"]), _outcome(given)
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no outcome of a call: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def failure_to_json(failure: RankFailure) -> str:
    """Encode a failure for the topic `FAILURES`."""
    return json.dumps(failure, default=_fields)


def failure_from_json(text: str) -> RankFailure:
    """Decode what `failure_to_json` wrote. Raises BadReport."""
    try:
        given = json.loads(text)
        return RankFailure(
            address=_address(given["address"]),
            attempt=str(given["attempt"]),
            worker=str(given["worker"]),
            incarnation=int(given["incarnation"]),
            index=int(given["index"]),
            kind=FailureKind(given["kind"]),
            error=str(given["error"]),
            text=str(given["text"]),
            missing=tuple(map(int, given["missing"])),
            passing=bool(given["passing"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no failure of a rank: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def rows_to_json(report: RowsReport | MigrationDone) -> str:
    """Encode a report for the topic `MIGRATIONS`."""
    return json.dumps({type(report).__name__: report}, default=_fields)


def rows_from_json(text: str) -> RowsReport | MigrationDone:
    """Decode what `rows_to_json` wrote. Raises BadReport."""
    try:
        ((kind, given),) = json.loads(text).items()
        match kind:
            case "RowsReport":
                return RowsReport(**_replica(given), here=_load(given["here"]), away=_addresses(given["away"]))
            case "MigrationDone":
                return MigrationDone(
                    **_replica(given),
                    number=int(given["number"]),
                    num_rows=int(given["num_rows"]),
                    num_bytes=int(given["num_bytes"]),
                    seconds=float(given["seconds"]),
                    away=_addresses(given["away"]),
                    refusal=None if given["refusal"] is None else str(given["refusal"]),
                )
        raise ValueError(f"there is no {kind}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no report of rows: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def sleep_report_to_json(report: SleepReport) -> str:
    """Encode a report for the topic `SLEEP_REPORTS`."""
    return json.dumps(report, default=_fields)


def sleep_report_from_json(text: str) -> SleepReport:
    """Decode what `sleep_report_to_json` wrote. Raises BadReport."""
    try:
        given = json.loads(text)
        error = None if given["error"] is None else str(given["error"])
        return SleepReport(**_replica(given), number=int(given["number"]), seconds=float(given["seconds"]), error=error)
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"no report of rest: {type(error).__name__} {error} in {str(text)[:200]!r}") from error


def _fields(record: object) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} is not JSON: {record!r}")
    return vars(record)


def _address(given: dict[str, Any]) -> Address:
    return Address(str(given["stage"]), int(given["step"]), int(given["shard"]))


def _addresses(given: list[dict[str, Any]]) -> tuple[Address, ...]:
    return tuple(map(_address, given))


def _outcome(given: dict[str, Any]) -> Outcome:
    return Outcome(
        address=_address(given["address"]),
        ref=None if given["ref"] is None else _ref(given["ref"]),
        worker=str(given["worker"]),
        index=int(given["index"]),
        started=float(given["started"]),
        finished=float(given["finished"]),
        store_s=float(given["store_s"]),
        warnings=tuple(map(str, given["warnings"])),
        peers=tuple(map(_outcome, given["peers"])),
    )


def _ref(given: dict[str, Any]) -> Ref:
    metrics = {str(name): float(value) for name, value in given["metrics"].items()}
    times = float(given["started"]), float(given["finished"])
    return Ref(_address(given["address"]), str(given["attempt"]), metrics, dict(given["state"]), *times)


def _replica(given: dict[str, Any]) -> dict[str, Any]:
    return {"gang": str(given["gang"]), "index": int(given["index"]), "incarnation": int(given["incarnation"])}


def _load(given: dict[str, Any]) -> EngineLoad:
    return EngineLoad(
        version=int(given["version"]),
        max_rows=int(given["max_rows"]),
        rows=tuple(map(_row, given["rows"])),
        position_bytes=int(given["position_bytes"]),
        pass_s=float(given["pass_s"]),
        prefill_s=float(given["prefill_s"]),
    )


def _row(given: dict[str, Any]) -> RowLoad:
    seed, step, row = map(int, given["key"])
    return RowLoad((seed, step, row), int(given["tokens"]), int(given["cached"]), int(given["left"]))


# ---- errors ----------------------------------------------------------------------------------------------


class ReplayMismatch(RuntimeError):
    """An update run again from its stored inputs gave other weights than the ones that were committed."""

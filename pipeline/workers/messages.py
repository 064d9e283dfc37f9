"""What the driver sends to a worker and gets back: small, picklable, importable by the scheduler.

May import the standard library, storage.address, storage.retries, stages.models.{errors, protocol} and
stages.engines.row_loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stages.engines.row_loads import EngineLoad, MigrationRequest
from stages.models.errors import RanksMissing
from stages.models.protocol import ALONE
from storage.address import Address, Ref
from storage.retries import may_pass

OUTCOMES = "stageline-outcomes"
"""Dask topic on which workers report outcomes to the driver, as `reports.outcome_to_json` writes them."""

FAILURES = "stageline-failures"
"""Dask topic on which ranks other than 0 report what they raised: `RankFailure` as JSON (`reports`)."""

TAILS = "stageline-tails"
"""Dask topic on which replicas tell the driver of rows, as `reports.rows_to_json` writes it."""

RESTED = "stageline-rested"
"""Dask topic on which workers tell the driver that they have left their devices, as `reports.rested_to_json` writes
it."""

PEER_ERRORS = (RuntimeError, OSError)
"""What a collective raises when a peer is lost; also what much else raises."""

LONGEST_SILENCE_S = 30.0
"""Of a worker that sends weights or that accepted rows, before it is taken for lost; less under a short
`cluster.deadline_s`."""


class WorkerLost(RuntimeError):
    """The process that was to run a node is not the one that was built for it: it died and came back empty."""

    def __init__(self, worker: str, incarnation: int) -> None:
        super().__init__(worker, incarnation)
        self.worker = worker
        self.incarnation = incarnation
        """The one that the call was meant for."""


@dataclass(frozen=True)
class MirrorSpec:
    """Where a worker's host has its published weights, and from whom it gets those that it lacks."""

    board: str
    """Directory of the host's board."""
    publisher: str
    """Name of the worker that publishes."""
    patience_s: float
    """Without a byte of a version that is needed, before that is an error."""
    silence_s: float
    """Of a worker that sends, before another is asked."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process must become."""

    gang: str
    index: int
    """Rank of an ordered gang, replica of a pool."""
    size: int
    """Ranks of the gang; 1 for a pool's replica."""
    incarnation: int
    """How often the gang (or replica) has been built before; a call of another incarnation is refused."""
    runtime: str
    """module:class of the runtime (`pipeline.workers.runtime:StageRuntime`; tests have others)."""
    config_yaml: str
    """The resolved config: workers read the same one as the driver."""
    rendezvous: str = ALONE
    """Where the ranks of this incarnation meet (`stages/models/meeting.py`); those of several at rank 0's address."""
    listening: int | None = None
    """Of rank 0, in its process: the descriptor of the socket that listens there."""
    log: str | None = None
    """File that the process appends its standard output and error to; None: it keeps those it has."""
    mirror: MirrorSpec | None = None
    """None: it neither gives weights to other hosts nor gets any from them."""

    @property
    def name(self) -> str:
        return worker_name(self.gang, self.index)


@dataclass(frozen=True)
class Built:
    """What a worker reports when it is built."""

    address: str
    """Dask's, of the process; no later process will have it."""
    numerics: Mapping[str, str]
    """What the last bits of its results depend on, by name."""
    host: str
    """Where the process is, for people."""


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
    """Of a call to rank 0 of a gang: Dask addresses of ranks 1 and on, to whom it passes the call on."""


@dataclass(frozen=True)
class Outcome:
    """What a worker reports of a call; `ref` is None on ranks other than 0."""

    address: Address
    ref: Ref | None
    worker: str
    index: int
    started: float
    """Seconds since the epoch, the worker's clock."""
    finished: float
    store_s: float
    """Of it, spent on reading and writing store, ledger, weights and checkpoints."""
    reused: bool
    """The output was already committed."""
    warnings: tuple[str, ...] = ()
    """What was not as it should be, and did not keep the call from its end."""
    peers: tuple[Outcome, ...] = ()
    """Rank 0's: of the gang's other ranks, whose part is done too, the outcomes that stand out (`gang_calls`)."""


class FailureKind(StrEnum):
    """What kept a rank from its part of a call."""

    LOST = "lost"
    """Its process is lost."""
    MISSING = "missing"
    """Others did not come to a collective."""
    PEER = "peer"
    """What it would also raise if a peer had died."""
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
    """Whether a later attempt may succeed: the store was not available, say."""

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
class RowsNews:
    """A replica says what rows it has in flight."""

    gang: str
    index: int
    incarnation: int
    here: EngineLoad
    away: tuple[Address, ...]
    """Nodes that run there and whose unfinished rows are all elsewhere."""


@dataclass(frozen=True)
class Rested:
    """A worker says that it has left its devices to others; or why it could not."""

    gang: str
    index: int
    incarnation: int
    number: int
    """Of the order."""
    seconds: float
    error: str | None


@dataclass(frozen=True)
class MoveOrder:
    """The driver's order to a replica: send these rows to another."""

    number: int
    gang: str
    index: int
    incarnation: int
    """Of the source; another process does not answer."""
    target: str
    """Dask address."""
    rows: tuple[MigrationRequest, ...]


@dataclass(frozen=True)
class MoveOver:
    """A replica says that an order is carried out: its rows were accepted, or have come back."""

    number: int
    gang: str
    index: int
    incarnation: int
    num_rows: int
    """That were accepted."""
    num_bytes: int
    """Of keys and values that travelled."""
    seconds: float
    """From the first byte to the answer."""
    away: tuple[Address, ...]
    """As in `RowsNews`."""
    refusal: str | None = None
    """Why the rows were not accepted."""


def slot_resource(gang: str, index: int) -> str:
    """Dask resource of a worker's slots. It pins a task to one worker of a gang and, unlike an address, outlives the
    process."""
    return f"{gang}.{index}"


def pin_resource(gang: str, index: int) -> str:
    """Dask resource that pins a task to a worker without taking a slot."""
    return f"{gang}.{index}.pin"


def worker_name(gang: str, index: int) -> str:
    return f"{gang}-{index}"

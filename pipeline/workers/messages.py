"""Messages between driver and workers: specs, calls and orders to a worker, reports back to the driver.

The driver sends pickles, since workers run the driver's code anyway. Workers report JSON, so that reading a report runs
no code. The scheduler imports this module too, so this module loads neither torch nor Dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stages.engines.row_loads import EngineLoad, MigrationRequest
from stages.models.protocol import ALONE, RanksMissing
from storage.address import Address, Ref
from storage.files import is_transient

REPORTS = "stageline-reports"
"""Dask topic on which workers send each `Report` to the driver."""

PEER_ERRORS = (RuntimeError, OSError)
"""Errors that a collective raises if a peer is lost; other code raises them too."""

MESSAGE_TIMEOUT_S = 30.0
"""Seconds to wait for the next message of another worker that sends weights or has accepted rows. After this time the
other worker counts as lost. If a quarter of `cluster.deadline_s` is less, that is the limit."""


class WorkerLost(RuntimeError):
    """A call cannot run in the process that it was sent to. There are three cases:

    - The process has died.
    - The worker was built anew, so its present process is another incarnation.
    - The process has begun the same call before. Dask repeats a call if its result was lost.
    """

    def __init__(self, worker: str, incarnation: int) -> None:
        super().__init__(worker, incarnation)
        self.worker = worker
        self.incarnation = incarnation
        """Incarnation that the call was sent to."""


@dataclass(frozen=True)
class MirrorSpec:
    """The board of published weights on a host, and the worker that is asked first for missing versions."""

    board: str
    """Directory on this host in which published weights are kept (the board)."""
    publisher: str
    """Name of the worker that publishes the weights."""
    timeout_s: float
    """Seconds without new bytes of a version after which its transfer fails."""
    message_timeout_s: float
    """Seconds without a message from a sender after which another sender is asked."""


@dataclass(frozen=True)
class WorkerSpec:
    """Description of the worker that a process must become."""

    gang: str
    index: int
    """Rank in an ordered gang, or number of the replica in a pool."""
    size: int
    """Number of ranks of the gang; 1 for a pool's replica."""
    incarnation: int
    """Number of times that the gang (or replica) was built before. A process refuses calls of another incarnation."""
    runtime: str
    """module:class of the runtime (`pipeline.workers.runtime:StageRuntime`; tests have others)."""
    config_yaml: str = field(repr=False)
    """The resolved config, so that workers read the same as the driver."""
    rendezvous: str = ALONE
    """Address where the ranks of this incarnation find each other (`stages/models/parallel.py`). It is on rank 0's
    host."""
    listening: int | None = None
    """Descriptor of the socket that listens at `rendezvous`, in rank 0's process."""
    log: str | None = None
    """File that the process appends its standard output and error to. None: both go where they went before."""
    mirror: MirrorSpec | None = None
    """How the worker exchanges weights with other hosts. None: the worker exchanges no weights."""

    @property
    def name(self) -> str:
        return worker_name(self.gang, self.index)


@dataclass(frozen=True)
class Built:
    """A worker's report when it is built."""

    address: str
    """Dask address of the process. No later process will have it."""
    numerics: Mapping[str, str]
    """Name -> fact on which the last bits of the worker's results depend, such as the version of a library."""
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
    """Position of the node in the order in which the ranks of the gang run their nodes. All ranks use the same order.
    None: the node is not part of such an order, as in a pool of replicas."""
    ledger: str | None = None
    """URL of the run's ledger. If a process must not run the call, it looks there for the node's commit (see
    `run_node_task`). Usually Dask has then repeated the call, because its result was lost. None: such a call raises
    WorkerLost.
    """
    peers: tuple[str, ...] = ()
    """Dask addresses of the other ranks, in a call to rank 0 of a gang. Rank 0 forwards the call to them."""
    is_first: bool = False
    """True if the driver hands the node out for the first time, and found no commit of it when it started. A worker
    then runs the node without looking for its commit. If there is one all the same, by a worker of an earlier driver,
    this attempt loses."""


@dataclass(frozen=True)
class Outcome:
    """The result of one call on one worker. A runtime returns it, and the driver receives it."""

    address: Address
    attempt: str
    """Name of the call's attempt."""
    ref: Ref | None
    """Reference to the commit of the call's output; None on ranks other than 0."""
    worker: str
    index: int
    started: float
    """Time of the start, in seconds since the epoch by the worker's clock."""
    finished: float
    """Time at which the call ended, in seconds since the epoch by the worker's clock."""
    store_s: float
    """Seconds of the call spent on reading and writing the store, ledger, weights and checkpoints."""
    warnings: tuple[str, ...] = ()
    """Problems that did not make the call fail."""
    peers: tuple[Outcome, ...] = ()
    """Outcomes of other ranks that differ noticeably from rank 0's (`entry.differing_outcomes`). Only rank 0 has
    any."""


class FailureKind(StrEnum):
    """The reason why a rank did not finish its part of a call."""

    LOST = "lost"
    """The worker's process is lost."""
    MISSING = "missing"
    """Other ranks did not join a collective."""
    PEER = "peer"
    """The worker raised an error that the death of a peer would cause too."""
    OWN = "own"
    """The worker raised an error that belongs to none of the other kinds. The death of a peer cannot explain it."""


@dataclass(frozen=True)
class RankFailure:
    """A report that a rank other than 0 did not finish its part of a call."""

    address: Address
    attempt: str
    worker: str
    incarnation: int
    index: int
    kind: FailureKind
    error: str
    """Name of the error's class."""
    text: str
    missing: tuple[int, ...] = ()
    """Ranks that did not join a collective."""
    transient: bool = False
    """True if a later attempt may succeed, for example because the store was not available."""

    @classmethod
    def from_error(cls, call: Call, error: BaseException) -> RankFailure:
        index = int(call.worker.rpartition("-")[2])
        missing = error.ranks if isinstance(error, RanksMissing) else ()
        kind = FailureKind.PEER if isinstance(error, PEER_ERRORS) else FailureKind.OWN
        if isinstance(error, WorkerLost):
            kind = FailureKind.LOST
        elif missing:
            kind = FailureKind.MISSING
        name, text = type(error).__name__, str(error)
        which = call.address, call.attempt, call.worker, call.incarnation, index
        return cls(*which, kind, name, text, missing, is_transient(error))


@dataclass(frozen=True)
class RowsReport:
    """A replica's report of the rows that it has in flight."""

    gang: str
    index: int
    incarnation: int
    load: EngineLoad
    waiting: tuple[Address, ...]
    """Nodes of this replica that only wait for rows on other replicas."""


@dataclass(frozen=True)
class SleepReport:
    """A worker's report that it freed its devices, or why it could not."""

    gang: str
    index: int
    incarnation: int
    number: int
    """Number of the driver's order to free the devices."""
    seconds: float
    error: str | None


@dataclass(frozen=True)
class MigrationOrder:
    """The driver's order to a replica (the source): send these rows to another replica."""

    number: int
    gang: str
    index: int
    incarnation: int
    """Incarnation of the source. A process of another incarnation does not carry out the order."""
    target: str
    """Dask address of the replica that receives the rows."""
    rows: tuple[MigrationRequest, ...]


@dataclass(frozen=True)
class MigrationDone:
    """A replica's report that a migration order is carried out. The target has accepted the rows, up to the first row
    that it refused. The other rows stay in this replica."""

    number: int
    gang: str
    index: int
    incarnation: int
    num_rows: int
    """Number of accepted rows."""
    num_bytes: int
    """Bytes of the keys and values that were copied while their rows went on decoding."""
    held_s: float
    """Seconds for which the copying of keys and values kept the engines from computing: the sum for the sending and the
    receiving replica."""
    standstill_s: float
    """Seconds for which rows did not decode because they migrated to the other replica, summed over the rows. For each
    row: from its removal from this replica's engine until the other replica accepted it.
    """
    waiting: tuple[Address, ...]
    """Nodes of this replica that only wait for rows on other replicas, as in `RowsReport`."""
    refusal: str | None = None
    """Reason why a row was not accepted. None if no row was refused."""


Report = Outcome | RankFailure | RowsReport | MigrationDone | SleepReport
"""A worker's report, sent as `codec.encode(report)` and read with `codec.decode(Report, text)`."""


def slot_resource(gang: str, index: int) -> str:
    """Return the Dask resource of a worker's slots. This resource pins a task to one worker of a gang. Unlike an
    address, the resource stays the same when the worker gets a new process."""
    return f"{gang}.{index}"


def pin_resource(gang: str, index: int) -> str:
    """Return the Dask resource that pins a task to a worker without taking a slot."""
    return f"{gang}.{index}.pin"


def worker_name(gang: str, index: int) -> str:
    return f"{gang}-{index}"


class ReplayMismatch(RuntimeError):
    """An update that was run again from its stored inputs gave other weights than the committed ones."""

"""What the executor and its parts share: settings, what they all act on, and the error that ends a run.

May import distributed, pipeline.graph, pipeline.observe and pipeline.workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client, Future

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.gangs import Gang
from pipeline.observe.journal import Journal
from stages.models.protocol import Role
from storage.address import Address

WorkerKey = tuple[str, int]
"""A worker, whichever process it is now: its gang's name, and its rank (ordered gang) or replica (pool)."""


class StageFailed(RuntimeError):
    """A stage raised, or a node or worker was lost too often; the run ends with exit code 3."""


class WorkersMissing(StageFailed):
    """A worker that nobody can do without is not there: on other nodes it may be."""


class StoredWrongly(StageFailed):
    """What is stored was found damaged, or did not fit together, while the run went on."""


@dataclass(frozen=True)
class ExecutorSettings:
    """What of the config the executor needs."""

    runtime: str
    config_yaml: str
    start_timeout_s: float
    deadline_s: float
    attempts: int
    arrival_timeout_s: float | None = None
    """For a process that somebody else starts to be there; None: the driver starts them, and `start_timeout_s` is for
    that, too."""
    ledger: str | None = None
    """URL of the ledger, from which a call that Dask runs again is answered; None: it fails, and is submitted again."""
    run_dir: Path | None = None
    """For people, who are told how to run a node again that failed."""
    log_dir: Path | None = None
    """Where workers write what they print; None: to the driver's terminal."""
    move_rows_below: int = 0
    """When fewer rows are left on all replicas that generate, they move to fewer replicas; 0: never."""
    boards: Mapping[str, str] = field(default_factory=dict)
    """Directory of published weights on each gang's hosts; empty: there are none."""
    boards_elsewhere: bool = False
    """The driver sees none of them: workers release what is on their hosts, the publisher's as well."""


@dataclass(frozen=True)
class Context:
    """One run's executor as its parts see it."""

    client: Client
    gangs: Mapping[str, Gang]
    """By name."""
    dispatch: Dispatch
    journal: Journal
    settings: ExecutorSettings
    name: str
    """Part of every key and file name that another executor on the same cluster must not have."""
    now: Callable[[], float]
    """Seconds by the driver's clock, which stands still while the driver does."""
    watch: Callable[[Future, WorkerKey, Address | None], None]
    """Has the loop notified when a future on a worker ends: a node's, by its address, or the worker's build (None)."""

    def gang_with(self, role: Role) -> str:
        """Name of the gang that has a role; empty if none has."""
        return next((gang.name for gang in self.gangs.values() if role in gang.roles), "")

"""Settings and objects that the executor shares with its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client, Future

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.graph import Gang
from pipeline.observe.journal import Journal
from stages.models.protocol import Role
from storage.address import Address

WorkerKey = tuple[str, int]
"""A worker, across its processes: its gang's name, and its rank (ordered gang) or replica (pool)."""


@dataclass(frozen=True)
class ExecutorSettings:
    """The settings of the config that the executor needs."""

    runtime: str
    config_yaml: str = field(repr=False)
    start_timeout_s: float
    deadline_s: float
    attempts: int
    arrival_timeout_s: float | None = None
    """Seconds for a process that somebody else starts to join. None: the driver starts the processes, and
    `start_timeout_s` covers that too."""
    ledger: str | None = None
    """URL of the ledger, which answers a call that Dask runs again. None: such a call fails and is submitted again."""
    run_dir: Path | None = None
    """Directory of the run, for messages that say how to run a failed node again."""
    log_dir: Path | None = None
    """Directory of the workers' logs. None: they print to the driver's terminal."""
    migrate_rows_below: int = 0
    """Rows move to fewer replicas when fewer than this are left on all generating replicas. 0: never."""
    boards: Mapping[str, str] = field(default_factory=dict)
    """Directory of published weights on the hosts of each gang, by gang. Empty: no weights are published."""
    boards_elsewhere: bool = False
    """True if the driver sees no board: workers release the versions on their hosts, also on the publisher's."""


@dataclass(frozen=True)
class Context:
    """The objects that the parts of one run's executor share."""

    client: Client
    gangs: Mapping[str, Gang]
    """Gangs by name."""
    dispatch: Dispatch
    journal: Journal
    settings: ExecutorSettings
    name: str
    """Random name of this executor, part of attempt names and keys. Another executor on the cluster has another."""
    now: Callable[[], float]
    """Returns the seconds of the driver's clock, which stops while the driver is suspended."""
    watch: Callable[[Future, WorkerKey, Address | None], None]
    """Notifies the loop when a future on a worker ends: a node's, by its address, or the worker's build (None)."""

    def gang_with(self, role: Role) -> str:
        """Return the name of the gang that has a role, or an empty string."""
        return next((gang.name for gang in self.gangs.values() if role in gang.roles), "")

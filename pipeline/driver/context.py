"""Objects that several modules of the driver share. The executor is the component of the driver that runs the graph on
Dask.

    ExecutorSettings    the settings of a run that the executor needs
    ExecutorEvents      callbacks: a node is done, a worker is built, a second has passed
    Context             Dask client, gangs, journal and clock, for the modules of the executor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distributed import Client, Future

from pipeline.config.paths import RunPaths
from pipeline.config.sections import ClusterConfig
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.graph import Gang, Node
from pipeline.observe.journal import Journal
from pipeline.workers.messages import Outcome
from stages.models.protocol import Role
from storage.address import Address

WorkerKey = tuple[str, int]
"""Key of a worker: its gang's name, and its rank (ordered gang) or replica (pool). A process that replaces a dead one
has the same key."""


@dataclass(frozen=True)
class ExecutorSettings:
    """The settings of a run that the executor needs."""

    cluster: ClusterConfig
    start_timeout_s: float
    """Maximum number of seconds that the build of a worker may take: `cluster.start_timeout_s`. If this setting is
    null, the time is computed from the size of the models' files."""
    paths: RunPaths
    ledger_url: str
    config_yaml: str = field(repr=False)
    """The resolved config, for the workers."""
    boards: Mapping[str, str] = field(default_factory=dict)
    """Gang -> directory of published weights on its hosts. Empty: no weights are published."""
    scores_early: bool = False
    """See `RunConfig.scores_early`."""
    runtime: str = "pipeline.workers.runtime:StageRuntime"
    """module:class of the runtime that every worker builds."""

    @property
    def has_attached_workers(self) -> bool:
        """True if the worker processes are started by `stageline worker`, and not by the driver. The driver then sees
        no board of published weights."""
        return self.cluster.kind == "attached"


class ExecutorEvents:
    """The receiver of an executor's events. An exception that a method raises ends the run."""

    def on_node_done(self, node: Node, outcome: Outcome) -> None:
        """Called once for each node, after its commit. `outcome`: the report of rank 0 or of the replica."""

    def on_worker_built(self, worker: WorkerKey, numerics: Mapping[str, str]) -> None:
        """Called when a worker is built, before it gets work. `numerics`: name of a fact -> its value. The last bits of
        the worker's results depend on these facts. If this method raises ConfigError, the build of the worker counts as
        failed."""

    def on_worker_replaced(self) -> None:
        """Called when the successor of a lost worker process is built."""

    def on_tick(self, now: float) -> None:
        """Called about once a second. `now`: seconds of the driver's clock (`Context.now`)."""


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
    """Random name of this executor. It is part of the names of attempts and of the keys of tasks. So no other executor
    on the cluster uses the same names and keys."""
    now: Callable[[], float]
    """Function that returns the seconds of the driver's clock. The clock stops while the driver is suspended."""
    watch_future: Callable[[Future, WorkerKey, Address | None], None]
    """Function that makes the executor's loop notice the end of a future. It takes the future, its worker, and the
    address of the graph's node that the future runs. The address is None if the future builds the worker."""

    @property
    def cluster(self) -> ClusterConfig:
        return self.settings.cluster

    def gang_of_role(self, role: Role) -> str:
        """Return the name of the gang that has a role, or an empty string if no gang has it."""
        return next((gang.name for gang in self.gangs.values() if role in gang.roles), "")

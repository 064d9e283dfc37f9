"""Orders to workers beside the graph: copy weights to other hosts, migrate rows between replicas, free shared devices.

The driver waits only for the orders to free devices. The run does not depend on the other orders: a worker that needs a
version fetches it by itself, and rows that are not sent stay where they are. A board is a directory of published
weights that the processes of a host share (`storage.weights`).

    a version is published ──────────► fetch ──► readers on other hosts copy the version before they need it
                           └─────────► take ───► under `rollout.versions: inflight`, replicas load the version and go
                                                 on with it in the rows that they are sampling
    no open node reads the version ──► release ► other hosts remove their copies; a worker that is built later gets a
                                                 list of all released versions
    the run ends ────────────────────► remove ─► other hosts remove their boards (with attached workers, the
                                                 publisher's host too, since the driver sees no board)

    replicas ──report their rows──► MigrationPlanner ──migrations──► orders to the source replicas
    a shard whose rows have all migrated gives up its slot

    a shard's scores are submitted while it is generated ──► the replica sends each finished row to the scoring worker,
                                                             if a reward is slow

    a gang passes the devices on ──sleep──► its workers free them ──all have reported──► the next gang holds them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.driver.cluster import workers_by_address
from pipeline.driver.context import Context, WorkerKey
from pipeline.driver.supervision import Supervision, restart_unit
from pipeline.graph.device_sharing import Handover
from pipeline.graph.dispatch import Submit
from pipeline.graph.migration import MigrationPlanner
from pipeline.observe.journal import EventKind
from pipeline.workers.messages import (
    MESSAGE_TIMEOUT_S,
    MigrationDone,
    MigrationOrder,
    MirrorSpec,
    Outcome,
    RowsReport,
    SleepReport,
    worker_name,
)
from pipeline.workers.orders import order_rows, order_sleep, order_take
from pipeline.workers.row_migration import order_migration
from pipeline.workers.weight_transfer import order_fetch, order_release, remove_boards
from stages.models.protocol import Role
from storage.address import Address


def mirror_spec(context: Context, gang: str) -> MirrorSpec | None:
    """Return how a worker of this gang exchanges weights with other hosts. None if the gang neither reads nor publishes
    weights, or if the run publishes none."""
    cluster, settings, boards = context.cluster, context.settings, context.settings.boards
    if not boards or context.gangs[gang].roles.isdisjoint({Role.GENERATE, Role.POLICY}):
        return None
    return MirrorSpec(
        board=boards[gang],
        publisher=worker_name(context.gang_of_role(Role.POLICY), 0),
        timeout_s=min(settings.start_timeout_s, cluster.deadline_s / 3),  # well before the node is overdue
        message_timeout_s=min(MESSAGE_TIMEOUT_S, cluster.deadline_s / 4),
    )


class WeightOrders:
    """Sends orders to workers about published weights: copy a version to another host, load it, or remove it. Owns the
    data for these orders: the publisher's host, and the versions that no open node reads."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._client = context.client
        self._gangs = context.gangs
        self._boards = context.settings.boards
        self._all_unseen = bool(self._boards) and context.settings.has_attached_workers
        self._supervision = supervision
        self._pool = context.gang_of_role(Role.GENERATE)
        self._publisher = context.gang_of_role(Role.POLICY)
        self._home: str | None = None
        """Host of the publisher; None until it is known."""
        self._unread: set[int] = set()

    def order_fetch(self, version: int) -> None:
        """Order the readers on other hosts to copy a version now, before their nodes need it."""
        order_fetch(self._client, self._with_other_boards(self._supervision.addresses()), version)

    def order_load(self, version: int) -> None:
        """Order all replicas to load a published version of the weights, and to go on with it in the rows that they are
        sampling. Each of these rows may use the new version v. A row of step i may use versions up to i, and version v
        is published only after all rows of step v - 1 are finished. So all rows in flight belong to step v or a later
        step."""
        addresses = self._supervision.addresses()
        names = [worker_name(self._pool, index) for index in range(self._gangs[self._pool].workers)]
        order_take(self._client, [addresses[name] for name in names if name in addresses], version)

    def order_release(self, version: int) -> None:
        """Order workers to remove a version of the weights from their directories of published weights
        (`storage.weights`). This concerns only the directories that the driver does not manage itself."""
        self._unread.add(version)
        order_release(self._client, self._with_unseen_boards(self._supervision.addresses()), [version])

    def on_worker_built(self, worker: WorkerKey) -> None:
        """If the new worker reads or publishes weights, send the list of released versions again: its process does not
        know the list."""
        if worker[0] in (self._pool, self._publisher) and self._unread:
            order_release(self._client, self._with_unseen_boards(self._supervision.addresses()), self._unread)

    def remove_boards(self) -> None:
        """Order workers to remove their directories of published weights (`storage.weights`). This concerns only the
        directories that the driver does not manage itself. Workers that are still being built get the order too."""
        if self._boards:
            addresses = {name: address for address, name in workers_by_address(self._client).items()}
            remove_boards(self._client, self._with_unseen_boards(addresses))

    def _with_unseen_boards(self, addresses: Mapping[str, str]) -> list[str]:
        """Return the Dask addresses of the workers whose board the driver does not manage. Without attached workers it
        manages the publisher's board on its own host, otherwise none."""
        elsewhere = self._with_other_boards(addresses)
        if not self._all_unseen:
            return elsewhere
        publisher, readers = addresses.get(worker_name(self._publisher, 0)), self._readers(addresses)
        return list(dict.fromkeys([*readers, *([] if publisher is None else [publisher])]))

    def _with_other_boards(self, addresses: Mapping[str, str]) -> list[str]:
        """Return the addresses of the replicas that do not read the publisher's board: they run on another host, or
        their gang has another directory. Empty if the run publishes no weights."""
        if not self._boards:
            return []
        publisher = addresses.get(worker_name(self._publisher, 0))
        self._home = _host(publisher) if publisher is not None else self._home
        separate = self._boards[self._pool] != self._boards[self._publisher]
        readers = self._readers(addresses)
        return [address for address in readers if separate or self._home not in (None, _host(address))]

    def _readers(self, addresses: Mapping[str, str]) -> list[str]:
        names = [worker_name(self._pool, index) for index in range(self._gangs[self._pool].workers)]
        return [addresses[name] for name in names if name in addresses]


class MigrationOrders:
    """Owns the row reports of the generating replicas, and the migrations in progress."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._context = context
        self._supervision = supervision
        self._pool = context.gang_of_role(Role.GENERATE)
        self._migration_planner = MigrationPlanner(context.gangs[self._pool].concurrent_shards)

    def order_migrations(self) -> None:
        """Order replicas to send rows to other replicas, so that all rows are finished sooner. The planner decides
        which rows migrate (`MigrationPlanner`). Do nothing unless `cluster.migrate_rows` is set."""
        dispatch, pool = self._context.dispatch, self._pool
        if not self._context.cluster.migrate_rows:
            return
        for number, migration in self._migration_planner.next_migrations(
            dispatch.replicas_up(pool),
            dispatch.busy_replicas(pool),
            dispatch.versions_waiting_for_slot(pool),
            self._context.now(),
        ):
            incarnation = self._supervision.spec((pool, migration.source)).incarnation
            target = self._supervision.address((pool, migration.target))
            order = MigrationOrder(number, pool, migration.source, incarnation, target, migration.rows)
            order_migration(self._context.client, self._supervision.address((pool, migration.source)), order)

    def on_report(self, report: RowsReport | MigrationDone) -> tuple[Address, ...]:
        """Take a replica's report of its rows, or of a finished migration. Return the replica's nodes that only wait
        for rows on other replicas. Reports from an earlier process of the replica are ignored."""
        worker = report.gang, report.index
        if not self._supervision.is_present(worker, report.incarnation):
            return ()
        if isinstance(report, RowsReport):
            self._migration_planner.update_load(report.index, report.load, self._context.now())
        else:
            self._migration_planner.arrived(
                report.number, report.num_rows, report.num_bytes, report.held_s, report.standstill_s
            )
            detail = f"{report.num_rows} rows, {report.num_bytes} bytes of keys and values; passes waited "
            detail += f"{report.held_s:.3f} s for copies; rows stood still for {report.standstill_s:.3f} s"
            detail += f"; refused: {report.refusal}" if report.refusal is not None else ""
            name = self._supervision.spec(worker).name
            self._context.journal.append_now(EventKind.ROWS_MIGRATED, gang=report.gang, worker=name, detail=detail)
        return report.waiting

    def on_node_done(self, outcome: Outcome) -> None:
        """Tell the migration planner how long a generated shard took."""
        if outcome.address.stage == "generate":
            self._migration_planner.node_took(outcome.finished - outcome.started)

    def on_worker_down(self, worker: WorkerKey) -> None:
        """Forget the rows of a worker that is lost, or that is suspected to be lost."""
        if worker[0] == self._pool:
            self._migration_planner.replica_lost(worker[1])


class EarlyRowOrders:
    """Orders replicas to send finished rows to the workers that will score them (`pipeline.workers.early_rows`)."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._context = context
        self._supervision = supervision

    def on_submit(self, submit: Submit) -> None:
        """If a node was submitted that scores a shard, and the shard is still generated, order the generating replica
        to send its rows to the node's worker. Do nothing if no reward of the run can score rows early."""
        if submit.node.role is not Role.SCORE or not self._context.settings.scores_early:
            return
        shard = submit.node.inputs[0]
        generating = self._context.dispatch.worker_of(shard)
        if generating is not None:
            target = self._supervision.address((submit.gang, submit.replica))
            order_rows(self._context.client, self._supervision.address(generating), shard, target)


@dataclass(eq=False)
class _PendingHandover:
    """A hand-over in progress: the giving gang is freeing the devices."""

    handover: Handover
    number: int
    started_at: float
    pending_workers: set[WorkerKey]
    """Workers that have not freed their devices yet."""


class DeviceOrders:
    """Owns the device hand-overs in progress, with the workers that have not freed their devices yet."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._context = context
        self._supervision = supervision
        self._leaving: list[_PendingHandover] = []
        self._ordered = 0

    def start_handovers(self) -> bool:
        """Begin the hand-overs that are due: order the workers of each giving gang to free their devices. Return True
        if a hand-over is finished already, so that there may be nodes to hand out."""
        began = False
        for one in self._context.dispatch.next_handovers():
            live = [key for key in self._workers_of(one.giver) if worker_name(*key) in self._supervision.addresses()]
            self._leaving.append(_PendingHandover(one, self._ordered, self._context.now(), set(live)))
            self._ordered += 1
            self._send_order(self._leaving[-1])
            began |= self._finish_handovers()  # a gang without workers has freed its devices
        return began

    def on_report(self, report: SleepReport) -> None:
        """Take a worker's report that it freed its devices, or failed to. A worker that failed counts as lost.

        Raises:
            StageFailed: the worker was lost too often.
        """
        worker = report.gang, report.index
        if not self._supervision.is_present(worker, report.incarnation):
            return
        order = next(
            (one for one in self._leaving if one.number == report.number and worker in one.pending_workers), None
        )
        if order is not None and report.error is not None:
            self._supervision.restart_lost(worker, f"did not leave its devices: {report.error}")
        elif order is not None:
            order.pending_workers.discard(worker)
            self._finish_handovers()

    def on_worker_down(self, worker: WorkerKey) -> None:
        """Count the devices of a lost worker, and of all workers that restart with it, as freed: the next processes of
        these workers hold nothing on the devices."""
        gang = self._context.gangs[worker[0]]
        for one in self._leaving:
            one.pending_workers -= set(restart_unit(gang, worker[1]))
        self._finish_handovers()

    def check_deadlines(self) -> None:
        """Send pending orders again, since they may be lost. Treat overdue workers as lost.

        Raises:
            StageFailed: a worker was lost too often.
        """
        for one in list(self._leaving):
            if self._context.now() - one.started_at < self._context.cluster.deadline_s:
                self._send_order(one)
                continue
            for worker in sorted(one.pending_workers):
                if worker in one.pending_workers:  # losing one rank of a gang removes the others too
                    self._supervision.restart_lost(worker, "did not leave its devices in time (cluster.deadline_s)")

    def _send_order(self, leaving: _PendingHandover) -> None:
        addresses = self._supervision.addresses()
        names = [worker_name(*worker) for worker in sorted(leaving.pending_workers)]
        order_sleep(self._context.client, [addresses[name] for name in names if name in addresses], leaving.number)

    def _finish_handovers(self) -> bool:
        """Finish the hand-overs whose workers have all freed their devices. Return True if at least one is finished
        now."""
        over = [one for one in self._leaving if not one.pending_workers]
        self._leaving = [one for one in self._leaving if one.pending_workers]
        for one in over:
            self._context.dispatch.on_handed_over(one.handover.giver)
            detail = f"to {one.handover.taker} after {self._context.now() - one.started_at:.3f} s"
            self._context.journal.append_now(EventKind.DEVICES_HANDED_OVER, gang=one.handover.giver, detail=detail)
        return bool(over)

    def _workers_of(self, gang: str) -> list[WorkerKey]:
        return [(gang, index) for index in range(self._context.gangs[gang].workers)]


def _host(address: str) -> str:
    """Return a Dask address without its port."""
    return address.rpartition(":")[0]

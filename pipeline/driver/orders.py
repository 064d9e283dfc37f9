"""Orders to workers that are no nodes: weights for other hosts, rows that migrate between replicas, devices that are to
be left to others. But for the last, none is waited for, and none is needed for the run to go on: who needs a version
fetches it, and rows that are not sent stay.

    a version is published ──► fetch ──► readers elsewhere bring it to their hosts, before they need it
                           └─► take ───► replicas whose engines update in flight load it, under the rows that they have
    nobody reads it any more ► release ► they remove their copies; a process built later is notified of all
    the run ends ────────────► remove ─► their hosts remove their boards
                                         (of attached workers the publisher's host as well: no board is the driver's)

    replicas ──what rows they have──► Tails ──which go where──► the sources
    a shard whose rows are all elsewhere gives its slot up

    a gang's turn ends ──rest──► its workers leave their devices ──rested, all of them──► the next gang's turn

May import pipeline.driver.{cluster, context, supervision}, pipeline.workers and below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.driver.cluster import workers_by_address
from pipeline.driver.context import Context, WorkerKey
from pipeline.driver.supervision import Supervision, restart_unit
from pipeline.graph.tails import Tails
from pipeline.graph.turns import Pass
from pipeline.observe.journal import EventKind
from pipeline.workers.messages import LONGEST_SILENCE_S, MirrorSpec, MoveOrder, MoveOver, Rested, RowsNews, worker_name
from pipeline.workers.refits import order_take
from pipeline.workers.resting import order_rest
from pipeline.workers.row_transfer import order_move
from pipeline.workers.weight_transfer import order_fetch, order_release, remove_boards
from stages.models.protocol import Role
from storage.address import Address


def mirror_spec(context: Context, gang: str) -> MirrorSpec | None:
    """What a worker of this gang must know of weights on other hosts; None if it neither reads nor publishes any."""
    settings = context.settings
    if not settings.boards or context.gangs[gang].roles.isdisjoint({Role.GENERATE, Role.POLICY}):
        return None
    return MirrorSpec(
        board=settings.boards[gang],
        publisher=worker_name(context.gang_with(Role.POLICY), 0),
        patience_s=min(settings.start_timeout_s, settings.deadline_s / 3),  # well before the node is overdue
        silence_s=min(LONGEST_SILENCE_S, settings.deadline_s / 4),
    )


class WeightOrders:
    """Owns what is known of weights elsewhere: the publisher's host, and the versions that nobody reads any more."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._client = context.client
        self._gangs = context.gangs
        self._boards = context.settings.boards
        self._all_unseen = bool(self._boards) and context.settings.boards_elsewhere
        self._supervision = supervision
        self._pool = context.gang_with(Role.GENERATE)
        self._publisher = context.gang_with(Role.POLICY)
        self._home: str | None = None
        """Host of the publisher, once it is known."""
        self._unread: set[int] = set()

    def fetch(self, version: int) -> None:
        """Has a version brought to the hosts that will read it, before they need it."""
        order_fetch(self._client, self._elsewhere(self._supervision.addresses()), version)

    def take(self, version: int) -> None:
        """Has replicas that have rows in flight load a version under them. It is not too new for any of them: while a
        row of step i is unfinished, nothing trains version i into the next."""
        addresses = self._supervision.addresses()
        names = [worker_name(self._pool, index) for index in range(self._gangs[self._pool].workers)]
        order_take(self._client, [addresses[name] for name in names if name in addresses], version)

    def release(self, version: int) -> None:
        """Has a version removed from the boards that the driver does not see."""
        self._unread.add(version)
        order_release(self._client, self._unseen(self._supervision.addresses()), [version])

    def worker_built(self, worker: WorkerKey) -> None:
        """A process that was built just now does not know which versions nobody reads."""
        if worker[0] in (self._pool, self._publisher) and self._unread:
            order_release(self._client, self._unseen(self._supervision.addresses()), self._unread)

    def remove(self) -> None:
        """Has the boards removed that the driver does not see, also where workers are just being built."""
        if self._boards:
            there = {name: address for address, name in workers_by_address(self._client).items()}
            remove_boards(self._client, self._unseen(there))

    def _unseen(self, addresses: Mapping[str, str]) -> list[str]:
        """Of workers by name, the addresses of those on whose boards the driver does not act itself."""
        elsewhere = self._elsewhere(addresses)
        if not self._all_unseen:
            return elsewhere
        publisher, readers = addresses.get(worker_name(self._publisher, 0)), self._readers(addresses)
        return list(dict.fromkeys([*readers, *([] if publisher is None else [publisher])]))

    def _elsewhere(self, addresses: Mapping[str, str]) -> list[str]:
        """Of workers by name, the addresses of those that read weights from another board than the publisher's: on
        another host, or in another directory."""
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
    """Owns what the replicas that generate reported of their rows, and the migrations under way."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._context = context
        self._supervision = supervision
        self._pool = context.gang_with(Role.GENERATE)
        self._tails = Tails(context.settings.move_rows_below)

    def order_moves(self) -> None:
        """Orders sources to send rows, if few are left and it is worth it."""
        dispatch, pool = self._context.dispatch, self._pool
        if not self._tails.below:
            return
        for number, move in self._tails.next_moves(dispatch.replicas_up(pool), dispatch.waiting_versions(pool)):
            incarnation = self._supervision.spec((pool, move.source)).incarnation
            target = self._supervision.address((pool, move.target))
            order = MoveOrder(number, pool, move.source, incarnation, target, move.rows)
            order_move(self._context.client, self._supervision.address((pool, move.source)), order)

    def reported(self, report: RowsNews | MoveOver) -> tuple[Address, ...]:
        """A replica reports its rows, or that an order is carried out. Returns its nodes whose rows are all elsewhere.
        An earlier incarnation's report counts for nothing."""
        worker = report.gang, report.index
        if not self._supervision.is_present(worker, report.incarnation):
            return ()
        if isinstance(report, RowsNews):
            self._tails.update_load(report.index, report.here)
        else:
            self._tails.arrived(report.number, report.num_bytes, report.seconds)
            detail = f"{report.num_rows} rows, {report.num_bytes} bytes of keys and values, {report.seconds:.3f} s"
            detail += f"; refused: {report.refusal}" if report.refusal is not None else ""
            name = self._supervision.spec(worker).name
            self._context.journal.now(EventKind.ROWS_MOVED, gang=report.gang, worker=name, detail=detail)
        return report.away

    def worker_down(self, worker: WorkerKey) -> None:
        """A worker is lost, or not to be counted on."""
        if worker[0] == self._pool:
            self._tails.replica_lost(worker[1])


@dataclass(eq=False)
class _Leaving:
    """A gang that is leaving its devices."""

    to: Pass
    number: int
    since: float
    workers: set[WorkerKey]
    """Who has not left them yet."""


class TurnOrders:
    """Owns the turns that end: whose workers have not left their devices yet."""

    def __init__(self, context: Context, supervision: Supervision) -> None:
        self._context = context
        self._supervision = supervision
        self._leaving: list[_Leaving] = []
        self._ordered = 0

    def pass_on(self) -> bool:
        """Has the workers of gangs whose turn ends leave their devices. Returns whether another gang's turn began, so
        that there may be nodes to hand out."""
        began = False
        for one in self._context.dispatch.next_passes():
            there = [key for key in self._workers_of(one.giver) if worker_name(*key) in self._supervision.addresses()]
            self._leaving.append(_Leaving(one, self._ordered, self._context.now(), set(there)))
            self._ordered += 1
            self._order(self._leaving[-1])
            began |= self._settle()  # of a gang that has no worker now, nobody is on the devices
        return began

    def reported(self, report: Rested) -> None:
        """A worker has left its devices, or could not.

        Raises:
            StageFailed: it could not, too often.
        """
        worker = report.gang, report.index
        if not self._supervision.is_present(worker, report.incarnation):
            return
        found = next((one for one in self._leaving if one.number == report.number and worker in one.workers), None)
        if found is not None and report.error is not None:
            self._supervision.lost(worker, f"did not leave its devices: {report.error}")
        elif found is not None:
            found.workers.discard(worker)
            self._settle()

    def worker_down(self, worker: WorkerKey) -> None:
        """A worker is lost: what it had on its devices is gone, and the next process begins without."""
        gang = self._context.gangs[worker[0]]
        for one in self._leaving:
            one.workers -= set(restart_unit(gang, worker[1]))
        self._settle()

    def check_deadlines(self) -> None:
        """Sends orders again that may be lost, and gives up workers that do not answer.

        Raises:
            StageFailed: that has happened too often.
        """
        for one in list(self._leaving):
            if self._context.now() - one.since < self._context.settings.deadline_s:
                self._order(one)
                continue
            for worker in sorted(one.workers):
                if worker in one.workers:  # of a gang, the first takes the others with it
                    self._supervision.lost(worker, "did not leave its devices in time (cluster.deadline_s)")

    def _order(self, leaving: _Leaving) -> None:
        addresses = self._supervision.addresses()
        names = [worker_name(*worker) for worker in sorted(leaving.workers)]
        order_rest(self._context.client, [addresses[name] for name in names if name in addresses], leaving.number)

    def _settle(self) -> bool:
        """Those whom nobody is waited for any more: the next gang's turn."""
        over = [one for one in self._leaving if not one.workers]
        self._leaving = [one for one in self._leaving if one.workers]
        for one in over:
            self._context.dispatch.passed(one.to.giver)
            detail = f"to {one.to.taker} after {self._context.now() - one.since:.3f} s"
            self._context.journal.now(EventKind.DEVICES_PASSED, gang=one.to.giver, detail=detail)
        return bool(over)

    def _workers_of(self, gang: str) -> list[WorkerKey]:
        return [(gang, index) for index in range(self._context.gangs[gang].workers)]


def _host(address: str) -> str:
    """Of a Dask address."""
    return address.rpartition(":")[0]

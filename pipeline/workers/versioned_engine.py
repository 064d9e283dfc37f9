"""An engine whose weights change while shards come and go: who may be in it with which version.

May import numpy, torch, storage, stages.engines and pipeline.workers.bookkeeping.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager

import numpy as np
import torch

from pipeline.workers.bookkeeping import Clock
from stages.engines.migration import IncomingRows, MigratableRows, MigratedRow
from stages.engines.protocol import (
    NO_VERSION,
    Completion,
    EngineLost,
    GenerationEngine,
    MappedTensors,
    RequestError,
    TensorPlace,
    WeightsError,
)
from stages.engines.row_loads import EngineLoad, MigrationRequest
from storage.weights import BFLOAT16, TensorInfo, WeightBoard, WeightLease

_BFLOAT16_EXPONENT = np.uint16(0x7F80)
"""All ones in a number that is not finite."""


class VersionedEngine:
    """Owns an engine, and says which shards may be in it together.

    Shards of the resident version share the engine; the first of another version waits until they have left, or wait
    for nothing but rows that other replicas finish for them; it loads its weights and lets its own kind in. Dispatch
    hands out the oldest step first, so versions seldom go back and forth.

    With an engine that updates in flight, a shard asks for the oldest version that it may be sampled with: a newer one
    that is resident will do, and the first shard that asks for a newer one, or the driver's order (`take`), loads it
    while the others' rows go on. No version is newer than a row's step: the step's update waits for the row.
    Evaluations take one version only."""

    def __init__(
        self,
        engine: GenerationEngine,
        board: WeightBoard,
        *,
        in_flight: bool = False,
        fetch: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`fetch(version)`: brings a version that the board lacks, if there is anywhere to bring it from."""
        self._engine = engine
        self._in_flight = in_flight
        self._fetch = fetch
        self._movable = engine if isinstance(engine, MigratableRows) else None
        self._board = board
        self._version: int | None = None
        self._names: frozenset[str] = frozenset()
        """Of the tensors that the last version brought."""
        self._spoilt: str | None = None
        """Why no weights of the engine can be trusted."""
        self._loading = False
        self._asleep = False
        """It has left its devices to others."""
        self._inside = 0
        """Shards, and groups of other replicas' rows."""
        self._exact = 0
        """Of those, the ones that take one version only."""
        self._turn = threading.Condition()
        """Held for moments only: the engine's own thread takes it, too."""

    @contextmanager
    def at(self, version: int, clock: Clock, *, exact: bool = False) -> Iterator[GenerationEngine]:
        """The engine with the weights of `version` resident until the block ends, or until all rows that the block has
        in the engine have left it for other replicas. Where the engine updates in flight: of `version` or newer, and
        they may change under way, unless the block needs them `exact`. Raises DamagedWeights, and the weights
        stay as they were, where the version on the board is not what was published."""
        exact = exact or not self._in_flight
        if not self._serves(version, exact) and not self._board.has(version):
            with clock.bookkeeping():  # before its turn comes: the others need not wait for the transfer
                self._fetch(version)
        self._enter(version, clock, exact)
        try:
            yield self._engine
        finally:
            self._leave(exact)

    def take(self, version: int) -> None:
        """Loads a version for the rows in flight, where the engine updates so; those that take one version only are
        waited for. Without rows nothing is done: the next shard brings its version. Raises what `at` does."""
        with self._turn:
            wanted = self._in_flight and self._inside > 0
        if wanted:
            with self.at(version, Clock()):
                pass

    def rest(self) -> None:
        """Gives up what the engine has on its devices, until a shard comes; nothing if it has. Raises RuntimeError
        while shards are in it."""
        with self._turn:
            if self._inside or self._loading:
                raise RuntimeError(f"{self._inside} shards are in the engine: it rests after them")
            if not self._asleep:
                self._engine.sleep()
                self._asleep = True
                if self._engine.version == NO_VERSION:
                    self._version = None

    def _enter(self, version: int, clock: Clock, exact: bool) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._may_enter(version, exact))
            if self._serves(version, exact):
                self._inside += 1
                self._exact += exact
                return
            self._loading = True
        loaded = False
        try:
            if self._asleep:
                with clock.bookkeeping():
                    self._engine.wake()
                self._asleep = False
            if not self._serves(version, exact):
                with clock.bookkeeping(), self._board.open(version) as lease:
                    self._check_names(version, lease.tensors.keys())
                    self._load(version, lease)
                    self._names = frozenset(lease.tensors)
                self._version = version
            loaded = True
        finally:
            with self._turn:
                self._loading = False
                if loaded:
                    self._inside += 1
                    self._exact += exact
                self._turn.notify_all()

    def _load(self, version: int, lease: WeightLease) -> None:
        """Nothing is sampled from weights that are not those that were published. Their bytes are read here once, and
        once by the engine: what takes them in also looks for numbers that are not finite, or where that is another
        process, this one does while it sums them up. Raises EngineLost where a refit has failed half-way, and the
        engine is of no use any more."""
        if self._spoilt is not None:
            raise EngineLost(self._spoilt)
        can = self._engine.capabilities
        elsewhere = "tensors" not in can.sources
        lease.verify(*[check_finite_numbers] if elsewhere else [])
        half_way = can.failed_refit == "rebuild"
        try:
            self._engine.load_weights(version, _tensors(lease, finite=elsewhere))
            half_way = False
        except WeightsError:
            half_way = False  # refused before anything was taken in
            raise
        finally:
            if half_way:
                self._version = None  # nobody is let in any more
                self._spoilt = f"version {version} of the weights came in half-way: the engine must be built anew"

    def _check_names(self, version: int, names: Set[str]) -> None:
        """A tensor that one version brings and the next does not would go on with the older one's numbers. Raises
        WeightsError, naming the tensor."""
        odd = names ^ self._names if self._names else frozenset()
        if odd:
            name = min(odd)
            has, lacks = (version, self._version) if name in names else (self._version, version)
            raise WeightsError(
                f"{name} (and {len(odd) - 1} more) is missing in version {lacks} of the weights; version {has} has it"
            )

    def _serves(self, version: int, exact: bool) -> bool:
        """Whether the engine is awake, with weights that will do."""
        if self._asleep:
            return False
        return self._version is not None and (self._version == version if exact else self._version >= version)

    def _may_enter(self, version: int, exact: bool) -> bool:
        """Whether the resident weights will do, or may be exchanged for others now."""
        if self._loading:
            return False
        if self._serves(version, exact) or (not exact and self._exact == 0):
            return True
        return self._inside == (self._movable.num_calls_migrated if self._movable else 0)

    def _leave(self, exact: bool) -> None:
        with self._turn:
            self._inside -= 1
            self._exact -= exact
            self._turn.notify_all()

    # ---- rows that migrate; only of engines that have `MigratableRows` ----

    @property
    def _rows(self) -> MigratableRows:
        assert self._movable is not None, "this engine's rows cannot migrate"
        return self._movable

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """See `MigratableRows`. To be called before rows migrate: it is also how whoever waits here hears that the last
        row of a call has finished at home."""

        def listen(here: EngineLoad) -> None:
            with self._turn:  # a call may have come to wait for rows elsewhere only
                self._turn.notify_all()
            listener(here)

        self._rows.watch_load(below, listen)

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """See `MigratableRows`."""
        migrated = self._rows.migrate_out(rows)
        with self._turn:
            self._turn.notify_all()
        return migrated

    @contextmanager
    def migrate_in(self, migrated: Sequence[MigratedRow]) -> Iterator[IncomingRows]:
        """Other replicas' rows, whose version stays resident until the block ends (or they have left again). Raises
        RequestError for what cannot be accepted."""
        with self._turn:
            versions = {one.version for one in migrated}
            if self._loading or self._asleep or versions != {self._version}:
                raise RequestError(
                    f"rows of versions {sorted(versions)} do not go on here: {self._version} is resident"
                )
            self._inside += 1
            self._exact += not self._in_flight
        try:
            incoming = self._rows.migrate_in(migrated)
            try:
                yield incoming
            finally:
                incoming.close()
        finally:
            self._leave(not self._in_flight)

    def deliver(self, ticket: int, completion: Completion) -> None:
        """See `MigratableRows`."""
        self._rows.deliver(ticket, completion)

    def give_back(self, tickets: Collection[int]) -> None:
        """See `MigratableRows`."""
        self._rows.give_back(tickets)

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """See `MigratableRows`."""
        return self._rows.wanted(tickets)

    def close(self) -> None:
        self._engine.close()


def check_finite_numbers(info: TensorInfo, numbers: np.ndarray) -> None:
    """For `WeightLease.verify`. Raises WeightsError, naming the tensor, if one of these numbers of it is not finite."""
    if info.dtype == BFLOAT16:
        finite = bool(((numbers & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    else:
        finite = bool(np.isfinite(numbers).all())
    if not finite:
        raise WeightsError(f"{info.name} has numbers that are not finite")


def _tensors(lease: WeightLease, *, finite: bool) -> MappedTensors:
    """The mapped arrays as tensors, without a copy; they are read only, and so is what engines do with them."""
    infos = lease.manifest.tensors
    patterns = {info.name for info in infos if info.dtype == BFLOAT16}
    places = {info.name: TensorPlace(info.name, str(lease.file), info.offset, info.shape, info.dtype) for info in infos}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        tensors = {name: torch.from_numpy(array) for name, array in lease.tensors.items()}
    views = {name: t.view(torch.bfloat16) if name in patterns else t for name, t in tensors.items()}
    return MappedTensors(views, places, finite=finite)

"""An engine for shards of several versions of the weights. Shards of one version share it, and shards of other versions
wait. Also `Clock`, which counts the seconds that a call spends on the store, the ledger and new weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import numpy as np

from stages.engines.embedded.migration import MigratingEngine
from stages.engines.protocol import (
    NO_VERSION,
    EngineLost,
    GenerationEngine,
    MappedTensors,
    RequestError,
    TensorPlace,
    WeightsError,
)
from stages.models.hf_weights import lease_tensors
from storage.weights import BFLOAT16, TensorInfo, WeightBoard, WeightLease


class Clock(threading.local):
    """Counter of the seconds that this thread's call spends on bookkeeping: the store, the ledger and new weights."""

    seconds: float = 0.0

    @contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Add the duration of the block to the field `seconds`. Put this around work on the store, the ledger or new
        weights, to keep its time apart from the time of computing."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


_BFLOAT16_EXPONENT = np.uint16(0x7F80)
"""Exponent bits of a bfloat16: all 1 in infinities and NaN."""


class VersionedEngine:
    """Owns an engine and decides which shards may use it together. The resident version is the version of the weights
    that the engine has.

    Shards that need the resident version use the engine at the same time. A shard that needs another version waits
    until each of them is finished, or has all its unfinished rows in other replicas. Then it loads its version, and
    other shards of this version may use the engine too. The driver sends the oldest step first, so the resident version
    seldom changes.

    Some engines take new weights while rows are in flight. With them, a shard states the oldest version that its rows
    may be sampled with, and any newer resident version is allowed too. A newer version is loaded by the first shard
    that needs it, or by an order of the driver (`load_in_flight`). The rows in flight continue. A row of step i never
    gets a version above i, because version i + 1 is trained from this row. Evaluations need exactly one version.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        board: WeightBoard,
        *,
        in_flight: bool = False,
        fetch: Callable[[int], None] = lambda version: None,
    ) -> None:
        """`fetch(version)`: called with a version that the board lacks. The function copies the version from another
        host, if another host has the version."""
        self._engine = engine
        self._in_flight = in_flight
        self._fetch = fetch
        self.migratable = engine if isinstance(engine, MigratingEngine) else None
        """The same engine, if its rows can migrate (see `ReplicaRows`)."""
        self._board = board
        self._version: int | None = None
        self._names: frozenset[str] = frozenset()
        """Names of the tensors in the version that was loaded last. Empty before the first load."""
        self._broken: str | None = None
        """Reason why the engine cannot be used any more. None if it can be used."""
        self._loading = False
        self._asleep = False
        """True while the engine has freed its devices."""
        self._inside = 0
        """Number of users of the engine now: shards of this replica, and groups of rows from other replicas."""
        self._exact = 0
        """Number of the users counted in `_inside` that need exactly one version."""
        self._changed = threading.Condition()
        """Guards the fields above. Never held for long, since the engine's thread takes it too."""

    @contextmanager
    def engine_at(self, version: int, clock: Clock, *, exact: bool = False) -> Iterator[GenerationEngine]:
        """Return a context that gives the engine with the weights of `version`. The weights stay until the block ends,
        or until all rows of the block have left for other replicas. If the engine updates in flight and `exact` is
        False, a newer version is allowed too, and the weights may change within the block. If the version on the board
        is not what was published, the engine keeps the old weights, and DamagedWeights is raised."""
        exact = exact or not self._in_flight
        if not self._is_allowed(version, exact) and not self._board.has(version):
            with clock.bookkeeping():  # before this shard enters, so that other shards do not wait for the transfer
                self._fetch(version)
        self._enter(version, clock, exact)
        try:
            yield self._engine
        finally:
            self._leave(exact)

    def load_in_flight(self, version: int) -> None:
        """Load a version while rows are in flight, if the engine can do this. Does nothing if no shard uses the engine,
        since the next shard loads the version that it needs.

        Some shards, such as evaluations, need exactly one version. While such a shard uses the engine, this method
        waits. Raises the errors of `engine_at`.
        """
        with self._changed:
            wanted = self._in_flight and self._inside > 0
        if wanted:
            with self.engine_at(version, Clock()):
                pass

    def sleep(self) -> None:
        """Free the engine's devices until the next shard. Does nothing if the devices are already free. Raises
        RuntimeError if the engine has shards or is loading weights."""
        with self._changed:
            if self._inside or self._loading:
                raise RuntimeError(f"{self._inside} shards are in the engine: it sleeps after them")
            if not self._asleep:
                self._engine.sleep()
                self._asleep = True
                if self._engine.version == NO_VERSION:
                    self._version = None

    def _enter(self, version: int, clock: Clock, exact: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._may_enter(version, exact))
            if self._is_allowed(version, exact):
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
            if not self._is_allowed(version, exact):
                with clock.bookkeeping(), self._board.open(version) as lease:
                    self._check_names(version, lease.tensors.keys())
                    self._load(version, lease)
                    self._names = frozenset(lease.tensors)
                self._version = version
            loaded = True
        finally:
            with self._changed:
                self._loading = False
                if loaded:
                    self._inside += 1
                    self._exact += exact
                self._changed.notify_all()

    def _load(self, version: int, lease: WeightLease) -> None:
        """Verify the published weights and load them. Bytes are read here for the checksum, and by the engine, which
        also checks that numbers are finite; here too if it cannot load this process's tensors. Raises EngineLost after
        a load that failed half-way."""
        if self._broken is not None:
            raise EngineLost(self._broken)
        can = self._engine.capabilities
        elsewhere = "tensors" not in can.sources
        lease.verify(*[check_finite_numbers] if elsewhere else [])
        half_way = can.failed_refit == "rebuild"
        try:
            self._engine.load_weights(version, _tensors(lease, finite=elsewhere))
            half_way = False
        except WeightsError:
            half_way = False  # refused before anything was loaded
            raise
        finally:
            if half_way:
                self._version = None  # no shard may enter any more
                self._broken = f"a load of weights v{version} failed half-way: the engine must be built again"

    def _check_names(self, version: int, names: Set[str]) -> None:
        """Raise WeightsError if this version's tensors have other names than those loaded before: a missing tensor
        would keep its old numbers."""
        differing = names ^ self._names if self._names else frozenset()
        if differing:
            name = min(differing)
            has, lacks = (version, self._version) if name in names else (self._version, version)
            raise WeightsError(f"{name} (and {len(differing) - 1} more) is missing in weights v{lacks}; v{has} has it")

    def _is_allowed(self, version: int, exact: bool) -> bool:
        """Return True if the engine is awake with this version, or with a newer one unless `exact`."""
        if self._asleep:
            return False
        return self._version is not None and (self._version == version if exact else self._version >= version)

    def _may_enter(self, version: int, exact: bool) -> bool:
        """Return True if a shard that needs this version may use the engine now: its version is allowed, weights may
        change in flight, or all shards in it have their unfinished rows in other replicas. Never while weights are
        loaded."""
        if self._loading:
            return False
        if self._is_allowed(version, exact) or (not exact and self._exact == 0):
            return True
        return self._inside == (self.migratable.num_calls_migrated if self.migratable else 0)

    def _leave(self, exact: bool) -> None:
        with self._changed:
            self._inside -= 1
            self._exact -= exact
            self._changed.notify_all()

    # ---- rows that migrate ----

    def rows_left(self) -> None:
        """Wake the shards that wait to load another version of the weights. Call this when rows have migrated or
        finished, because then perhaps no row here needs the resident version any more."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def resident(self, versions: Set[int]) -> Iterator[None]:
        """Return a context in which rows that arrived from another replica use the engine. The engine keeps its version
        until the block ends, or until all these rows have migrated on. But an engine that takes new weights in flight
        may load a newer version within the block.

        `versions`: the versions that the rows need. Raises RequestError if the rows need any version other than the
        resident one, or if the engine sleeps or is loading weights.
        """
        with self._changed:
            if self._loading or self._asleep or versions != {self._version}:
                raise RequestError(
                    f"rows of versions {sorted(versions)} cannot continue here: {self._version} is resident"
                )
            self._inside += 1
            self._exact += not self._in_flight
        try:
            yield
        finally:
            self._leave(not self._in_flight)

    def close(self) -> None:
        self._engine.close()


def check_finite_numbers(info: TensorInfo, numbers: np.ndarray) -> None:
    """Raise WeightsError if one of a tensor's numbers is not finite. The message names the tensor. `WeightLease.verify`
    calls this function."""
    if info.dtype == BFLOAT16:
        finite = bool(((numbers & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    else:
        finite = bool(np.isfinite(numbers).all())
    if not finite:
        raise WeightsError(f"{info.name} has numbers that are not finite")


def _tensors(lease: WeightLease, *, finite: bool) -> MappedTensors:
    """Return the mapped arrays as read-only tensors. `finite`: all numbers are known to be finite."""
    infos = lease.manifest.tensors
    places = {info.name: TensorPlace(info.name, str(lease.file), info.offset, info.shape, info.dtype) for info in infos}
    return MappedTensors(lease_tensors(lease), places, finite=finite)

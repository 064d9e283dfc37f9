"""Free storage during a run: delete what `storage.keep` does not keep, and compact the ledger.

A step is finished when all its nodes are done. The window is the steps that are in progress. A segment is one file with
the commit records of 16 steps.

    rollouts: 0 ········ 29 │ 30 ·············· 44 │ 45 46 47
              arrays gone   │ kept: a recovery may │ in the window
                            │ train on them again  └─ finished_until
                            └─ `first_step_to_keep`: no recovery trains again on rollouts of earlier
                               steps, and at least `storage.keep.rollouts` finished steps are kept

    ledger:   0 ···· 15 │ 16 ···· 31 │ 32 ···· 44 │ 45 46 47
                closed  │    open    │  finished  │ in the window
                        └─ closed (moved into a segment) when the steps up to 31 + n are finished,
                           where n is the result of `_steps_before_closing`

Exports: the last version is exported, and every n-th version with `export.every` = n. The newest `storage.keep.exports`
exports stay. The export of the best version so far always stays.

If `storage.keep.rollouts` is set, every evaluated version is exported too, because its weights could not be computed
again later. An export that was made only for this reason is deleted again, unless its version is the best.

Deletions run in a thread of `Retention`. Segments are closed in the driver's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module

from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.graph.graph import GraphSpec, evaluate_nodes, is_evaluated, step_nodes, update_stages, window_size
from pipeline.observe.evaluations import Evaluation, best_evaluation
from pipeline.observe.history import History
from stages.models.protocol import Role
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.errors import StoreError
from storage.ledger import SPAN, Ledger, first_step
from storage.rollouts import KEEP


def is_usable(checkpoints: Checkpoints, ledger: Ledger, role: Role, version: int) -> bool:
    """Return True if a checkpoint is as it was saved, and has the weights that were committed
    (`pipeline.workers.updates.is_usable`). That module loads torch, so it is imported only when this function is
    called: few drivers need it, and only `resume --from-checkpoint` needs it at the start."""
    return bool(import_module("pipeline.workers.updates").is_usable(checkpoints, ledger, role, version))


def first_step_to_keep(spec: GraphSpec, keep: int, finished_until: int, saved: Collection[int]) -> int:
    """Return the first step whose rollouts must stay. Rollouts are needed after the loss of a trainer, after damage to
    a checkpoint, when a version is published again, and for `resume --from-checkpoint`.

    The result is the smallest of three steps, but at least 0:
    - `finished_until - keep`
    - `finished_until` minus twice the number of steps in flight (`window_size`), because an outdated attempt may still
      be reading the rollouts of these steps
    - the version of the second-newest usable checkpoint, or of the only one; 0 if there is none

    A recovery may have to make version `finished_until - spec.staleness` again, the oldest version that unfinished
    nodes read. It begins at a checkpoint of this version or an older one, and trains on the steps in between. So a
    checkpoint is usable if it is in `saved` and not newer than this version. The recovery takes the newest usable
    checkpoint, or the one before if the newest is damaged.

    Args:
        keep: `storage.keep.rollouts`: minimum number of finished steps to keep.
        finished_until: step before which all nodes are done.
        saved: versions of which every trained model has a sound checkpoint.
    """
    usable = sorted(version for version in saved if version <= finished_until - spec.staleness)
    if not usable:
        return 0
    return max(0, min(finished_until - max(keep, 2 * window_size(spec)), usable[-2:][0]))


class Retention:
    """Owns the thread that deletes what `storage.keep` does not keep. There is no thread if `storage.keep` limits
    neither rollouts nor exports."""

    def __init__(self, config: RunConfig, history: History, warn: Callable[[str], None]) -> None:
        """`warn`: function that takes the text of an error. It is called if data could not be deleted, once for each
        different text, in the thread that calls the public methods of this class. The run continues, and the data
        stays."""
        keep = self._keep = config.storage.keep
        self._history = history
        self._warn = warn
        self._warned: set[str] = set()
        self._checkpoints, self._exports = config.stored.checkpoints(), config.stored.exports()
        self._config = config
        self._evaluations: dict[int, Evaluation] = {}
        """Version -> its complete evaluation."""
        self._sound: dict[int, bool] = {}
        """Version -> True if every byte of its checkpoints (of all trained models) was read and is sound."""
        self._over_until = 0
        self._pass: Future[None] | None = None
        asked = keep.rollouts is not None or keep.exports is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retention") if asked else None

    def on_steps_finished(self, step: int) -> None:
        """Record that all nodes of the steps before `step` are done. Begin to delete, unless a deletion is in progress.
        Does not wait."""
        self._over_until = step
        if self._thread is None or (self._pass is not None and not self._pass.done()):
            return
        self._collect_result()
        self._pass = self._thread.submit(self._delete, step)

    def delete_at_end(self) -> None:
        """Delete at the end of a run what `storage.keep` does not keep, and wait until it is deleted."""
        if self._thread is not None:
            self._collect_result()
            self._pass = self._thread.submit(self._delete, self._over_until)
            self._collect_result()

    def close(self) -> None:
        """Wait for deletions in progress."""
        if self._thread is not None:
            self._thread.shutdown()

    def _collect_result(self) -> None:
        if self._pass is None:
            return
        try:
            self._pass.result()
        except (StoreError, OSError) as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                self._warn(f"storage.keep: what may go could not be removed: {error}")
        self._pass = None

    def _delete(self, finished_until: int) -> None:
        if self._keep.rollouts is not None:
            self._delete_rollouts(self._keep.rollouts, finished_until)
        last, every = self._history.spec.steps, self._config.export.every
        if self._keep.rollouts is not None:
            lost = self._read_evaluations().keys() - self._best_version()
            self._exports.drop(v for v in lost if v != last and not (every and v % every == 0))
        if self._keep.exports is not None:
            self._exports.drop({*self._exports.versions()[: -self._keep.exports]} - self._best_version())

    def _read_evaluations(self) -> Mapping[int, Evaluation]:
        """Return version -> its evaluation, for all versions whose evaluation is complete."""
        for version in self._history.evaluated_versions():
            evaluation = None if version in self._evaluations else self._history.read_evaluation(version)
            if evaluation is not None and evaluation.kl is not None:
                self._evaluations[version] = evaluation
        return self._evaluations

    def _best_version(self) -> set[int]:
        """Return a set with the best evaluated version so far. Empty if there is none."""
        best = best_evaluation(self._read_evaluations().values(), self._config.evaluate.select.max_kl)
        return set() if best is None else {best.version}

    def _delete_rollouts(self, keep: int, finished_until: int) -> None:
        spec, before = self._history.spec, self._history.store.dropped_before()
        saved = sorted(set.intersection(*(set(self._checkpoints.versions(role)) for role in update_stages(spec))))
        if first_step_to_keep(spec, keep, finished_until, saved) > before:  # avoids reading checkpoints for nothing
            until = first_step_to_keep(
                spec, keep, finished_until, [version for version in saved if self._is_sound(version)]
            )
            if until > before:
                self._history.store.drop(until)

    def _is_sound(self, version: int) -> bool:
        if version not in self._sound:
            ledger, trained = self._history.ledger, update_stages(self._history.spec)
            self._sound[version] = all(is_usable(self._checkpoints, ledger, role, version) for role in trained)
        return self._sound[version]


def check_evaluations(config: RunConfig, history: History) -> None:
    """Raise ConfigError if a resumed run asks to evaluate an earlier version that cannot be made again."""
    before, saved = history.store.dropped_before(), config.stored.checkpoints().versions("policy")
    made, spec = history.newest_version(), config.graph()
    asked = [version for version in range(1, made + 1) if is_evaluated(spec, version)]
    committed = set(history.ledger.addresses())
    missing = [v for v in asked if not committed.issuperset(node.address for node in evaluate_nodes(spec, v))]
    lost = [v for v in missing if before and not any(c == v or before <= c <= v for c in saved)]
    if lost:
        named = ", ".join(f"v{version}" for version in lost[:5]) + (" ..." if len(lost) > 5 else "")
        raise ConfigError(
            "evaluate.every",
            f"given {config.evaluate.every}; {named} would have to be made again from rollouts that {KEEP} has dropped "
            f"(all before step {before})",
        )


# ---- Compacting the ledger -------------------------------------------------------------------------------


def is_complete(spec: GraphSpec, ledger: Ledger, unneeded: Collection[Address] = frozenset()) -> bool:
    """Return True if every node of the run, except the unneeded ones, has its commit."""
    first = ledger.closed_until()
    # Read closed records too: a segment before closed ones may have been reopened.
    committed = {*ledger.addresses(from_step=first), *unneeded}
    nodes = (node for step in range(max(0, first - 1), spec.steps) for node in step_nodes(spec, step))
    return all(node.address.step < first or node.address in committed for node in nodes)


def close_finished_segments(spec: GraphSpec, ledger: Ledger, unneeded: Collection[Address]) -> None:
    """Close the finished segments of the ledger that damaged records have opened again. `unneeded`: addresses of lost
    outputs that the run can do without (`integrity.unneeded_outputs`). Their nodes count as done. Do nothing if
    `unneeded` is empty.

    Call it before workers start. The run then begins after these segments, as if no record had been damaged.
    """
    if not unneeded:
        return
    while True:
        first = ledger.closed_until()
        committed = {*ledger.addresses(from_step=first), *unneeded}
        over = range(max(0, first - 1), first + SPAN + _steps_before_closing(spec))
        nodes = [node.address for step in over if step < spec.steps for node in step_nodes(spec, step)]
        if over.stop > spec.steps or any(first <= address.step and address not in committed for address in nodes):
            return
        closed = (address for address in nodes if first <= address.step < first + SPAN)
        ledger.close(first, [address for address in closed if address not in unneeded])


def _steps_before_closing(spec: GraphSpec) -> int:
    """Return how many later steps must be finished before a segment is closed. By then a late attempt at one of its
    nodes is outdated, and a resumed run, which runs no nodes of closed segments, need not publish its versions
    again."""
    return 2 * window_size(spec)


class LedgerCompactor:
    """Closes the ledger's segments during a run. Owns the addresses of done nodes whose records are in no closed
    segment yet."""

    def __init__(self, spec: GraphSpec, ledger: Ledger, unneeded: Collection[Address] = frozenset()) -> None:
        """`unneeded`: nodes whose outputs were lost and are not needed any more. They count as done, although the
        ledger has no record of them."""
        self._ledger = ledger
        self._unneeded = unneeded
        self._steps_before_closing = _steps_before_closing(spec)
        self.first_step = ledger.closed_until()
        """First step that is in no closed segment. All earlier steps are over."""
        self._over: set[int] = set()
        self._next_over = self.first_step
        self._addresses: defaultdict[int, list[Address]] = defaultdict(list)

    @property
    def first_open_step(self) -> int:
        """First step that is not over: a node of the step is not done."""
        return self._next_over

    def on_step_finished(self, step: int, addresses: Iterable[Address]) -> None:
        """Record that all nodes of a step are done, and close the segments that can be closed.

        `addresses`: addresses of the step's nodes. The address of a publication or an evaluation may have the number of
        the next step. Its record then belongs to the segment of that next step.
        """
        for address in addresses:
            if address.step >= self.first_step and address not in self._unneeded:
                self._addresses[first_step(address.step)].append(address)
        self._over.add(step)
        while self._next_over in self._over:
            self._over.remove(self._next_over)
            self._next_over += 1
        while self.first_step + SPAN + self._steps_before_closing <= self._next_over:
            self._ledger.close(self.first_step, self._addresses.pop(self.first_step))
            self.first_step += SPAN

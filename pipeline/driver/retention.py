"""Lets go what `storage.keep` does not ask to be kept, behind the run.

    steps:   0 ······ 29 │ 30 ············· 44 │ 45 46 47
             arrays gone │ kept: a recovery may │ in the window
                         │ train on them again  └─ over_until
                         └─ `first_kept`: an older one of two sound checkpoints of each trained model, none newer than
                            the oldest version of the weights that an open node may read

So a trainer that is lost, a version that must be published again, a checkpoint that turns out damaged and
`resume --from-checkpoint` all find what they need.

    exports: what `export.every` asks for, and the last ── the newest `storage.keep.exports` of them stay
             under `storage.keep.rollouts` every version that is evaluated, since it could not be rebuilt later: one
             that turns out not to be the best goes again
             the best version so far stays, whatever is asked

May import pipeline.config, pipeline.graph, pipeline.observe, pipeline.workers.updates and storage.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.graph import GraphSpec, evaluate_nodes, evaluated, update_stages, window
from pipeline.observe.evaluations import Evaluation, best_evaluation
from pipeline.observe.history import History
from pipeline.workers.updates import is_usable
from storage.checkpoints import Checkpoints, version_of
from storage.errors import StoreError
from storage.retention import KEY

_LEAVING = ".leaving-"
"""Of an export that is being removed: it has no version's name any more."""


def first_kept(spec: GraphSpec, keep: int, over_until: int, saved: Collection[int]) -> int:
    """The first step whose rollouts must stay. `over_until`: before it every node of every step is done. `saved`:
    versions that every trained model has a sound checkpoint of.

    Nodes of the steps from `over_until` on read versions from `over_until` - eta on. What recovers the oldest of them
    begins at a checkpoint that is no newer; of those, one may turn out damaged, so that the one before it is the floor.
    The margin is that of the ledger's books: an attempt that does not count any more may still be reading.
    """
    usable = sorted(version for version in saved if version <= over_until - spec.staleness)
    if not usable:
        return 0
    return max(0, min(over_until - max(keep, 2 * window(spec)), usable[-2:][0]))


class Retention:
    """Owns a thread, if there is anything to let go, in which files are looked for and removed."""

    def __init__(self, config: RunConfig, history: History, warn: Callable[[str], None]) -> None:
        """`warn`: called in the caller's thread with what went wrong; nothing is let go then, and the run goes on."""
        keep = self._keep = config.storage.keep
        self._paths = paths = RunPaths(config.run_dir)
        self._history = history
        self._warn = warn
        self._warned: set[str] = set()
        self._checkpoints = Checkpoints(paths.checkpoints)
        self._config = config
        self._evaluations: dict[int, Evaluation] = {}
        """Of those that are complete, by version."""
        self._sound: dict[int, bool] = {}
        """By version: every byte of the trained models' checkpoints was read once."""
        self._over_until = 0
        self._pass: Future[None] | None = None
        asked = keep.rollouts is not None or keep.exports is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retention") if asked else None

    def over_until(self, step: int) -> None:
        """Every node of the steps before this one is done. Returns at once."""
        self._over_until = step
        if self._thread is None or (self._pass is not None and not self._pass.done()):
            return
        self._settle()
        self._pass = self._thread.submit(self._let_go, step)

    def finish(self) -> None:
        """For a run that has come to its end: waits until all is gone that goes."""
        if self._thread is not None:
            self._settle()
            self._pass = self._thread.submit(self._let_go, self._over_until)
            self._settle()

    def close(self) -> None:
        """Waits for what is being removed."""
        if self._thread is not None:
            self._thread.shutdown()

    def _settle(self) -> None:
        if self._pass is None:
            return
        try:
            self._pass.result()
        except (StoreError, OSError) as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                self._warn(f"storage.keep: what may go could not be removed: {error}")
        self._pass = None

    def _let_go(self, over_until: int) -> None:
        if self._keep.rollouts is not None:
            self._drop_rollouts(self._keep.rollouts, over_until)
        last, every = self._history.spec.steps, self._config.export.every
        directory = self._paths.weights(0).parent
        if self._keep.rollouts is not None:
            lost = self._evaluated().keys() - self._best()
            drop_exports(directory, [v for v in lost if v != last and not (every and v % every == 0)])
        if self._keep.exports is not None:
            newest = exported(directory)[-self._keep.exports :]
            drop_exports(directory, set(exported(directory)) - {*newest} - self._best())

    def _evaluated(self) -> Mapping[int, Evaluation]:
        """The evaluations that are complete, by version."""
        for version in self._history.evaluated_versions():
            evaluation = None if version in self._evaluations else self._history.evaluation(version)
            if evaluation is not None and evaluation.kl is not None:
                self._evaluations[version] = evaluation
        return self._evaluations

    def _best(self) -> set[int]:
        """The best version so far, if there is one."""
        best = best_evaluation(self._evaluated().values(), self._config.evaluate.select.max_kl)
        return set() if best is None else {best.version}

    def _drop_rollouts(self, keep: int, over_until: int) -> None:
        spec, before = self._history.spec, self._history.store.dropped_before()
        saved = sorted(set.intersection(*(set(self._checkpoints.versions(role)) for role in update_stages(spec))))
        if first_kept(spec, keep, over_until, saved) > before:  # else there is no need to read them
            until = first_kept(spec, keep, over_until, [version for version in saved if self._is_sound(version)])
            if until > before:
                self._history.store.drop(until)

    def _is_sound(self, version: int) -> bool:
        if version not in self._sound:
            ledger, trained = self._history.ledger, update_stages(self._history.spec)
            self._sound[version] = all(is_usable(self._checkpoints, ledger, role, version) for role in trained)
        return self._sound[version]


def exported(directory: Path) -> list[int]:
    """The versions that are exported there, the oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(version for path in found if (version := version_of(path)) is not None)


def drop_exports(directory: Path, versions: Iterable[int]) -> None:
    """Removes exported versions, and what an earlier call left half removed."""
    for left in directory.glob(f"{_LEAVING}*"):
        shutil.rmtree(left, ignore_errors=True)
    for version in {*versions}.intersection(exported(directory)):
        leaving = directory / f"{_LEAVING}v{version:06d}"
        os.replace(directory / f"v{version:06d}", leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def check_evaluations(config: RunConfig, history: History) -> None:
    """For a run that goes on with other evaluations than before. Raises ConfigError where a version that is past, and
    is to be evaluated, cannot be had any more."""
    before, saved = history.store.dropped_before(), Checkpoints(RunPaths(config.run_dir).checkpoints).versions("policy")
    made, spec = history.versions_made(), config.graph()
    asked = [version for version in range(1, made + 1) if evaluated(spec, version)]
    there = set(history.ledger.addresses())
    missing = [v for v in asked if not there.issuperset(node.address for node in evaluate_nodes(spec, v))]
    lost = [v for v in missing if before and not any(c == v or before <= c <= v for c in saved)]
    if lost:
        named = ", ".join(f"v{version}" for version in lost[:5]) + (" ..." if len(lost) > 5 else "")
        raise ConfigError(
            "evaluate.every",
            f"given {config.evaluate.every}; {named} would have to be made again from rollouts that {KEY} has dropped "
            f"(all before step {before})",
        )

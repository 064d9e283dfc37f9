"""Data that a run may delete, and the deletion behind the run; without processes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.retention import Retention, check_evaluations, first_step_to_keep
from pipeline.errors import ConfigError
from pipeline.graph.graph import GraphSpec
from pipeline.observe.history import History
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import provenance_here
from storage.config import KeepConfig, Layout, Layouts, StorageConfig
from storage.exports import Exports
from storage.ledger import Ledger
from storage.records import ReferenceLogprobs, Scores
from storage.rollouts import RolloutStore
from tests.support.commits import save_checkpoint
from tests.support.configs import arguments, write_config
from tests.support.sampled_rows import rollout_of

STEPS = 20
WHERE = provenance_here(seed=0, config_hash="")


@pytest.mark.parametrize(
    ("staleness", "keep", "saved", "first"),
    [
        (0, 1, {10, 15}, 10),  # v15 may turn out damaged: then v10 is gone back to
        (0, 1, {15}, 15),
        (0, 1, set(), 0),
        (0, 12, {10, 15}, 8),
        (0, 1, {18, 19}, 16),  # the margin of 2 windows
        (4, 1, {10, 14, 17}, 8),  # margin 12
        (4, 1, {5, 17, 18}, 5),  # steps from 20 on read versions from 16 on: of no use for these are v17 and v18
        (1, 30, {10, 15}, 0),
    ],
)
def test_what_must_stay(staleness: int, keep: int, saved: set[int], first: int) -> None:
    spec = GraphSpec(steps=100, shards=1, staleness=staleness)
    assert first_step_to_keep(spec, keep, STEPS, saved) == first


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


@pytest.fixture
def history(paths: RunPaths) -> History:
    """A history of 20 steps, with a checkpoint of both models every 5."""
    ledger = Ledger(str(paths.root / "ledger"))
    store = RolloutStore(str(paths.root), ledger, Layouts(Layout(1, 2, 3), Layout(1, 2, 3)))
    for step in range(STEPS):
        store.write(Address("score", step), Scores(np.full(2, step, np.float32)), WHERE)
        for role in ("policy", "critic"):
            store.commit_only(Address(f"update_{role}", step), WHERE, digest=f"{role}{step + 1}")
            if (step + 1) % 5 == 0:
                save_checkpoint(Checkpoints(paths.checkpoints), role, step + 1, f"{role}{step + 1}")
    return History(GraphSpec(steps=30, shards=1, staleness=0), ledger, store, rows_per_step=2)


def let_go(keep: KeepConfig, paths: RunPaths, history: History, max_kl: float | None = None) -> list[str]:
    """Return the warnings of a driver that has reached step 20."""
    warnings: list[str] = []
    config = RunConfig(name=paths.root.name, runs_dir=str(paths.root.parent), storage=StorageConfig(keep=keep))
    config.evaluate.select.max_kl = max_kl
    retention = Retention(config, history, warnings.append)
    for step in range(STEPS + 1):
        retention.on_steps_finished(step)
    retention.delete_at_end()
    retention.close()
    return warnings


def steps_there(paths: RunPaths) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (paths.root / "rollouts.zarr").glob("step_*"))


def test_everything_stays_by_default(paths: RunPaths, history: History) -> None:
    assert let_go(KeepConfig(), paths, history) == []
    assert steps_there(paths) == list(range(STEPS))
    assert history.store.dropped_before() == 0


def test_steps_go_up_to_the_checkpoint_before_the_newest(paths: RunPaths, history: History) -> None:
    assert let_go(KeepConfig(rollouts=1), paths, history) == []
    assert (steps_there(paths), history.store.dropped_before()) == (list(range(15, STEPS)), 15)


def test_without_a_critic_the_policys_checkpoints_say_what_stays(paths: RunPaths, history: History) -> None:
    shutil.rmtree(paths.checkpoints / "critic")
    assert let_go(KeepConfig(rollouts=1), paths, history) == []
    assert history.store.dropped_before() == 0, "with one there would be nothing to go back to"
    without = replace(history, spec=replace(history.spec, has_critic=False))
    assert let_go(KeepConfig(rollouts=1), paths, without) == []
    assert history.store.dropped_before() == 15


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_damaged_or_foreign_checkpoint_does_not_count(paths: RunPaths, history: History, role: str) -> None:
    (paths.checkpoints / role / "v000020" / "model.bin").write_text("weightz 20")
    shutil.rmtree(paths.checkpoints / role / "v000015")
    save_checkpoint(Checkpoints(paths.checkpoints), role, 15, "another run's")
    assert let_go(KeepConfig(rollouts=1), paths, history) == []
    assert history.store.dropped_before() == 5


def test_what_cannot_be_removed_is_said_once_and_ends_nothing(paths: RunPaths, history: History) -> None:
    (paths.root / "dropped.json").write_text("{}")
    (warning,) = let_go(KeepConfig(rollouts=1), paths, history)
    assert "storage.keep: what may go could not be removed" in warning
    assert "dropped.json: " in warning
    assert steps_there(paths) == list(range(STEPS))


def test_the_newest_exports_stay(paths: RunPaths, history: History) -> None:
    exports = paths.weights(0).parent
    for name in ("v000001", "v000003", "v000010", ".leaving-v000000", "notes"):
        (exports / name).mkdir(parents=True)
        (exports / name / "model.safetensors").touch()
    assert let_go(KeepConfig(exports=2), paths, history) == []
    assert sorted(path.name for path in exports.iterdir()) == ["notes", "v000003", "v000010"]
    Exports(exports).drop([7])
    Exports(paths.root / "none").drop([1])
    assert len(list(exports.iterdir())) == 3


def evaluate(history: History, version: int, score: float, kl: float) -> None:
    """Commits an evaluation of two rows of one token."""
    mask = np.array([[False, True, False]] * 2)
    rollout = rollout_of(np.ones((2, 3)), mask, version=version)
    records = {
        "evaluate": rollout,
        "evaluate_score": Scores(np.full(2, score, np.float32)),
        "evaluate_reference": ReferenceLogprobs(np.where(mask, -1 - kl, 0).astype(np.float32)),
    }
    for stage, record in records.items():
        history.store.write(Address(stage, version), record, WHERE)


@pytest.mark.parametrize(
    ("keep", "max_kl", "left"),
    [
        (KeepConfig(), None, [5, 10, 12, 15, 17]),  # all can be had again
        (KeepConfig(rollouts=1), None, [10, 12, 17]),  # 5 and 15 are evaluated, and not the best
        (KeepConfig(rollouts=1), 4.0, [5, 12, 17]),  # 10 and 15 are beyond the budget
        (KeepConfig(rollouts=1), 0.5, [12, 17]),  # all are
        (KeepConfig(exports=1), None, [10, 17]),
        (KeepConfig(exports=2), 4.0, [5, 15, 17]),
        (KeepConfig(rollouts=1, exports=1), None, [10, 17]),
    ],
)
def test_best_stays(paths: RunPaths, history: History, keep: KeepConfig, max_kl: float | None, left: list[int]) -> None:
    """Version 17 is not evaluated to its end yet."""
    for version, score, kl in ((5, 0.2, 1.0), (10, 0.9, 5.0), (15, 0.4, 9.0)):
        evaluate(history, version, score, kl)
    history.store.write(Address("evaluate_score", 17), Scores(np.full(2, 9.0, np.float32)), WHERE)
    exports = paths.weights(0).parent
    for version in (5, 10, 12, 15, 17):
        paths.weights(version).mkdir(parents=True)
    assert let_go(keep, paths, history, max_kl) == []
    assert sorted(int(path.name[1:]) for path in exports.iterdir()) == left


def test_evaluations_that_would_need_what_is_gone_are_refused(tmp_path: Path) -> None:
    """Versions 1 and 3 have checkpoints. Version 2 would be trained from version 1 on rollouts that are gone."""
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    config = load_config([file], [*changes, "steps=4", "evaluate.every=1"])
    paths, history = RunPaths(config.run_dir), open_history(config)
    for step in range(4):
        history.store.commit_only(Address("update_policy", step), WHERE, digest=f"policy{step + 1}")
    for version in (1, 3):
        save_checkpoint(Checkpoints(paths.checkpoints), "policy", version, f"policy{version}")
    check_evaluations(config, history)
    history.store.drop(3)
    with pytest.raises(ConfigError, match=r"evaluate\.every.*v2 would have to be made again.*before step 3"):
        check_evaluations(config, history)

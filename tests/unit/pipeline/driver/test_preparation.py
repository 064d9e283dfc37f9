"""A run's directory before its workers start, where it goes back to a checkpoint; without processes."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import Preflight, preflight
from pipeline.config.run import RunConfig
from pipeline.config.stored import RunStorage
from pipeline.driver.integrity import plan_rewind
from pipeline.driver.preparation import prepare
from pipeline.driver.results import open_history
from pipeline.driver.session import refuse_unwritable_directory
from pipeline.errors import ConfigError
from pipeline.graph.graph import GraphSpec, run_nodes
from pipeline.observe.history import History
from storage import files
from storage.address import Address
from storage.checkpoints import MANIFEST, Checkpoints
from storage.commits import provenance_here
from storage.config import Layout, Layouts
from storage.exports import RECORD, write_sums
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from tests.support.commits import save_checkpoint
from tests.support.configs import arguments, write_config

WHERE = provenance_here(seed=0, config_hash="")
ROLES = ("policy", "critic")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    config = load_config([file], [*changes, "steps=4", "evaluate.every=0", "staleness=0"])
    config.run_dir.mkdir(parents=True)
    return config


@pytest.fixture
def begun(config: RunConfig) -> Preflight:
    """All four steps are committed, with checkpoints of versions 2 and 4."""
    return begin(config)


def begin(config: RunConfig) -> Preflight:
    checked = preflight(config)
    prepare(config, checked, resume=False, from_checkpoint=False)
    store = open_history(config).store
    for node in run_nodes(config.graph()):
        stage, step = node.address.stage, node.address.step
        store.commit_only(node.address, WHERE, digest=f"{stage.removeprefix('update_')}{step + 1}")
    for role in ROLES:
        for version in (2, 4):
            save_checkpoint(config.stored.checkpoints(), role, version, f"{role}{version}")
    return checked


def updates(config: RunConfig) -> list[int]:
    return [address.step for address in open_history(config).ledger.addresses("update_policy")]


def test_a_checkpoint_that_is_not_of_this_runs_weights_is_not_gone_back_to(config: RunConfig, begun: Preflight) -> None:
    """The trainer would not load it, and would have to train what it cannot repeat."""
    newest = RunPaths(config.run_dir).checkpoints / "critic" / "v000004"
    newest.rename(newest.with_name("kept"))
    save_checkpoint(config.stored.checkpoints(), "critic", 4, "another run's")
    ready = prepare(config, begun, resume=True, from_checkpoint=True)
    assert any("resumed from checkpoint v2: " in warning for warning in ready.warnings)
    assert updates(config) == [0, 1]


def test_a_damaged_record_does_not_keep_a_run_from_going_back(config: RunConfig, begun: Preflight) -> None:
    """The record is set aside first, as in a plain resume."""
    paths = RunPaths(config.run_dir)
    record = paths.root / "ledger" / f"{Address('update_critic', 3)}.json"
    record.write_text(record.read_text().replace("critic4", "critic5"))
    ready = prepare(config, begun, resume=True, from_checkpoint=True)
    assert [warning for warning in ready.warnings if warning.startswith(f"{record}: is not what was written")]
    assert any("resumed from checkpoint v2: " in warning for warning in ready.warnings)
    assert updates(config) == [0, 1]
    assert len([path for path in (paths.root / "damaged").rglob("*") if path.is_file()]) == 1


def test_what_is_in_an_object_store_is_archived_there(config: RunConfig) -> None:
    """The directory has neither checkpoints nor exports; the newest checkpoint of the critic has lost its bytes."""
    config.storage.url = f"memory://{uuid.uuid4().hex}"  # fsspec's, of this process
    checked, exports = begin(config), config.stored.exports()
    for version in (2, 4):
        exports.staged(version).mkdir(parents=True)
        write_sums(exports.staged(version))
        exports.finish(version, exports.staged(version))
    for kind in ("checkpoints", "weights"):
        shutil.rmtree(config.run_dir / kind)
    root = config.stored.root
    files.write(root, "checkpoints/critic/v000004/model.bin", b"critic5")
    ready = prepare(config, checked, resume=True, from_checkpoint=True)
    assert any("resumed from checkpoint v2: " in warning for warning in ready.warnings)
    assert updates(config) == [0, 1]
    assert config.stored.checkpoints().versions("policy") == config.stored.checkpoints().versions("critic") == [2]
    assert exports.versions() == [2]
    archived = {key.split("/", 1)[1] for key in files.keys(root.below("archive"))}
    assert {f"checkpoints/{role}/v000004/{MANIFEST}" for role in ROLES} | {f"weights/v000004/{RECORD}"} <= archived
    assert f"ledger/{Address('update_policy', 3)}.json" in archived


def test_a_file_where_a_directory_must_be_is_refused_by_its_path(config: RunConfig, begun: Preflight) -> None:
    plots = RunPaths(config.run_dir).plots
    plots.rmdir()
    plots.write_text("")
    with pytest.raises(ConfigError, match=f"cannot write {plots}: File exists"), refuse_unwritable_directory(config):
        prepare(config, begun, resume=True, from_checkpoint=False)


@pytest.mark.parametrize("key", ["identity.json", "config.yaml"])
def test_a_disk_without_room_is_a_refusal_before_anything_starts(
    config: RunConfig, begun: Preflight, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """The store's message, with exit code 2 instead of 3; the same command works once there is room."""
    write_temporary = files._temporary

    def full(root: files.Root, path: str, data: bytes, *, private: bool = False) -> str:
        if path.endswith(key):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write_temporary(root, path, data, private=private)

    config.steps = 5
    config.model.policy.decay = config.model.critic.decay = "constant"
    with monkeypatch.context() as disk:
        disk.setattr(files, "_temporary", full)
        with (
            pytest.raises(ConfigError, match=rf"runs_dir: given .*{key}: No space left on device"),
            refuse_unwritable_directory(config),
        ):
            prepare(config, begun, resume=True, from_checkpoint=False)
    assert updates(config) == [0, 1, 2, 3]
    prepare(config, begun, resume=True, from_checkpoint=False)


def test_files_with_a_time_in_the_future_go_back_to_the_same_checkpoint(config: RunConfig, begun: Preflight) -> None:
    """The newest is the one of the highest version: clocks differ between hosts, and are set back."""
    for file in config.run_dir.rglob("*"):
        os.utime(file, (2**31, 2**31))
    for file in RunPaths(config.run_dir).checkpoints.rglob("*v000004*"):
        os.utime(file, (0, 0))
    ready = prepare(config, begun, resume=True, from_checkpoint=True)
    assert any("resumed from checkpoint v4: " in warning for warning in ready.warnings)
    assert updates(config) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("critic", "of_policy", "of_critic", "version"),
    [(True, [2, 3], [2], 2), (True, [2], [], 0), (False, [2], [], 2), (False, [1, 3], [], 3)],
)
def test_the_newest_that_every_trained_model_has(
    tmp_path: Path, critic: bool, of_policy: list[int], of_critic: list[int], version: int
) -> None:
    paths, spec = RunPaths(tmp_path), GraphSpec(steps=4, shards=1, staleness=0, has_critic=critic)
    ledger = Ledger(str(paths.root / "ledger"))
    store = RolloutStore(str(paths.root), ledger, Layouts(Layout(1, 2, 3)))
    for node in run_nodes(spec):
        store.commit_only(node.address, provenance_here(seed=0, config_hash=""), digest="")
    for role, saved in (("policy", of_policy), ("critic", of_critic)):
        for number in saved:
            save_checkpoint(Checkpoints(paths.checkpoints), role, number, digest="")
    found = plan_rewind(History(spec, ledger, store, rows_per_step=2), RunStorage(paths.root))
    assert found.version == version
    updates = [address for address in found.commits if address.stage == "update_policy"]
    assert sorted(updates) == [Address("update_policy", step) for step in range(version, 4)]

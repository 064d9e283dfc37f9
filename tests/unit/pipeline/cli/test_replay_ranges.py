"""The updates of a run that can be replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.replay import update_range
from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from storage.checkpoints import Checkpoints
from storage.commits import provenance_here
from tests.support.configs import arguments, write_config


def test_updates_that_would_need_dropped_rollouts_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    config = load_config([file], [*changes, "steps=6"])
    store, checkpoints = open_history(config).store, Checkpoints(RunPaths(config.run_dir).checkpoints)
    for node in run_nodes(config.graph()):
        store.commit_only(node.address, provenance_here(seed=0, config_hash=""))
    for role in ("policy", "critic"):
        checkpoints.finish(role, 4, checkpoints.begin(role, 4), {})
    assert update_range(config, "1:6") == range(1, 6)
    store.drop(2)
    for text in ("1:6", "3:6"):
        with pytest.raises(ConfigError, match=r"trained from version 0, and the rollouts before step 2 were dropped"):
            update_range(config, text)
    assert update_range(config, "4:6") == range(4, 6)

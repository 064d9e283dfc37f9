"""The checkpoint that `resume --from-checkpoint` returns to; without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.paths import RunPaths
from pipeline.driver.integrity import plan_rewind
from pipeline.graph.graph import GraphSpec, run_nodes
from pipeline.observe.history import History
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import provenance_here
from storage.config import Layout, Layouts
from storage.ledger import Ledger
from storage.rollouts import RolloutStore


@pytest.mark.parametrize(
    ("critic", "of_policy", "of_critic", "version"),
    [(True, [2, 3], [2], 2), (True, [2], [], 0), (False, [2], [], 2), (False, [1, 3], [], 3)],
)
def test_the_newest_that_every_trained_model_has(
    tmp_path: Path, critic: bool, of_policy: list[int], of_critic: list[int], version: int
) -> None:
    paths, spec = RunPaths(tmp_path), GraphSpec(steps=4, shards=1, staleness=0, critic=critic)
    ledger = Ledger(str(paths.ledger))
    store = RolloutStore(str(paths.root), ledger, Layouts(Layout(1, 2, 3)))
    for node in run_nodes(spec):
        store.commit_only(node.address, provenance_here(seed=0, config_hash=""), digest="")
    checkpoints = Checkpoints(paths.checkpoints)
    for role, saved in (("policy", of_policy), ("critic", of_critic)):
        for number in saved:
            directory = checkpoints.begin(role, number)
            (directory / "model.bin").write_text("weights")
            checkpoints.finish(role, number, directory, {"digest": ""})
    found = plan_rewind(History(spec, ledger, store, rows=2), paths)
    assert found.version == version
    updates = [address for address in found.commits if address.stage == "update_policy"]
    assert sorted(updates) == [Address("update_policy", step) for step in range(version, 4)]

"""Dask's reading of our keys: names, groups and colours on its dashboard."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest
from dask.utils import key_split
from distributed.utils import color_of, key_split_group

from pipeline.driver.graph_markers import build_key, marker_key, marker_stage, task_key
from pipeline.graph.graph import STAGE_ROLES, GraphSpec, run_nodes
from storage.address import Address


def test_no_two_stages_share_a_colour() -> None:
    """Dask's colours come from a hash of the name, of which two may be equal (`reference` and `value` were)."""
    names = [key_split(task_key(Address(stage, 3))) for stage in STAGE_ROLES]
    names.append(key_split(build_key("train-0", 0, "abc")))
    assert len({color_of(name) for name in names}) == len(names)


@pytest.mark.parametrize("stage", STAGE_ROLES)
def test_names_and_groups(stage: str) -> None:
    key = marker_key(Address(stage, 12, 3))
    assert key_split(key) == f"{stage}-commit"
    assert key_split_group(key) == f"{stage}-commit-000012"
    assert key_split(task_key(Address(stage, 12, 3))).split("-")[0] == stage
    assert task_key(Address(stage, 12, 3), "a1-x") == (*task_key(Address(stage, 12, 3)), "a1-x")
    assert marker_stage(key) == stage
    assert marker_stage(task_key(Address(stage, 12, 3))) is None
    assert marker_stage("scattered") is None


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_depend_on_each_other_in_no_circle(staleness: int) -> None:
    spec = GraphSpec(steps=7, shards=2, staleness=staleness, eval_every=2, canaries=True)
    groups: dict[str, set[str]] = {}
    for node in run_nodes(spec):
        needs = groups.setdefault(marker_key(node.address)[0], set())
        needs |= {marker_key(parent)[0] for parent in node.parents}
    TopologicalSorter(groups).prepare()  # raises CycleError

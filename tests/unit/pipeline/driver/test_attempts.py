"""Results of attempts, and the parents' futures that a child depends on: the two rules that need no cluster."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import pytest
from dask.utils import key_split
from distributed.comm import CommClosedError
from distributed.utils import color_of, key_split_group

from pipeline.driver.attempts import MAX_LINEAGE, Attempt, Result, parent_futures
from pipeline.driver.context import WorkerKey
from pipeline.driver.graph_markers import build_key, marker_key, marker_stage, task_key
from pipeline.driver.supervision import (
    AttemptState,
    attempt_state,
    back_off_s,
    is_retryable,
    rank_error,
    restart_unit,
)
from pipeline.graph.dispatch import Submit
from pipeline.graph.graph import STAGE_ROLES, Gang, GraphSpec, Mode, Node, run_nodes
from pipeline.workers.messages import Call, RankFailure, WorkerLost
from stages.models.protocol import Role
from storage.address import Address
from storage.errors import StoreError, StoreRefused, StoreUnavailable

PEER_DIED = RuntimeError("connection closed by peer")
"""Gloo's error; a stage might raise the same."""
LOST = WorkerLost("train-1", 0)
CONNECTION_LOST = CommClosedError("in <TCP>")
"""An OSError, as a collective's may be: but Dask's, about the process."""
WRONG = ValueError("no such colour")


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "reported", "errors", "expected"),
    [
        (1, 0, [], AttemptState.OPEN),
        (1, 1, [], AttemptState.DONE),
        (1, 0, [WRONG], AttemptState.FAILED),
        (1, 0, [LOST], AttemptState.FAILED),
        (1, 0, [PEER_DIED], AttemptState.FAILED),  # it has no peers
        (2, 0, [], AttemptState.OPEN),
        (2, 1, [], AttemptState.DONE),
        (2, 1, [PEER_DIED], AttemptState.DONE),  # nobody says that all have done their part if one has not
        (2, 0, [PEER_DIED], AttemptState.UNCLEAR),  # the other may have died, or be about to raise what is wrong
        (2, 0, [PEER_DIED, PEER_DIED], AttemptState.FAILED),
        (2, 0, [WRONG], AttemptState.FAILED),  # the other hangs in a collective, and is not waited for
        (2, 0, [LOST], AttemptState.FAILED),  # a RuntimeError, but the news of a death itself
        (2, 0, [CONNECTION_LOST], AttemptState.FAILED),
        (4, 0, [PEER_DIED, PEER_DIED], AttemptState.UNCLEAR),
        (4, 0, [PEER_DIED, LOST], AttemptState.FAILED),
    ],
)
def test_verdict(num_ranks: int, reported: int, errors: list[BaseException], expected: AttemptState) -> None:
    assert attempt_state(num_ranks, bool(reported), errors) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ESTALE, "stale"), True),
        (OSError(errno.ENOSPC, "full"), False),
        (StoreUnavailable("still so after 60 s"), True),
        (StoreRefused("full"), False),
        (StoreError("torn"), False),
        (WRONG, False),
    ],
)
def test_what_may_pass_is_tried_again_whichever_rank_raised_it(error: Exception, expected: bool) -> None:
    assert is_retryable(error) is expected
    call = Call(Address("update_policy", 0), "a0", 0, (), "train", "train-1", 0)
    assert is_retryable(rank_error(RankFailure.from_error(call, error))) is expected


def test_back_off_doubles_and_has_an_end() -> None:
    assert [back_off_s(times) for times in (1, 2, 3, 9)] == [2, 4, 8, 60]


# ---- edges ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A future, as far as an edge looks at it."""

    name: str
    status: str = "finished"


def node(stage: str, scheduled_step: int, *parents: Address) -> Node:
    return Node((scheduled_step, 0), Address(stage, scheduled_step), parents, (), scheduled_step)


def under_way(of: Node, future: Any) -> Attempt:
    return Attempt(Submit(of, "train", Mode.ORDERED, 0), "a0", future, is_submitted_early=False, ready_at=0.0)


def names(
    child: Node, worker: WorkerKey, attempts: dict[Address, Attempt], results: dict[Address, Result]
) -> list[str]:
    found: list[Any] = parent_futures(child, worker, attempts, results)
    return [future.name for future in found]


def test_a_parent_under_way_is_an_edge_wherever_the_child_runs() -> None:
    parent = node("generate", 3)
    attempts = {parent.address: under_way(parent, Held("rank 0"))}
    child = node("score", 3, parent.address)
    for worker in (("score", 0), ("train", 1)):
        assert names(child, worker, attempts, {}) == ["rank 0"]


def test_a_result_is_an_edge_only_in_the_process_that_has_it() -> None:
    parent = node("update_policy", 3)
    results = {parent.address: Result(Held("rank 0"), ("train", 0), 3)}
    child = node("publish", 3, parent.address)
    assert names(child, ("train", 0), {}, results) == ["rank 0"]
    assert names(child, ("train", 1), {}, results) == []
    assert names(child, ("score", 0), {}, results) == []
    assert names(child, ("train", 0), {}, {}) == [], "nothing is held of a step that is over"


@pytest.mark.parametrize("status", ["error", "cancelled", "lost"])
def test_a_result_that_was_lost_is_no_edge(status: str) -> None:
    """Dask would compute it again, with all its ancestors; the output is in the store."""
    parent = node("generate", 3)
    results = {parent.address: Result(Held("replica 0", status), ("pool", 0), 3)}
    assert names(node("score", 3, parent.address), ("pool", 0), {}, results) == []


def test_lineage_is_cut_between_two_turns() -> None:
    """Otherwise Dask would remember the whole run. Within a block of steps it is kept."""
    before, now = node("update_policy", MAX_LINEAGE - 1), node("advantage", MAX_LINEAGE)
    results = {
        before.address: Result(Held("before"), ("train", 0), MAX_LINEAGE - 1),
        now.address: Result(Held("now"), ("train", 0), MAX_LINEAGE),
    }
    child = node("update_policy", MAX_LINEAGE, before.address, now.address)
    assert names(child, ("train", 0), {}, results) == ["now"]
    next_turn = node("update_policy", MAX_LINEAGE + 1, before.address, now.address)
    assert names(next_turn, ("train", 0), {}, results) == ["before", "now"]


# ---- what is lost together -----------------------------------------------------------------------------------------


def test_a_gang_is_lost_whole_and_a_replica_alone() -> None:
    gang = Gang("train", frozenset({Role.POLICY}), 3)
    pool = Gang("pool", frozenset({Role.GENERATE, Role.SCORE}), 3)
    assert restart_unit(gang, 2) == [("train", 0), ("train", 1), ("train", 2)]
    assert restart_unit(pool, 2) == [("pool", 2)]


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
    spec = GraphSpec(steps=7, shards=2, staleness=staleness, eval_every=2, has_canaries=True)
    groups: dict[str, set[str]] = {}
    for node in run_nodes(spec):
        needs = groups.setdefault(marker_key(node.address)[0], set())
        needs |= {marker_key(parent)[0] for parent in node.parents}
    TopologicalSorter(groups).prepare()  # raises CycleError

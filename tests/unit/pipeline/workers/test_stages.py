"""A worker that needs earlier outputs finds them or raises: nothing starts anew in silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.graph.graph import STAGE_ROLES, GraphSpec, lineage_of, run_nodes
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts
from pipeline.workers.stages import (
    STAGES,
    SelfCommittingStage,
    UnboundStage,
    binding_of,
    compute_advantages,
)
from storage.address import Address
from storage.commits import Commit, provenance_here
from storage.errors import MissingOutput
from storage.ledger import Ledger


def call(address: Address, *inputs: Address) -> Call:
    return Call(address, "a0", address.step, inputs, "score", "score-0", 0)


def parts(tmp_path: Path) -> Any:
    """A stand-in with the parts that these tests need."""
    config = SimpleNamespace(ppo=SimpleNamespace(proximal="sampler"), seed=3)
    ledger = Ledger(str(tmp_path))
    spec = SimpleNamespace(name="score-0")
    return SimpleNamespace(ledger=ledger, config=config, config_hash="c", spec=spec, numerics={})


def test_the_kl_controller_is_not_begun_anew(tmp_path: Path) -> None:
    """If the step before is missing, the coefficient is not the config's."""
    with pytest.raises(MissingOutput, match="nothing is committed at advantage/step_000006/shard_0000"):
        compute_advantages(parts(tmp_path), call(Address("advantage", 7)))


def test_provenance_without_one_of_its_inputs_is_none(tmp_path: Path) -> None:
    some = parts(tmp_path)
    there, missing = Address("generate", 2), Address("score", 2)
    commit = Commit(there, "a0", None, 0, {}, provenance_here(seed=3, config_hash="c"), finished=1.0)
    some.ledger.commit(commit)
    with pytest.raises(MissingOutput, match="score/step_000002/shard_0000"):
        WorkerParts.provenance(some, call(Address("value", 2), there, missing), 0.0, ())
    (named,) = WorkerParts.provenance(some, call(Address("value", 2), there), 0.0, ()).inputs
    assert (named.address, named.attempt, named.content) == (there, "a0", commit.content)


@pytest.mark.parametrize(
    ("address", "versions", "expected"),
    [
        (Address("advantage", 0), (), []),
        (Address("advantage", 4), (), [Address("advantage", 3)]),
        (Address("generate", 4), (3, 4), [Address("publish", 3), Address("publish", 4)]),
        (Address("evaluate", 4), (4,), [Address("publish", 4)]),
        (Address("publish", 0), (0,), []),
        (Address("publish", 4), (4,), [Address("update_policy", 3)]),
        (Address("update_policy", 4), (4,), [Address("update_policy", 3)]),
        (Address("logprob", 0), (0,), []),
        (Address("value", 4), (4,), [Address("update_critic", 3)]),
        (Address("reference", 4), (0,), []),
        (Address("score", 4), (), []),
    ],
)
def test_outputs_name_their_weights(address: Address, versions: tuple[int, ...], expected: list[Address]) -> None:
    assert lineage_of(address, (Address("generate", 9),), versions) == (Address("generate", 9), *expected)


def test_whatever_an_output_was_made_from_is_an_ancestor_of_its_node() -> None:
    """So every input is committed when the node runs: provenance must never wait for a later output."""
    spec = GraphSpec(steps=4, shards=2, staleness=2, eval_every=2, has_canaries=True)
    before: dict[Address, set[Address]] = {}
    for node in run_nodes(spec):
        before[node.address] = set(node.parents).union(*(before.get(parent, set()) for parent in node.parents))
        versions = (node.version,) if node.stage != "reference" else (0,)
        for source in lineage_of(node.address, node.inputs, versions):
            assert source in before[node.address], f"{node.address} would name {source}"


def test_every_stage_of_the_graph_is_bound_and_no_other() -> None:
    assert STAGES.keys() == STAGE_ROLES.keys()
    changing = {stage for stage, binding in STAGES.items() if isinstance(binding, SelfCommittingStage)}
    assert changing == {"update_policy", "update_critic", "publish"}


def test_a_stage_that_nothing_runs_is_refused_by_name() -> None:
    with pytest.raises(UnboundStage, match=r"'judge' .* has no binding: give it one in .* \(bound are generate, score"):
        binding_of("judge")

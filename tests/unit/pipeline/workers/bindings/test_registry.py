"""Every stage of the graph is bound to what runs it in a worker."""

from __future__ import annotations

import pytest

from pipeline.graph.graph import STAGE_ROLES
from pipeline.workers.stages import STAGES, Computed, SelfCommitting, UnboundStage, binding_of, register, score_shard


def test_every_stage_of_the_graph_is_bound_and_no_other() -> None:
    assert STAGES.keys() == STAGE_ROLES.keys()
    changing = {stage for stage, binding in STAGES.items() if isinstance(binding, SelfCommitting)}
    assert changing == {"update_policy", "update_critic", "publish"}


def test_a_stage_is_bound_once() -> None:
    with pytest.raises(ValueError, match="'score' is bound already"):
        register("score", Computed(score_shard))
    assert binding_of("score") is STAGES["score"]


def test_a_stage_that_nothing_runs_is_refused_by_name() -> None:
    with pytest.raises(UnboundStage, match=r"'judge' .* has no binding: give it one in .* \(bound are generate, score"):
        binding_of("judge")

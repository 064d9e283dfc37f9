"""Every stage of the graph and what runs it in a worker.

To add a stage: a pure function in `stages/`, its role and its nodes in `pipeline/graph/graph.py`, and a binding here (a
line in `STAGES`, or a call of `register` from a module that the worker imports).

May import this folder and, through it, stages and storage.
"""

from __future__ import annotations

from pipeline.workers.bindings.binding import Binding, Computed, SelfCommitting
from pipeline.workers.bindings.models import canary_logprob_once, logprob_shard, reference_shard, value_shard
from pipeline.workers.bindings.sampling import canary_once, evaluate_shard, generate_shard
from pipeline.workers.bindings.scoring import advantage_step, score_shard
from pipeline.workers.bindings.weights import publish_version, update_critic_once, update_policy_once

STAGES: dict[str, Binding] = {
    "generate": Computed(generate_shard),
    "score": Computed(score_shard),
    "reference": Computed(reference_shard),
    "logprob": Computed(logprob_shard),
    "value": Computed(value_shard),
    "advantage": Computed(advantage_step),
    "update_policy": SelfCommitting(update_policy_once),
    "update_critic": SelfCommitting(update_critic_once),
    "publish": SelfCommitting(publish_version),
    "canary_logprob": Computed(canary_logprob_once),
    "canary": Computed(canary_once),
    "evaluate": Computed(evaluate_shard),
    "evaluate_score": Computed(score_shard),
    "evaluate_reference": Computed(reference_shard),
}
"""Stage -> its binding: as many as `pipeline.graph.graph.STAGE_ROLES` has stages."""


class UnboundStage(LookupError):
    """A stage of the graph that nothing runs."""


def register(stage: str, binding: Binding) -> None:
    """Binds a stage from elsewhere. Raises ValueError for one that is bound already."""
    if stage in STAGES:
        raise ValueError(f"stage {stage!r} is bound already")
    STAGES[stage] = binding


def binding_of(stage: str) -> Binding:
    """What runs a stage. Raises UnboundStage, naming those that are bound."""
    if stage not in STAGES:
        raise UnboundStage(
            f"stage {stage!r} of the graph has no binding: give it one in pipeline/workers/bindings/registry.py "
            f"(bound are {', '.join(STAGES)})"
        )
    return STAGES[stage]

"""What needs no model of the run: scores of a shard's responses, and the advantages of a step.

May import pipeline.workers, stages and storage.
"""

from __future__ import annotations

from pipeline.workers.bindings.binding import Output
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, required
from stages.advantage import advantage
from stages.score import score
from storage.address import Address
from storage.records import Rollout, Scores


def score_shard(parts: WorkerParts, call: Call) -> Output:
    """A score for each response, sampled for training or for evaluation."""
    record = scores_of(parts, parts.read(call.inputs[0]), held_out=call.address.stage.startswith("evaluate"))
    return Output(record, {"score/mean": float(record.scores.mean())})


def scores_of(parts: WorkerParts, rollout: Rollout, *, held_out: bool) -> Scores:
    """A score for each of these rows. `held_out`: by what evaluations are scored by."""
    scorer, prompts = required(parts.scorer), required(parts.prompts)
    extras = [prompts.extra[i] for i in rollout.prompt_index]
    messages = None if prompts.messages is None else [prompts.messages[i] for i in rollout.prompt_index]
    rewards = scorer.held_out if held_out else scorer.training
    return score(rewards, scorer.tokenizer, rollout, extras, messages)


def advantage_step(parts: WorkerParts, call: Call) -> Output:
    """Advantages and returns of all rows of a step, and the state that the next step goes on from. Raises MissingOutput
    where the step before has no commit: to begin anew would give another KL coefficient."""
    config, step = parts.config, call.address.step
    before = parts.ledger.get(Address("advantage", step - 1)).state if step else {}
    policy = parts.read_step("logprob", step) if config.ppo.proximal == "recompute" else None
    record, state, metrics = advantage(
        parts.read_step("generate", step),
        parts.read_step("score", step),
        parts.read_step("reference", step),
        policy,
        parts.read_step("value", step) if config.has_critic else None,
        config.ppo,
        step,
        config.staleness,
        before,
        config.reward.normalize,
        config.rollout.responses_per_prompt,
    )
    return Output(record, {**metrics, "policy/proximal_recomputed": float(policy is not None)}, state)

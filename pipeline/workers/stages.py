"""Every stage of the graph, and how a worker runs it.

    Call ──► binding_of(stage) ─┬─► ComputedStage.compute: inputs ──► StageOutput, which the runtime stores and commits
                                └─► SelfCommittingStage.run: changes or publishes weights, and commits by itself

The sections of this file:

- models: stages that apply a model without changing it; every rank of the gang takes part
- scoring and advantages
- sampling with an engine
- weights: updates and publication
- registry: `STAGES`, the table of bindings

To add a stage: write a pure function in `stages/`, add its role and nodes to `pipeline/graph/graph.py`, and add a
binding here (a line in `STAGES`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from pipeline.config.sections import differs
from pipeline.observe.engine_metrics import shard_metrics
from pipeline.workers.early_rows import EarlyScorer
from pipeline.workers.exports import describe_export
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, require_part
from pipeline.workers.turns import ComputeTurn
from pipeline.workers.weight_transfer import TransferStats
from stages.advantage import advantage
from stages.engines.protocol import EngineStats, GenerationEngine, RowsLost
from stages.engines.row_loads import RowKey
from stages.forward import (
    CANARY_STEP,
    canary_logprob,
    canary_rows,
    compared,
    engine_logprobs,
    logprob,
    reference,
    sampled_by,
    value,
)
from stages.generate import generate
from stages.models.config import SamplingConfig
from stages.models.numerics import peak_bytes
from stages.models.protocol import Role
from stages.prompts import EVALUATION_STEP, held_out_prompts, training_prompts
from stages.publish import publish
from stages.rewards.protocol import Sample
from stages.score import RowScores, follow, samples_of, score
from storage.address import Address
from storage.commits import Commit
from storage.records import CanaryPolicyLogprobs, PolicyLogprobs, PromptBatch, Record, Rollout, Scores
from storage.weights import WeightBoard


@dataclass(frozen=True)
class StageOutput:
    """The result of a `ComputedStage`, before it is stored."""

    record: Record | None
    """The record to store. None on ranks that hold no part of the result."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON that the next step's node reads from the commit."""
    weight_versions: tuple[int, ...] = ()
    mask: np.ndarray | None = None
    """The response mask, bool [rows, seq]. If the log-probs of a row are zero at all tokens of this mask, the store
    refuses the record."""


@dataclass(frozen=True)
class ComputedStage:
    """A stage that computes a record from stored inputs and changes nothing. The runtime calls `compute` if the node
    has no commit yet, stores the record and commits it."""

    compute: Callable[[WorkerParts, Call], StageOutput]


@dataclass(frozen=True)
class SelfCommittingStage:
    """A stage that changes or publishes weights. Its function looks for the node's commit by itself, and writes it if
    there is none."""

    run: Callable[[WorkerParts, Call, ComputeTurn], Commit | None]
    """Function that runs the node in the call's turn, which it may end, and returns the node's commit; None on ranks
    other than 0."""


Binding = ComputedStage | SelfCommittingStage


# ---- models ----------------------------------------------------------------------------------------------


def compute_reference_logprobs(parts: WorkerParts, call: Call) -> StageOutput:
    """Compute the reference's log-probs of the sampled tokens."""
    rollout: Rollout = parts.read_record(call.inputs[0])
    host = require_part(parts.updates).host
    record = reference(host, rollout)
    return StageOutput(record, host.trunk_counts(), weight_versions=(0,), mask=rollout.response_mask)


def compute_policy_logprobs(parts: WorkerParts, call: Call) -> StageOutput:
    """Compute the log-probs of the sampled tokens under the proximal policy: the version that the step trains."""
    host, rollout = require_part(parts.updates).model_at(Role.POLICY, call.version), parts.read_record(call.inputs[0])
    record = logprob(host, rollout)
    return StageOutput(record, host.trunk_counts(), weight_versions=(call.version,), mask=rollout.response_mask)


def compute_canary_logprobs(parts: WorkerParts, call: Call) -> StageOutput:
    """Compute the policy's log-probs of the canary rows: the few rows on which engine and trainer are compared. Only
    runs without the stage `logprob` have this stage. In other runs that stage already gives the log-probs of all rows.
    """
    host, settings = require_part(parts.updates).model_at(Role.POLICY, call.version), parts.config.mismatch
    record = canary_logprob(host, parts.read_record(call.inputs[0]), rows=settings.rows)
    return StageOutput(record, host.trunk_counts(), weight_versions=(call.version,))


def compute_values(parts: WorkerParts, call: Call) -> StageOutput:
    """Compute the critic's values of the states before each token."""
    host = require_part(parts.updates).model_at(Role.CRITIC, call.version)
    record = value(host, parts.read_record(call.inputs[0]))
    return StageOutput(record, host.trunk_counts(), weight_versions=(call.version,))


# ---- scoring ---------------------------------------------------------------------------------------------


def score_shard(parts: WorkerParts, call: Call) -> StageOutput:
    """Score each response of a training or an evaluation shard. Reward parts that count their requests and costs
    add the metrics judge/PART/requests and judge/PART/cost. If the gang's ranks divide the reward models, ranks other
    than 0 only take part in the computation and return no record."""
    held_out = call.address.stage.startswith("evaluate")
    rollout: Rollout = parts.read_record(call.inputs[0])
    if parts.spec.index and parts.gang.divides_scorers:
        follow(*_score_arguments(parts, rollout, held_out=held_out))
        return StageOutput(None)
    early = parts.early_scorer
    none: AbstractContextManager[dict[int, RowScores]] = nullcontext({})
    with none if early is None else early.scores_of(call.inputs[0]) as scored:
        record = score_rollout(parts, rollout, held_out=held_out, early=scored)
    counts = {
        f"judge/{part.name}/{name}": value
        for part in require_part(parts.scorer).parts(held_out=held_out)
        for name, value in part.reward.counts().items()
    }
    if early is not None and early.scores(call.inputs[0]):
        counts["score/early_fraction"] = len(scored) / rollout.num_rows
    return StageOutput(record, {"score/mean": float(record.scores.mean()), **counts})


def early_scorer(parts: WorkerParts) -> EarlyScorer:
    """Return a scorer of rows whose shard is still generated."""
    scorer = require_part(parts.scorer)

    def samples(rollout: Rollout) -> list[Sample]:
        return samples_of(scorer.tokenizer, rollout, *require_part(parts.prompts).for_reward(rollout.prompt_index))

    calls = [part.reward.concurrent_calls for part in (*scorer.training, *scorer.held_out) if part.reward.early]
    return EarlyScorer(lambda shard: scorer.parts(held_out=shard.stage == "evaluate"), samples, max(calls, default=1))


def score_rollout(
    parts: WorkerParts, rollout: Rollout, *, held_out: bool, early: Mapping[int, RowScores] = MappingProxyType({})
) -> Scores:
    """Return a score for each row. `held_out`: True to score with the reward parts of evaluations. `early`: see
    `stages.score.score`."""
    rewards, tokenizer, rollout, extras, messages = _score_arguments(parts, rollout, held_out=held_out)
    return score(rewards, tokenizer, rollout, extras, messages, early)


def _score_arguments(parts: WorkerParts, rollout: Rollout, *, held_out: bool) -> Any:
    """Return the arguments of `score`, and of `follow` on the other ranks of a gang that divides the reward models."""
    scorer, prompts = require_part(parts.scorer), require_part(parts.prompts)
    return scorer.parts(held_out=held_out), scorer.tokenizer, rollout, *prompts.for_reward(rollout.prompt_index)


def compute_advantages(parts: WorkerParts, call: Call) -> StageOutput:
    """Compute advantages and returns of all rows of a step, and the state for the next step. Raises MissingOutput if
    the step before has no commit, because the state in that commit gives the KL coefficient."""
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
    return StageOutput(record, {**metrics, "policy/proximal_recomputed": float(policy is not None)}, state)


# ---- sampling --------------------------------------------------------------------------------------------

Answer = TypeVar("Answer")
DIFFERENCE, MOVED = "mismatch/canary_mean_abs", "mismatch/canary_moved"


class MismatchAlarm(RuntimeError):
    """Engine and trainer compute different log-probs with the same weights, and the config says that this ends the
    run."""


def generate_shard(parts: WorkerParts, call: Call) -> StageOutput:
    """Generate responses to the prompts of a step's shard with the call's version of the weights. If the engine takes
    new weights while rows are in flight, later tokens may be of newer versions."""
    config, where = parts.config, call.address
    prompts = training_prompts(
        require_part(parts.prompts),
        seed=config.seed,
        step=where.step,
        shard=where.shard,
        rows=config.rollout.rows,
        shards=config.rollout.shards,
        responses_per_prompt=config.rollout.responses_per_prompt,
    )
    return _sample(parts, call, prompts, step=where.step, sampling=config.sampling, exact=False)


def evaluate_shard(parts: WorkerParts, call: Call) -> StageOutput:
    """Generate responses to a shard of the held-out prompts, all with one version."""
    config = parts.config
    prompts = held_out_prompts(require_part(parts.prompts), shard=call.address.shard, shards=config.evaluate.shards)
    return _sample(parts, call, prompts, step=EVALUATION_STEP, sampling=config.evaluation_sampling, exact=True)


def compare_canaries(parts: WorkerParts, call: Call) -> StageOutput:
    """Compare an engine's log-probs of the canaries with the trainer's. Raises MismatchAlarm if the log-probs differ
    too much and `alarms.stop` lists `mismatch`."""
    config = parts.config
    rollout: Rollout = parts.read_record(call.inputs[0])
    trainers: PolicyLogprobs | CanaryPolicyLogprobs = parts.read_record(call.inputs[1])
    theirs = trainers.policy_logprobs if isinstance(trainers, PolicyLogprobs) else trainers.canary_policy_logprobs
    limit = config.alarm_nats(parts.ledger.get(call.inputs[2]).metrics[DIFFERENCE] if call.version else None)
    part = canary_rows(rollout, config.mismatch.rows)
    record, measured = compared(part.sampler_logprobs, part, theirs, rollout.num_rows)
    asked = not sampled_by(part, call.version) or measured[DIFFERENCE] > limit
    if asked and config.capabilities().scores:  # an engine that cannot score has fresh rows only (`has_canaries`)
        keys = [(config.seed, CANARY_STEP, row) for row in part.row.tolist()]
        score = partial(engine_logprobs, part=part, sampling=config.sampling, seed=config.seed, version=call.version)
        logprobs, _ = _run_in_engine(parts, call, keys, score, exact=True)
        record, measured = compared(logprobs, part, theirs, rollout.num_rows)
    difference = measured[DIFFERENCE]
    older = bool((part.token_versions[part.response_mask] < call.version).all())
    alarm = differs(difference, limit, measured[MOVED] if older else None)
    if alarm and "mismatch" in config.alarms.stop:
        raise MismatchAlarm(
            f"engine and trainer differ by {difference:.3g} nats a token at version {call.version} of the weights; "
            f"the limit is {limit:.3g} (mismatch.alarm_nats), and alarms.stop lists mismatch"
        )
    metrics = {**measured, "mismatch/alarm_nats": limit, "mismatch/alarm": float(alarm)}
    return StageOutput(record, metrics, weight_versions=(call.version,))


def _run_in_engine(
    parts: WorkerParts,
    call: Call,
    keys: Sequence[RowKey],
    run: Callable[[GenerationEngine], Answer],
    *,
    exact: bool,
) -> tuple[Answer, int]:
    """Return `run(engine)` with the call's version of the weights (or a newer one, unless `exact`), and how many of the
    rows were finished by other replicas. A row may come back unfinished from another replica when this engine has other
    weights: then `run` raises RowsLost, and is called again with the right ones."""
    rows = parts.rows
    answers: list[Answer] = []
    with nullcontext() if rows is None else rows.shard(call.address, keys) as shard:
        while not answers:
            with (
                suppress(RowsLost),
                require_part(parts.engine).engine_at(call.version, parts.clock, exact=exact) as engine,
            ):
                answers.append(run(engine))
    return answers[0], shard.finished_elsewhere if shard is not None else 0


def _sample(
    parts: WorkerParts, call: Call, prompts: PromptBatch, *, step: int, sampling: SamplingConfig, exact: bool
) -> StageOutput:
    """Sample responses. `exact`: no token may be of a newer version than the call's."""
    config, sender = parts.config, parts.row_sender
    keys = [(config.seed, step, row) for row in prompts.row.tolist()]

    def draw(engine: GenerationEngine) -> tuple[Rollout, EngineStats]:
        rollout = generate(
            engine,
            prompts,
            seed=config.seed,
            step=step,
            version=call.version,
            sampling=sampling,
            seq=config.seq,
            pad_id=require_part(parts.prompts).pad_id,
            on_row=None if sender is None else partial(sender.send, call.address),
        )
        return rollout, engine.stats()

    try:
        (rollout, stats), elsewhere = _run_in_engine(parts, call, keys, draw, exact=exact)
    finally:
        if sender is not None:
            sender.forget(call.address)
    fetched = parts.fetcher.take_stats() if parts.fetcher is not None else TransferStats()
    metrics = {
        "generate/tokens": float(rollout.response_lengths.sum()),
        "generate/rows_finished_elsewhere": float(elsewhere),
        **shard_metrics(stats, fetched.seconds, fetched.num_bytes, peak_bytes()),
    }
    versions = tuple(np.unique(rollout.token_versions[rollout.response_mask]).tolist())
    return StageOutput(rollout, metrics, weight_versions=versions, mask=rollout.response_mask)


# ---- weights ---------------------------------------------------------------------------------------------

EXPORT = "export"
"""Name of the background work that writes an export."""


def update(parts: WorkerParts, call: Call, turn: ComputeTurn, *, role: Role) -> Commit | None:
    """Update a role's model from version `step` to `step + 1`. The turn does not end before the commit: only then the
    model may be used again."""
    del turn
    started = time.time()

    def commit(metrics: dict[str, float], digest: str) -> Commit:
        with parts.clock.bookkeeping():
            return parts.store.commit_only(
                call.address,
                parts.provenance(call, started, (call.version,)),
                attempt=parts.attempt_name(call),
                metrics=metrics,
                digest=digest,
            )

    updates = require_part(parts.updates)
    winner = updates.update(role, call.address.step, commit, is_first=call.is_first)
    if call.address.step + 1 == parts.config.steps:
        updates.background.wait_for_all()  # no later call would wait for the writes
    return winner


def publish_version(parts: WorkerParts, call: Call, turn: ComputeTurn) -> Commit | None:
    """Publish a version of the policy, and export it if the config asks for this version. Return the commit on rank 0,
    and None on other ranks. A version that has a commit is published again if its weights are gone from memory; its
    commit stays."""
    version, config = call.version, parts.config
    started, commit = time.time(), None
    host = require_part(parts.updates).model_at(Role.POLICY, version)
    exported = config.exports(version) and _begin_export(parts, version)
    with parts.clock.bookkeeping():
        manifest = publish(host, parts.board, version)
    if version == config.steps:  # a resume after this commit has no node left that could finish the exports
        _write_exports(parts, version, exported)
        require_part(parts.updates).background.wait_for_all()
    if not exported:
        turn.end()
    if manifest is not None:
        with parts.clock.bookkeeping():
            commit = parts.store.commit_only(
                call.address,
                parts.provenance(call, started, (version,)),
                attempt=parts.attempt_name(call),
                metrics={"publish/bytes": float(manifest.num_bytes)},
                digest=manifest.digest,
            )
    if version != config.steps:
        _write_exports(parts, version, exported)
    return None if manifest is None else commit


def _write_exports(parts: WorkerParts, version: int, exported: bool) -> None:
    """Write the export of `version` in the background if it was begun (`exported`). Then, and after the last version,
    also write the exports that dead processes left unfinished."""
    if exported:
        _export(parts, version, parts.board)
    if exported or version == parts.config.steps:
        # This process has no other export in progress, so dead processes began all other unfinished exports. Later
        # versions are exported when they are published again.
        exports = parts.config.stored.exports()
        for unfinished in require_part(parts.updates).broadcast_from_rank_0(lambda: exports.clear_unfinished(version)):
            _export(parts, unfinished)


def _begin_export(parts: WorkerParts, version: int) -> bool:
    """Return True if a version still has to be exported. If so, create the export's directory under a temporary name,
    which shows that the export is unfinished. If this process dies, the next export of another version also finishes
    this export."""
    exports = parts.config.stored.exports()

    def begin() -> bool:
        if version in exports.versions():
            return False
        exports.begin(version)
        return True

    return bool(require_part(parts.updates).broadcast_from_rank_0(begin))


def _export(parts: WorkerParts, version: int, board: WeightBoard | None = None) -> None:
    """Start to write the policy in Hugging Face layout in the background. A half-written export never has the final
    name. Without a `board`, the version is published again on a new one."""
    updates, exports = require_part(parts.updates), parts.config.stored.exports()
    staged, own = exports.staged(version), parts.board.directory / f"export-{version}"

    def begin() -> None:  # files of a killed process may be torn, or the version may have been computed again since
        for left in (staged, own):
            shutil.rmtree(left, ignore_errors=True)
        staged.mkdir(parents=True)

    updates.broadcast_from_rank_0(begin)
    source = board or WeightBoard(own)
    write = updates.model_at(Role.POLICY, version).export(source, staged)

    def work() -> None:
        write()
        if parts.spec.index == 0:
            if board is None:
                source.close()
            describe_export(staged, parts.config, version, parts.config_hash)
            exports.finish(version, staged)

    updates.background.submit(EXPORT, work)


# ---- registry --------------------------------------------------------------------------------------------

STAGES: dict[str, Binding] = {
    "generate": ComputedStage(generate_shard),
    "score": ComputedStage(score_shard),
    "reference": ComputedStage(compute_reference_logprobs),
    "logprob": ComputedStage(compute_policy_logprobs),
    "value": ComputedStage(compute_values),
    "advantage": ComputedStage(compute_advantages),
    "update_policy": SelfCommittingStage(partial(update, role=Role.POLICY)),
    "update_critic": SelfCommittingStage(partial(update, role=Role.CRITIC)),
    "publish": SelfCommittingStage(publish_version),
    "canary_logprob": ComputedStage(compute_canary_logprobs),
    "canary": ComputedStage(compare_canaries),
    "evaluate": ComputedStage(evaluate_shard),
    "evaluate_score": ComputedStage(score_shard),
    "evaluate_reference": ComputedStage(compute_reference_logprobs),
}
"""Stage -> its binding, for every stage of `pipeline.graph.graph.STAGE_ROLES`."""


class UnboundStage(LookupError):
    """A stage of the graph has no binding."""


def binding_of(stage: str) -> Binding:
    """Return the entry of a stage in the table `STAGES`: the function that runs the stage, wrapped in a class that says
    who commits the result. Raises UnboundStage if the stage has no entry. The message lists the stages that have one.
    """
    if stage not in STAGES:
        raise UnboundStage(
            f"stage {stage!r} of the graph has no binding: give it one in pipeline/workers/stages.py "
            f"(bound are {', '.join(STAGES)})"
        )
    return STAGES[stage]

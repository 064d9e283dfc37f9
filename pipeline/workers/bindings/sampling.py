"""What an engine does: responses to a shard of training prompts, to a shard of those that are held out, and canaries.

May import pipeline.workers, pipeline.observe.engine_metrics, stages and storage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

import numpy as np

from pipeline.observe.engine_metrics import counts
from pipeline.workers.bindings.binding import Output
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, required
from pipeline.workers.weight_transfer import Fetched
from stages.canary import CANARY_STEP, canary_rows, compared, engine_logprobs, sampled_by
from stages.engines.protocol import EngineStats, GenerationEngine, RowsLost
from stages.engines.row_loads import RowKey
from stages.generate import generate
from stages.models.peak_memory import peak_bytes
from stages.models.sampling import SamplingConfig
from stages.prompts import EVALUATION_STEP, held_out_prompts, training_prompts
from storage.records import CanaryPolicyLogprobs, PolicyLogprobs, PromptBatch, Rollout

Answer = TypeVar("Answer")
DIFFERENCE = "mismatch/canary_mean_abs"


class MismatchAlarm(RuntimeError):
    """Engine and trainer say different things with the same weights, and the config says that this ends the run."""


def generate_shard(parts: WorkerParts, call: Call) -> Output:
    """Responses to the prompts of a shard of a step, under the version that the node's edge allows."""
    config, where = parts.config, call.address
    prompts = training_prompts(
        required(parts.prompts),
        seed=config.seed,
        step=where.step,
        shard=where.shard,
        rows=config.rollout.rows,
        shards=config.rollout.shards,
        responses_per_prompt=config.rollout.responses_per_prompt,
    )
    return _sample(parts, call, prompts, step=where.step, sampling=config.sampling, exact=False)


def evaluate_shard(parts: WorkerParts, call: Call) -> Output:
    """Responses to a shard of the held-out prompts, all of them under one version."""
    config = parts.config
    sampling = config.sampling
    if config.evaluate.temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=config.evaluate.temperature)
    prompts = held_out_prompts(required(parts.prompts), shard=call.address.shard, shards=config.evaluate.shards)
    return _sample(parts, call, prompts, step=EVALUATION_STEP, sampling=sampling, exact=True)


def canary_once(parts: WorkerParts, call: Call) -> Output:
    """An engine's log-probs of the canaries against the trainer's. Raises MismatchAlarm where that ends the run."""
    config = parts.config
    rollout: Rollout = parts.read(call.inputs[0])
    trainers: PolicyLogprobs | CanaryPolicyLogprobs = parts.read(call.inputs[1])
    theirs = trainers.policy_logprobs if isinstance(trainers, PolicyLogprobs) else trainers.canary_policy_logprobs
    part = canary_rows(rollout, config.mismatch.rows, config.mismatch.tokens)
    record, found = compared(part.sampler_logprobs, part, theirs, rollout.num_rows)
    asked = not sampled_by(part, call.version) or found[DIFFERENCE] > config.alarm_nats
    if asked and config.capabilities().scores:  # otherwise all rows are fresh: `RunConfig.has_canaries`
        keys = [(config.seed, CANARY_STEP, row) for row in part.row.tolist()]
        score = partial(engine_logprobs, part=part, sampling=config.sampling, seed=config.seed, version=call.version)
        logprobs, _ = _in_engine(parts, call, keys, score, exact=True)
        record, found = compared(logprobs, part, theirs, rollout.num_rows)
    difference = found[DIFFERENCE]
    alarm = difference > config.alarm_nats
    if alarm and config.mismatch.stop:
        raise MismatchAlarm(
            f"engine and trainer differ by {difference:.3g} nats a token at version {call.version} of the weights; "
            f"mismatch.alarm_nats is {config.alarm_nats:g}, mismatch.stop is true"
        )
    metrics = {**found, "mismatch/alarm_nats": config.alarm_nats, "mismatch/alarm": float(alarm)}
    return Output(record, metrics, weight_versions=(call.version,))


def _in_engine(
    parts: WorkerParts,
    call: Call,
    keys: Sequence[RowKey],
    run: Callable[[GenerationEngine], Answer],
    *,
    exact: bool,
) -> tuple[Answer, int]:
    """What `run` makes of the engine with the call's version resident, or (unless `exact`) a newer one; and how many of
    the rows with these keys other replicas finished."""
    rows = parts.rows
    answers: list[Answer] = []
    with nullcontext() if rows is None else rows.shard(call.address, keys) as shard:
        while not answers:
            with suppress(RowsLost), required(parts.engine).at(call.version, parts.clock, exact=exact) as engine:
                answers.append(run(engine))
    return answers[0], shard.finished_elsewhere if shard is not None else 0


def _sample(
    parts: WorkerParts, call: Call, prompts: PromptBatch, *, step: int, sampling: SamplingConfig, exact: bool
) -> Output:
    """`exact`: no token may be of a newer version than the call's."""
    config = parts.config
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
            pad_id=required(parts.prompts).pad_id,
        )
        return rollout, engine.stats()

    (rollout, stats), elsewhere = _in_engine(parts, call, keys, draw, exact=exact)
    fetched = parts.fetcher.fetched() if parts.fetcher is not None else Fetched()
    metrics = {
        "generate/tokens": float(rollout.response_lengths.sum()),
        "generate/rows_finished_elsewhere": float(elsewhere),
        **counts(stats, fetched.seconds, fetched.num_bytes, peak_bytes()),
    }
    versions = tuple(np.unique(rollout.token_versions[rollout.response_mask]).tolist())
    return Output(rollout, metrics, weight_versions=versions, mask=rollout.response_mask)

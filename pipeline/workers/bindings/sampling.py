"""Sampling: responses to a shard of training prompts, and to a shard of those that are held out.

May import pipeline.workers, pipeline.observe.engine_metrics, stages and storage.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext, suppress

import numpy as np

from pipeline.observe.engine_metrics import counts
from pipeline.workers.bindings.binding import Output
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, required
from pipeline.workers.weight_transfer import Fetched
from stages.engines.embedded.migration.protocol import RowsLost
from stages.generate import generate
from stages.models.peak_memory import peak_bytes
from stages.models.sampling import SamplingConfig
from stages.prompts import EVALUATION_STEP, held_out_prompts, training_prompts
from storage.records import PromptBatch


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


def _sample(
    parts: WorkerParts, call: Call, prompts: PromptBatch, *, step: int, sampling: SamplingConfig, exact: bool
) -> Output:
    """`exact`: no token may be of a newer version than the call's."""
    config, rows = parts.config, parts.rows
    keys = [(config.seed, step, row) for row in prompts.row.tolist()]
    with nullcontext() if rows is None else rows.shard(call.address, keys) as shard:
        rollout = None
        while rollout is None:
            with suppress(RowsLost), required(parts.engine).at(call.version, parts.clock, exact=exact) as engine:
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
    fetched = parts.fetcher.fetched() if parts.fetcher is not None else Fetched()
    metrics = {
        "generate/tokens": float(rollout.response_lengths.sum()),
        "generate/rows_finished_elsewhere": float(shard.finished_elsewhere) if shard is not None else 0.0,
        **counts(engine.stats(), fetched.seconds, fetched.num_bytes, peak_bytes()),
    }
    versions = tuple(np.unique(rollout.token_versions[rollout.response_mask]).tolist())
    return Output(rollout, metrics, weight_versions=versions, mask=rollout.response_mask)

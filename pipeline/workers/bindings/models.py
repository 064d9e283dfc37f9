"""What a model of the run says of a shard's rows, without being changed. Every rank of the gang takes part.

May import pipeline.workers, stages and storage.
"""

from __future__ import annotations

from pipeline.workers.bindings.binding import Output
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, required
from stages.canary import canary_logprob
from stages.logprob import logprob
from stages.models.protocol import Role
from stages.reference import reference
from stages.value import value
from storage.records import Rollout


def reference_shard(parts: WorkerParts, call: Call) -> Output:
    """The reference's log-probs of the sampled tokens."""
    rollout: Rollout = parts.read(call.inputs[0])
    host = required(parts.updates).host
    record = reference(host, rollout)
    return Output(record, host.trunk_counts(), weight_versions=(0,), mask=rollout.response_mask)


def logprob_shard(parts: WorkerParts, call: Call) -> Output:
    """The proximal policy's log-probs of the sampled tokens: those of the version that the step trains."""
    host, rollout = required(parts.updates).at(Role.POLICY, call.version), parts.read(call.inputs[0])
    record = logprob(host, rollout)
    return Output(record, host.trunk_counts(), weight_versions=(call.version,), mask=rollout.response_mask)


def canary_logprob_once(parts: WorkerParts, call: Call) -> Output:
    """The trainer's log-probs of the canaries, where no log-probs of whole shards are computed."""
    host, settings = required(parts.updates).at(Role.POLICY, call.version), parts.config.mismatch
    record = canary_logprob(host, parts.read(call.inputs[0]), rows=settings.rows, tokens=settings.tokens)
    return Output(record, host.trunk_counts(), weight_versions=(call.version,))


def value_shard(parts: WorkerParts, call: Call) -> Output:
    """The critic's values of the states before each token."""
    host = required(parts.updates).at(Role.CRITIC, call.version)
    record = value(host, parts.read(call.inputs[0]))
    return Output(record, host.trunk_counts(), weight_versions=(call.version,))

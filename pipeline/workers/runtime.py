"""The runtime of a worker process: what happens with a call.

    call ──► committed already? ──yes──► return the reference
               │no
               └► read inputs from the store ──► the stage's pure function ──► write, commit ──► reference

Which function runs a stage is said in `bindings/registry.py`, and what it needs is built in `parts.py`. Stages that
change or give away weights look for their commit, and write it, themselves.

May import pipeline.graph, this folder, stages and storage.
"""

from __future__ import annotations

import time
import warnings

from pipeline.graph.graph import STAGE_ROLES
from pipeline.workers.bindings.binding import Computed, Output, Settled
from pipeline.workers.bindings.registry import binding_of
from pipeline.workers.entry import CallResult
from pipeline.workers.messages import Call, WorkerSpec
from pipeline.workers.parts import build_parts
from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.weight_transfer import Fetcher


class StageRuntime:
    """Owns a worker's engine and models."""

    def __init__(self, spec: WorkerSpec, *, same_layout: bool = True) -> None:
        """`same_layout`: the models are laid out as those that made the run's commits, whose digests a replayed update
        must then have. Raises UnboundStage for a stage that nothing runs."""
        for stage in STAGE_ROLES:
            binding_of(stage)
        # What it would rather have (Transformer Engine, Apex) is no news to whoever runs this; its errors still are.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        self.parts = build_parts(spec, same_layout=same_layout)
        self._last_sequence = -1

    def run(self, call: Call) -> CallResult:
        """Runs a node, or finds that its output is committed."""
        spec, clock = self.parts.spec, self.parts.clock
        clock.seconds = 0.0
        if spec.size > 1 and call.sequence is not None:
            assert call.sequence > self._last_sequence, f"{call.address}: the gang's order was broken"
            self._last_sequence = call.sequence
        binding = binding_of(call.address.stage)
        with self.parts.collectives_of(call):
            if isinstance(binding, Computed):
                settled = self._commit_once(call, binding)
            else:
                settled = binding.settle(self.parts, call)
        ref = settled.commit.ref() if settled.commit is not None and (spec.size == 1 or spec.index == 0) else None
        news, self.parts.warnings = tuple(self.parts.warnings), []
        return CallResult(ref, clock.seconds, settled.reused, news)

    def _commit_once(self, call: Call, binding: Computed) -> Settled:
        """The output of a node, unless it is there: computed, stored and committed."""
        parts = self.parts
        found = parts.find(call.address)
        if found is not None:
            return Settled(found, reused=True)
        started = time.time()
        output = binding.compute(parts, call)
        if output.record is None:
            return Settled(None, reused=False)
        with parts.clock.bookkeeping():
            commit = parts.store.write(
                call.address,
                output.record,
                parts.provenance(call, started, output.weight_versions),
                attempt=parts.attempt_name(call),
                mask=output.mask,
                metrics=output.metrics,
                state=output.state,
            )
        return Settled(commit, reused=False)

    def compute(self, call: Call) -> Output:
        """What a stage makes of its stored inputs; nothing is written. Updates and publications are not among these:
        they change or give away weights."""
        binding = binding_of(call.address.stage)
        assert isinstance(binding, Computed), f"{call.address.stage} cannot be computed without being committed"
        return binding.compute(self.parts, call)

    @property
    def numerics(self) -> dict[str, str]:
        """What the last bits of its results depend on."""
        return self.parts.numerics

    @property
    def rows(self) -> ReplicaRows | None:
        """Of a replica whose rows may migrate to others."""
        return self.parts.rows

    def fetch_with(self, fetcher: Fetcher) -> None:
        """From now on versions that this host lacks are brought from others."""
        self.parts.fetcher = fetcher

    def take_weights(self, version: int) -> None:
        """See `TakesWeights`."""
        if self.parts.engine is not None:
            self.parts.engine.take(version)

    def rest(self) -> None:
        """See `Rests`."""
        self.parts.rest()

    def close(self) -> None:
        self.parts.close()

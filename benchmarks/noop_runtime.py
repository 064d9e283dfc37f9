"""A runtime whose stages compute nothing and commit at once, with the metrics that a run's summary asks for: what is
left of a node is what the graph, Dask and the ledger cost."""

from __future__ import annotations

import time

from pipeline.config.loading import load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.workers.entry import Runtime
from pipeline.workers.messages import Call, Outcome, WorkerSpec
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger

METRICS = {
    "generate": {"generate/tokens": 8.0, "staleness/fraction_1": 1.0},
    "advantage": {"reward/mean": 0.0, "kl/ref": 0.0},
}


class NoopRuntime(Runtime):
    """Owns nothing: a rank of a gang neither meets its peers nor trains."""

    def __init__(self, spec: WorkerSpec) -> None:
        config: RunConfig = load_yaml(spec.config_yaml)
        self._spec = spec
        self._ledger = Ledger(str(RunPaths(config.run_dir).ledger))

    def run(self, call: Call) -> Outcome:
        started = time.time()
        found = self._ledger.find(call.address)
        if found is None and (self._spec.index == 0 or self._spec.size == 1):
            provenance = provenance_here(
                weight_versions=[call.version], seed=0, config_hash="noop", worker=self._spec.name, started=started
            )
            metrics = METRICS.get(call.address.stage, {})
            commit = Commit(call.address, new_attempt(), None, 0, {}, provenance, time.time(), metrics)
            found = self._ledger.commit(commit)
        ref = None if found is None else found.ref()
        return Outcome(call.address, call.attempt, ref, self._spec.name, self._spec.index, started, time.time(), 0.0)

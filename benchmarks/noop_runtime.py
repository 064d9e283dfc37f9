"""A runtime whose stages compute nothing and commit at once, with the metrics that a run's summary asks for: what is
left of a node is what the graph, Dask and the ledger cost."""

from __future__ import annotations

import time

from pipeline.config.loading import load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.workers.entry import CallResult
from pipeline.workers.messages import Call, WorkerSpec
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger

METRICS = {
    "generate": {"generate/tokens": 8.0, "staleness/fraction_1": 1.0},
    "advantage": {"reward/mean": 0.0, "kl/ref": 0.0},
}


class NoopRuntime:
    """Owns nothing: a rank of a gang neither meets its peers nor trains."""

    def __init__(self, spec: WorkerSpec) -> None:
        config: RunConfig = load_yaml(spec.config_yaml)
        self._spec = spec
        self._ledger = Ledger(str(RunPaths(config.run_dir).ledger))

    def run(self, call: Call) -> CallResult:
        started = time.time()
        found = self._ledger.find(call.address)
        if found is None and self._spec.index and self._spec.size > 1:
            return CallResult(None, 0.0, False)
        if found is None:
            provenance = provenance_here(
                weight_versions=[call.version], seed=0, config_hash="noop", worker=self._spec.name, started=started
            )
            metrics = METRICS.get(call.address.stage, {})
            commit = Commit(call.address, new_attempt(), None, 0, {}, provenance, time.time(), metrics)
            found = self._ledger.commit(commit)
        return CallResult(found.ref(), 0.0, False)

    def close(self) -> None:
        pass

"""A runtime whose stages compute nothing but obey the laws: real ledger, real gloo gang, real exactly-once updates.

A test steers it through files in the run's `control/` directory, named `<stage>-<step>-<shard>@<worker>` (`*` for any
worker) and a suffix:

    .hold     a call that has begun waits, before it meets its peers, until the file is gone
    .raise    it raises ValueError with the file's text
    .commit   a call that is about to commit waits until the file is gone
    build@<worker>.raise, build@<worker>.exit    the worker's build raises, or its process ends

It writes `runs.log` (a line for each call that begins: address, worker, process id), `trained.log` (updates that were
computed, not found), `replayed.log` (updates done again from the ledger), `committing.log` (calls about to commit) and
`discarded.log` (losers of a commit).
"""

from __future__ import annotations

import errno
import importlib
import os
import time
from pathlib import Path

from pipeline.config.loading import load_yaml
from pipeline.config.run import RunConfig
from pipeline.config.sections import collective_timeout_s
from pipeline.workers.entry import Runtime
from pipeline.workers.messages import Call, Outcome, WorkerSpec
from storage.address import Address
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger


class NoopRuntime(Runtime):
    """Owns the process group of its gang."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.config: RunConfig = load_yaml(spec.config_yaml)
        self.ledger = Ledger(str(self.config.run_dir / "ledger"))
        self.delays: dict[str, float] = self.config.reward.args.get("delay_s", {})
        self.last_sequence = -1
        self.resident = {"update_policy": 0, "update_critic": 0}
        self._log("built", f"{spec.name} {os.getpid()} {spec.incarnation}")
        self._wait_while("build", "hold")
        if self._control("build", "raise").exists():
            raise ValueError(self._control("build", "raise").read_text())
        if self._control("build", "exit").exists():
            os._exit(1)
        if spec.size > 1:  # the rest of a cluster needs no torch, and starts faster without
            self.gang = importlib.import_module("tests.support.gloo_gang")
            self.missing_ranks = self.gang.join(spec, collective_timeout_s(self.config.cluster))

    def run(self, call: Call) -> Outcome:
        started, commit = time.time(), self._committed(call)
        ref = None if commit is None else commit.ref()
        return Outcome(call.address, call.attempt, ref, self.spec.name, self.spec.index, started, time.time(), 0.0)

    def _committed(self, call: Call) -> Commit | None:
        """Return the node's commit; None on ranks that do not commit it."""
        self._log("runs", f"{call.address} {self.spec.name} {os.getpid()}")
        name = f"{call.address.stage}-{call.address.step}-{call.address.shard}"
        if (fault := self._control(name, "raise")).exists():
            raise ValueError(fault.read_text())
        if (fault := self._control(name, "unavailable")).exists():
            raise OSError(errno.ESTALE, fault.read_text())
        self._wait_while(name, "hold")
        if self.spec.size > 1:
            assert call.sequence is not None
            assert call.sequence > self.last_sequence, "a gang's order was broken"
            self.last_sequence = call.sequence
            with self.missing_ranks.collectives_of(str(call.address)):
                self.gang.assert_same_everywhere(str(call.address))
        found = self.ledger.find(call.address)
        if call.address.stage in self.resident:
            self._bring_to(call.address.stage, call.address.step, found)
        if found is not None:
            return found
        time.sleep(max(self.delays.get(self.spec.name, 0.0), self.delays.get(call.address.stage, 0.0)))
        if call.address.stage == "generate":
            assert call.address.step - self.config.staleness <= call.version <= call.address.step
        if self.spec.index and self.spec.size > 1:
            return None
        self._log("committing", f"{call.address} {self.spec.name}")
        self._wait_while(name, "commit")
        commit = Commit(
            address=call.address,
            attempt=new_attempt(),
            kind=None,
            rows=0,
            arrays={},
            provenance=provenance_here(
                weight_versions=[call.version], seed=0, config_hash="noop", worker=self.spec.name, inputs=[]
            ),
            finished=time.time(),
        )
        winner = self.ledger.commit(commit)
        if winner.attempt != commit.attempt:
            self._log("discarded", f"{call.address} {self.spec.name}")
        return winner

    def _bring_to(self, stage: str, step: int, found: Commit | None) -> None:
        """The resident state of an update: what is missing is replayed from the ledger, which must hold it."""
        if self.resident[stage] > step:
            assert found is not None, f"{stage} {step} would run a second time without a commit"
            return
        for earlier in range(self.resident[stage], step):
            assert self.ledger.find(Address(stage, earlier)) is not None, f"{stage} {earlier} is lost"
            self._log("replayed", f"{Address(stage, earlier)} {self.spec.name}")
        self.resident[stage] = step + 1
        if found is None and self.spec.index == 0:
            self._log("trained", f"{Address(stage, step)} {self.spec.name}")

    def _wait_while(self, name: str, suffix: str) -> None:
        while self._control(name, suffix).exists():
            time.sleep(0.01)

    def _control(self, what: str, suffix: str) -> Path:
        control = self.config.run_dir / "control"
        anywhere = control / f"{what}@*.{suffix}"
        return anywhere if anywhere.exists() else control / f"{what}@{self.spec.name}.{suffix}"

    def _log(self, name: str, line: str) -> None:
        with (self.config.run_dir / f"{name}.log").open("a") as log:
            log.write(line + "\n")

    def close(self) -> None:
        if self.spec.size > 1:
            self.gang.leave()

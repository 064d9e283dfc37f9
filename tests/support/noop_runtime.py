"""A runtime whose stages compute nothing but obey the laws: real ledger, real gloo gang, real exactly-once updates.

What a run does is told through `reward.args`: {"delay_s": {"<worker name>": seconds, "<stage>": seconds}}.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from pipeline.calls import Call, WorkerSpec
from pipeline.config import RunConfig, load_yaml
from pipeline.worker import Visit
from storage.address import Address
from storage.ledger import Commit, Ledger, new_attempt, provenance_here


class NoopRuntime:
    """Owns the process group of its gang."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.config: RunConfig = load_yaml(spec.config_yaml)
        self.ledger = Ledger(str(self.config.run_dir / "ledger"))
        self.delays: dict[str, float] = self.config.reward.args.get("delay_s", {})
        self.last_sequence = -1
        self.resident = {"update_policy": 0, "update_value": 0}
        if spec.size > 1:
            dist.init_process_group("gloo", init_method=spec.rendezvous, rank=spec.index, world_size=spec.size)

    def run(self, call: Call) -> Visit:
        self._log("runs", f"{call.address} {self.spec.name} {os.getpid()}")
        if self.spec.size > 1:
            assert call.sequence is not None
            assert call.sequence > self.last_sequence, "a gang's order was broken"
            self.last_sequence = call.sequence
            self._same_everywhere(call)
        found = self.ledger.find(call.address)
        if call.address.stage in self.resident:
            self._bring_to(call.address.stage, call.address.step, found)
        if found is not None:
            return Visit(found.ref(), 0.0, True)
        time.sleep(max(self.delays.get(self.spec.name, 0.0), self.delays.get(call.address.stage, 0.0)))
        if call.address.stage == "generate":
            assert call.address.step - self.config.staleness <= call.version <= call.address.step
        if self.spec.index and self.spec.size > 1:
            return Visit(None, 0.0, False)
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
        return Visit(winner.ref(), 0.0, False)

    def _bring_to(self, stage: str, step: int, found: Commit | None) -> None:
        """The resident state of an update: what is missing is replayed from the ledger, which must hold it."""
        if self.resident[stage] > step:
            assert found is not None, f"{stage} {step} would run a second time without a commit"
            return
        for earlier in range(self.resident[stage], step):
            assert self.ledger.find(Address(stage, earlier)) is not None, f"{stage} {earlier} is lost"
        self.resident[stage] = step + 1

    def _same_everywhere(self, call: Call) -> None:
        if self.spec.size > 1:
            mine = torch.tensor([hash_of(call.address)], dtype=torch.int64)
            total = mine.clone()
            dist.all_reduce(total)
            assert total.item() == mine.item() * self.spec.size, "ranks run different nodes"

    def _log(self, name: str, line: str) -> None:
        with (self.config.run_dir / f"{name}.log").open("a") as log:
            log.write(line + "\n")

    def close(self) -> None:
        if self.spec.size > 1:
            dist.destroy_process_group()


def hash_of(address: Address) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(f"{address}".encode()[-6:], "big") % 1_000_003 + address.step * 31 + len(address.stage)

"""The real runtime on which training is sure to catch up with the generation of step 1, so that newer weights than an
edge asks for are there when something begins."""

from __future__ import annotations

import os

from pipeline.workers.messages import Call, Outcome, WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.engines.embedded.batch import Batch
from storage.address import Address
from tests.support.waiting import until


class LateRuntime(StageRuntime):
    """Owns what `StageRuntime` does. No shard of step 1 begins before version 1 is published."""

    def run(self, call: Call) -> Outcome:
        if call.address.stage == "generate" and call.address.step == 1:
            until(lambda: self.parts.ledger.find(Address("publish", 1)), "version 1 is published")
        return super().run(call)


class DyingLateRuntime(LateRuntime):
    """Owns what `StageRuntime` does. The first shard of step 1 that could begin takes its process with it."""

    def run(self, call: Call) -> Outcome:
        died = self.parts.config.run_dir / "died"
        if call.address == Address("generate", 1) and not died.exists():
            until(lambda: self.parts.ledger.find(Address("publish", 1)), "version 1 is published")
            died.touch()
            os._exit(1)
        return super().run(call)


class FailingLateRuntime(LateRuntime):
    """Owns what `StageRuntime` does. The first attempt at scoring step 2 raises."""

    def run(self, call: Call) -> Outcome:
        failed = self.parts.config.run_dir / "failed"
        if call.address.stage == "score" and call.address.step == 2 and not failed.exists():
            failed.touch()
            raise ValueError("as ordered")
        return super().run(call)


class MidRowRuntime(StageRuntime):
    """Owns what `StageRuntime` does. When the rows of step 1 have begun, their second pass waits until other weights
    have come for them, which no shard can have asked for."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        if self.parts.engine is None:
            return
        engine, ledger = self.parts.engine._engine, self.parts.ledger
        submit = engine._runner.submit
        passes = 0

        def held(batch: Batch) -> None:
            nonlocal passes
            passes += ledger.find(Address("generate", 0)) is not None
            if passes == 2:
                until(lambda: engine._admission.weights, "newer weights come for the rows in flight")
            submit(batch)

        engine._runner.submit = held

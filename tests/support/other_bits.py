"""The stages' runtime as another machine would have it: a trained policy comes out a little different, and the worker
says that its processor is another. For runs that go on elsewhere."""

from __future__ import annotations

from dataclasses import replace

from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.models.protocol import PolicyBatch

INSTRUCTIONS = "of another processor"


class OtherBits(StageRuntime):
    """Owns what a `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.parts.numerics["instructions"] = INSTRUCTIONS
        if self.parts.updates is None:
            return
        host = self.parts.updates.host
        train = host.update_policy

        def train_otherwise(step: int, batch: PolicyBatch) -> dict[str, float]:
            advantages = replace(batch.advantages, advantages=batch.advantages.advantages * 1.01)
            return train(step, replace(batch, advantages=advantages))

        host.update_policy = train_otherwise  # type: ignore[method-assign]

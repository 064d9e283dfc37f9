"""The real runtime, on which rows are sure to move: no replica begins before all have rows, and passes take their time
until some have moved. A file then makes the one that accepted them stand still. In the run's `control/` directory:

- `begun@<worker>`: written by a replica before its first pass
- `taken@<worker>`: written by a replica when it has accepted rows: its process id
- `hold`: while it is there, a replica that has accepted rows computes no pass
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.engines.embedded.batch import Batch
from stages.engines.embedded.migration import AcceptedRows
from stages.engines.migration import MigratedRow

PASS_S = 0.01
"""Before a move: hundreds of passes give the driver seconds to order it."""


class HeldRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        if self.parts.engine is None:
            return
        config = self.parts.config
        control = config.run_dir / "control"
        replicas = config.placement.gangs[spec.gang].workers
        engine = self.parts.engine._engine
        runner = engine._runner
        accept, submit = engine.migrate_in, runner.submit
        accepted = False

        def migrate_in(migrated: Sequence[MigratedRow]) -> AcceptedRows:
            nonlocal accepted
            incoming: AcceptedRows = accept(migrated)
            accepted = True
            staged = control / f".taken@{spec.name}"
            staged.write_text(str(os.getpid()))
            staged.rename(control / f"taken@{spec.name}")
            return incoming

        def held(batch: Batch) -> None:
            (control / f"begun@{spec.name}").touch()
            while len(list(control.glob("begun@*"))) < replicas or (accepted and (control / "hold").exists()):
                time.sleep(0.01)
            if not list(control.glob("taken@*")):
                time.sleep(PASS_S)
            submit(batch)

        engine.migrate_in, runner.submit = migrate_in, held

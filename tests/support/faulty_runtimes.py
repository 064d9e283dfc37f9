"""Runtimes of real stages with one fault each: a process that dies, hangs, is late, or has other weights than were
trained. A test names one with `use_runtime`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.config.loading import load_yaml
from pipeline.workers.messages import Call, Outcome, WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.engines.embedded.batch import Batch
from stages.engines.embedded.migration import AcceptedRows, BatchTimes, CopiedPart, MigratedRow, MigratingEngine
from stages.engines.embedded.scheduler import Chunk
from stages.engines.row_loads import MigrationRequest, PassCost, RowKey
from stages.models.protocol import PolicyBatch
from storage import files
from storage.address import Address
from storage.weights import FilePlace, WeightBoard, WeightWrite
from tests.support.faulty_sender import first_time, use_faulty_sender
from tests.support.waiting import until

VICTIM = Address("generate", 1, 1)


class DyingSettlerRuntime(StageRuntime):
    """A runtime whose process dies once between a commit and the last rename of its files."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        store, died = self.parts.store, self.parts.config.run_dir / "died"
        settle, move = store.settle, files.move

        def dying(commit: Any, contents: Any = None) -> None:
            if commit.address != VICTIM or died.exists():
                settle(commit, contents)
                return
            died.touch()
            moved: list[str] = []

            def dying_move(root: files.Root, source: str, target: str) -> bool:
                moved.append(target)
                if len(moved) == 5:
                    os._exit(1)
                return move(root, source, target)

            files.move = dying_move
            settle(commit)

        store.settle = dying  # type: ignore[method-assign]


class RestlessRuntime(StageRuntime):
    """A runtime whose processes do not all leave their devices as they are told to: the engine's first dies of it, its
    next one never answers, and the trainer's first cannot."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._who = (spec.gang, spec.incarnation)
        self._asked = 0

    def sleep(self) -> None:
        self._asked += 1
        match (*self._who, self._asked):
            case ("generate", 0, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("generate", 1, 1):
                threading.Event().wait()
            case ("train", 0, 2):
                raise RuntimeError("the device does not answer")
        super().sleep()


TOKEN_S = 0.004
"""Seconds that each token of a batch takes before a move. So it pays to move a row to the replica that has fewer, and
to copy its keys and values instead of feeding its tokens again. Hundreds of passes give the driver seconds to order
it."""


class SteadyTimes(BatchTimes):
    """The times of an engine whose tokens take `TOKEN_S` each. On a busy machine the measured passes would take so much
    longer than that, however few rows they have, that no move would pay."""

    def __init__(self) -> None:
        super().__init__()
        self.prefill_s, self.cost_known = TOKEN_S, True

    def observe(self, chunks: Collection[Chunk], seconds: float, num_groups: int = 1) -> None:
        pass

    def cost(self) -> PassCost:
        return PassCost(0.0, TOKEN_S)


class HeldRuntime(StageRuntime):
    """A runtime on which rows are sure to move: no replica begins before all have rows, and passes take their time
    until some have moved. A file then makes the replica that accepted them stand still. In the run's `control/`:

    - `begun@<worker>`: written by a replica before its first pass
    - `taken@<worker>`: written by a replica when it has accepted rows: its process id
    - `hold`: while it is there, a replica that has accepted rows computes no pass
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        if self.parts.engine is None:
            return
        config = self.parts.config
        self._control = config.run_dir / "control"
        self._replicas = config.placement.gangs[spec.gang].workers
        self._accepted = False
        self._hold(self.parts.engine._engine)

    def _hold(self, engine: MigratingEngine) -> None:
        accept, submit = engine.migrate_in, engine._runner.submit
        engine._times = SteadyTimes()

        def migrate_in(migrated: Sequence[MigratedRow]) -> AcceptedRows:
            incoming = accept(migrated)
            self._accepted = True
            self._tell("taken")
            return incoming

        def held(batch: Batch) -> None:
            (self._control / f"begun@{self.parts.spec.name}").touch()
            while len(list(self._control.glob("begun@*"))) < self._replicas or (self._accepted and self._holds):
                time.sleep(0.01)
            if not list(self._control.glob("taken@*")):
                time.sleep(TOKEN_S * len(batch.ids))
            submit(batch)

        engine.migrate_in, engine._runner.submit = migrate_in, held  # type: ignore[method-assign]

    @property
    def _holds(self) -> bool:
        return (self._control / "hold").exists()

    def _tell(self, what: str) -> None:
        name = f"{what}@{self.parts.spec.name}"
        (self._control / f".{name}").write_text(str(os.getpid()))
        (self._control / f".{name}").rename(self._control / name)


class HeldCopyRuntime(HeldRuntime):
    """A runtime as `HeldRuntime`, but a replica stands still after the first part of the first row that it gets. It
    continues to compute passes. Rows without a full block of keys and values to copy stay.

    - `copying@<worker>`: written by the replica then: its process id
    - `hold`: while it is there, the replica does not continue that row
    """

    def _hold(self, engine: MigratingEngine) -> None:
        super()._hold(engine)
        write, migrate_out = engine.write_in, engine.migrate_out

        def migrate_copied(
            rows: Collection[MigrationRequest], copied: Mapping[RowKey, CopiedPart] = MappingProxyType({})
        ) -> list[MigratedRow]:
            return migrate_out(rows, copied) if any(part.stop for part in copied.values()) else []

        def write_in(part: CopiedPart) -> float:
            seconds = write(part)
            if self._holds:
                self._tell("copying")
            while self._holds:
                time.sleep(0.01)
            return seconds

        engine.write_in, engine.migrate_out = write_in, migrate_copied  # type: ignore[method-assign]


class LateRuntime(StageRuntime):
    """A runtime. No shard of step 1 begins before version 1 is published."""

    def run(self, call: Call) -> Outcome:
        if call.address.stage == "generate" and call.address.step == 1:
            until(lambda: self.parts.ledger.find(Address("publish", 1)), "version 1 is published")
        return super().run(call)


class DyingLateRuntime(LateRuntime):
    """A runtime. The first shard of step 1 that could begin takes its process with it."""

    def run(self, call: Call) -> Outcome:
        died = self.parts.config.run_dir / "died"
        if call.address == Address("generate", 1) and not died.exists():
            until(lambda: self.parts.ledger.find(Address("publish", 1)), "version 1 is published")
            died.touch()
            os._exit(1)
        return super().run(call)


class FailingLateRuntime(LateRuntime):
    """A runtime. The first attempt at scoring step 2 raises."""

    def run(self, call: Call) -> Outcome:
        failed = self.parts.config.run_dir / "failed"
        if call.address.stage == "score" and call.address.step == 2 and not failed.exists():
            failed.touch()
            raise ValueError("as ordered")
        return super().run(call)


class MidRowRuntime(StageRuntime):
    """A runtime. When the rows of step 1 have begun, their second pass waits until other weights have come for them,
    which no shard can have asked for. Once in a run: in a resumed one they may be published before the rows begin."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        if self.parts.engine is None:
            return
        engine, ledger = self.parts.engine._engine, self.parts.ledger
        submit = engine._runner.submit
        passes, held_before = 0, self.parts.config.run_dir / "held"

        def held(batch: Batch) -> None:
            nonlocal passes
            passes += ledger.find(Address("generate", 0)) is not None
            if passes == 2 and not held_before.exists():
                held_before.touch()
                until(lambda: engine._admission.weights, "newer weights come for the rows in flight")
            submit(batch)

        engine._runner.submit = held


SIDE_BY_SIDE = (Address("reference", 1, 0), Address("logprob", 1, 0))


class MeetingRuntime(StageRuntime):
    """A runtime in which each of two nodes commits only after the other one has computed its output. A run in which
    one of them waits for the other's commit does not end."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        write, folder = self.parts.store.write, self.parts.config.run_dir

        def met(address: Address, *args: Any, **options: Any) -> Any:
            if address in SIDE_BY_SIDE:
                (folder / f"computed-{address.stage}").touch()
                for other in SIDE_BY_SIDE:
                    until((folder / f"computed-{other.stage}").exists, f"the output of {other}")
            return write(address, *args, **options)

        self.parts.store.write = met  # type: ignore[method-assign]


DAMAGED = 2
"""The version."""


class PerturbingBoard(WeightBoard):
    """Owns what `WeightBoard` does."""

    def put(self, write: WeightWrite, place: FilePlace, rows: np.ndarray, start: int = 0, stride: int = 0) -> None:
        turned = next(place.name for place in write.places if "down_proj" in place.name)
        if write.version == DAMAGED and place.name == turned:
            rows = -rows
        super().put(write, place, rows, start, stride)


class PerturbedBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.parts.board = PerturbingBoard(self.parts.board.directory)


class StaleBoard(WeightBoard):
    """Owns what `WeightBoard` does."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self.before: dict[tuple[str, int], np.ndarray] = {}

    def put(self, write: WeightWrite, place: FilePlace, rows: np.ndarray, start: int = 0, stride: int = 0) -> None:
        if write.version == DAMAGED:
            rows = self.before[place.name, start]
        self.before[place.name, start] = rows.copy()
        super().put(write, place, rows, start, stride)


class StaleBoardRuntime(StageRuntime):
    """Owns what `StageRuntime` does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.parts.board = StaleBoard(self.parts.board.directory)


class FlippedBoardRuntime(StageRuntime):
    """A runtime. Once per run: a resumed one is left alone."""

    def run(self, call: Call) -> Outcome:
        result = super().run(call)
        flipped = self.parts.config.run_dir / "flipped"
        if (call.address.stage, call.version) == ("publish", DAMAGED) and not flipped.exists():
            manifest = self.parts.board.manifest(DAMAGED)
            file = np.memmap(self.parts.board.directory / manifest.file, np.uint8, "r+")
            file[manifest.tensors[3].offset + 5] ^= 1
            file.flush()
            flipped.touch()
        return result


INSTRUCTIONS = "of another processor"


class OtherBits(StageRuntime):
    """A runtime as on another machine, for runs that are continued elsewhere: a trained policy comes out a little
    different, and the worker reports another processor."""

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


class HeldSender(StageRuntime):
    """A runtime whose host's sender stops in the middle of a version (`tests/support/faulty_sender.py`)."""

    def __init__(self, spec: WorkerSpec) -> None:
        use_faulty_sender(load_yaml(spec.config_yaml).run_dir / "control")
        super().__init__(spec)


class StruckStagesRuntime(StageRuntime):
    """A runtime under which three processes are killed, once each in a run. Each leaves a file `control/killed NAME`:

    - the sender of rank 0's host, in the middle of version 1
    - the trainers' last rank, when rank 0 has begun version 2 and waits for the tensors of the last pipeline stage
    - rank 1 of the engine, in the middle of a response after version 2 was published
    """

    def __init__(self, spec: WorkerSpec) -> None:
        control: Path = load_yaml(spec.config_yaml).run_dir / "control"
        control.mkdir(exist_ok=True)
        use_faulty_sender(control, kill=True)
        super().__init__(spec)
        if spec.index == spec.size - 1 and self.parts.updates is not None:
            self.parts.board = StruckBoard(self.parts.board.directory, control)
        if self.parts.engine is not None:
            runner, ledger = self.parts.engine._engine._runner, self.parts.ledger
            submit = runner.submit

            def struck(batch: Batch) -> None:
                submit(batch)
                if ledger.find(Address("publish", 2)) is not None and first_time(control, "engine rank"):
                    runner._processes._processes[0].kill()

            runner.submit = struck


class StruckBoard(WeightBoard):
    """Owns what `WeightBoard` does."""

    def __init__(self, directory: Path, control: Path) -> None:
        super().__init__(directory)
        self._control = control
        self._seen = 0

    def sees(self, write: WeightWrite) -> bool:
        self._seen += write.version == 2
        if self._seen == 2 and first_time(self._control, "writer"):  # after the look that rank 0 asks all ranks for
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sees(write)


class DyingScorerRuntime(StageRuntime):
    """A runtime on which rank 1 of the gang that scores dies once, at its share of a shard."""

    def run(self, call: Call) -> Outcome:
        died = self.parts.config.run_dir / "died"
        if (call.address.stage, call.address.step) == ("score", 1) and self.parts.spec.index == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(call)

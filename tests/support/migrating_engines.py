"""Engines whose rows migrate, for tests: a `Gate` lets one run an exact number of batches, so there is no clock and no
luck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TypeVar

import torch

from stages.engines.embedded.batch import Batch
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.migration import CopiedPart, MigratedRow, MigratingEngine, key_of
from stages.engines.protocol import Completion, Request
from stages.engines.row_loads import COPY_POSITIONS, MigrationRequest
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from tests.support.engine_settings import embedded
from tests.support.engines import by_row
from tests.support.waiting import until

T = TypeVar("T")
CPU = torch.device("cpu")
MAX_SEQ = 128


class Gate:
    """Owns the batches of an engine: they are run only as far as `let` says, or all after `open`."""

    def __init__(self, engine: MigratingEngine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._allowed = 0.0
        self._waiting = False
        submit = engine._runner.submit

        def gated(batch: Batch) -> None:
            with self._changed:
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._allowed > 0)
                self._waiting = False
                self._allowed -= 1
            submit(batch)

        engine._runner.submit = gated  # type: ignore[method-assign]

    def let(self, batches: float) -> None:
        """So many batches run; then the engine is held in the next, if it has one."""
        with self._changed:
            self._allowed += batches
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._waiting and self._allowed == 0, timeout=60)

    def open(self) -> None:
        with self._changed:
            self._allowed = float("inf")
            self._changed.notify_all()

    def call(self, function: Callable[..., T], *args: object, batches: float | None = None) -> T:
        """Make a call that waits for the batch that is under way; then so many batches run, or all."""
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(function, *args)
            until(lambda: self._engine._admission.num_pausing > 0)
            if batches is None:
                self.open()
            else:
                self.let(batches)
            return answer.result(timeout=60)


def build(
    max_rows: int = 8, kernels: str = "auto", path: str = RANDOM_TINY, max_seq: int = MAX_SEQ, **config: object
) -> MigratingEngine:
    settings = embedded(max_rows, kernels=kernels, **config)
    return build_embedded(path, settings, max_seq=max_seq, threads=1, device=CPU, migratable=True)


def requests(num: int = 5, new: int = 40, version: int = 0) -> list[Request]:
    """Rows with prompts of 3 to 33 tokens; some prompts begin alike for more than a block."""
    sampling = SamplingConfig(max_new_tokens=new, min_new_tokens=new, temperature=0.7)
    shared = tuple(range(50, 70))
    prompts = [(shared if i % 2 else ()) + tuple(range(3 + i, 6 + 3 * i)) for i in range(num)]
    return [Request(i, 1, 2, prompt, version, sampling) for i, prompt in enumerate(prompts)]


def at_home(rows: list[Request], kernels: str = "auto") -> dict[int, Completion]:
    with closing(build(kernels=kernels)) as engine:
        return by_row(engine.generate(rows))


@contextmanager
def engines(num: int, **config: object) -> Iterator[list[MigratingEngine]]:
    built = [build(**config) for _ in range(num)]  # type: ignore[arg-type]
    try:
        yield built
    finally:
        for engine in built:
            engine.close()


def pause_after(engine: MigratingEngine, batches: int, rows: list[Request]) -> tuple[Iterator[Completion], Gate]:
    """A call whose rows have been through so many batches, and one more that is under way."""
    gate = Gate(engine)
    results = engine.generate(rows)
    gate.let(batches)
    return results, gate


def give(
    engine: MigratingEngine,
    gate: Gate,
    rows: list[Request],
    with_cache: bool = True,
    after: Collection[CopiedPart] = (),
) -> list[MigratedRow]:
    """Gives rows away as soon as the batch that is under way is through. `after`: the last parts that were copied."""
    wanted = [MigrationRequest(key_of(row), with_cache) for row in rows]
    return gate.call(engine.migrate_out, wanted, {part.key: part for part in after})


def copy_parts(source: MigratingEngine, gate: Gate, target: MigratingEngine, row: Request) -> CopiedPart:
    """The first phase: all parts of a row, as a courier takes them. The source runs one batch between two parts."""
    part = None
    while part is None or part.stop - part.start == COPY_POSITIONS:
        part = gate.call(source.copy_out, key_of(row), 0 if part is None else part.stop, batches=1)
        assert part is not None
        target.write_in(part)
    return part


def carry(source: MigratingEngine, target: MigratingEngine, migrated: list[MigratedRow]) -> None:
    """All the way, as a courier does between two processes."""
    deliver(target.migrate_in(migrated), source)


def deliver(incoming: Iterable[tuple[int, Completion | None]], source: MigratingEngine) -> None:
    """Take what rows have become to the engine that they are from."""
    for ticket, completion in incoming:
        assert completion is not None
        source.deliver(ticket, completion)

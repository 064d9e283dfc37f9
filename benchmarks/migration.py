"""Rows that move between two replicas: what a move costs, and what it gains in a long tail.

Two worker processes with an engine each (bfloat16, one thread), on this machine, over Dask's connections, with the code
that a run moves rows with (`pipeline.workers.row_migration`, `pipeline.graph.migration`).

1. A row of so many tokens moves: from when it is asked for until the target has computed its next token. With its keys
   and values, or fed again. Beside it what of that was the transfer, and what the plan would choose.
2. A tail: 8 uneven rows on each replica. Seconds until one replica is free, and until all rows are done, with moves
   (fewer than 5 rows left) and without, in turn.
"""

from __future__ import annotations

import queue
import statistics
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster, get_worker

from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.graph.migration import MigrationPlanner
from pipeline.workers.messages import REPORTS, MigrationDone, MigrationOrder, Report, RowsReport, WorkerSpec
from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.row_migration import open_for_rows, order_migration
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.migration import AcceptedRows, MigratedRow, MigratingEngine
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS
from stages.engines.protocol import Request
from stages.engines.row_loads import MigrationRequest
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from storage import codec

MODEL = Path("assets/smollm2-135m-instruct")
SLOTS, BELOW = 16, 5
LENGTHS, QUICK_LENGTHS = (64, 256, 1024, 1900), (32, 128)
TAIL = ((24, 36, 48, 60, 72, 84, 96, 240), (24, 36, 48, 60, 72, 96, 200, 240))
"""New tokens of each row, by replica."""
CAPACITY = 64
"""Tokens that a measured row gets."""
SETTLED = 8
"""Passes of a row before it is asked for."""


class Replica:
    """Owns the engine of a worker process; stands for `VersionedEngine`, with one version only."""

    def __init__(self, path: str, max_seq: int) -> None:
        config = EngineConfig(max_rows=SLOTS, dtype="bfloat16", kv_budget_mb=1024)
        engine = build_embedded(path, config, max_seq=max_seq, threads=1, migratable=True)
        assert isinstance(engine, MigratingEngine)
        self.engine = engine
        self.migratable = self
        self.num_calls_migrated = 0
        self.watch_load, self.deliver, self.wanted = engine.watch_load, engine.deliver, engine.wanted
        self.give_back = engine.give_back
        self.asked: list[float] = []
        """When rows were asked for."""
        self.passes: list[float] = []
        """When passes were done."""
        self.running: threading.Thread | None = None
        collect = self.engine._runner.collect

        def timed() -> Any:
            draws = collect()
            self.passes.append(time.perf_counter())
            return draws

        self.engine._runner.collect = timed  # type: ignore[method-assign]

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        self.asked.append(time.perf_counter())
        return self.engine.migrate_out(rows)

    def migrate_in(self, moved: Sequence[MigratedRow]) -> AcceptedRows:
        return self.engine.migrate_in(moved)

    def rows_left(self) -> None:
        """No shard waits for another version."""

    def resident(self, versions: Set[int]) -> AbstractContextManager[None]:
        """Every row has the one version."""
        del versions
        return nullcontext()


def build(index: int, path: str, max_seq: int) -> None:
    """Makes this worker process a replica."""
    worker = get_worker()
    worker.replica = Replica(path, max_seq)
    spec = WorkerSpec("bench", index, 1, 0, "", "", "")
    open_for_rows(worker, spec, ReplicaRows(worker.replica, SLOTS + 1, timeout_s=30.0))


def start(requests: list[Request], passes: int) -> None:
    """Begins to generate; returns after so many passes."""
    replica: Replica = get_worker().replica
    replica.passes.clear()
    replica.asked.clear()
    results = replica.engine.generate(requests)
    replica.running = threading.Thread(target=lambda: list(results))
    replica.running.start()
    while len(replica.passes) < passes:
        time.sleep(0.001)


def finish() -> float:
    """When all rows that were started here were done."""
    replica: Replica = get_worker().replica
    assert replica.running is not None
    replica.running.join()
    return time.perf_counter()


def clear() -> None:
    get_worker().replica.passes.clear()


def times() -> tuple[list[float], list[float]]:
    """(when rows were asked for, when passes were done)"""
    replica: Replica = get_worker().replica
    return list(replica.asked), list(replica.passes)


@dataclass
class Pair:
    """The two replicas as the driver sees them."""

    client: Client
    addresses: list[str]
    news: queue.SimpleQueue[RowsReport | MigrationDone | None] = field(default_factory=queue.SimpleQueue)
    """Reports of the replicas; None: the rows that were started on one are done."""

    def call(self, index: int, function: Any, *args: Any) -> Any:
        return self.client.submit(function, *args, workers=[self.addresses[index]], pure=False).result()


def request(number: int, num_prompt: int, new: int) -> Request:
    prompt = tuple(3 + (7 * number + i * i) % 200 for i in range(num_prompt))
    return Request(number, 1, 1, prompt, 0, SamplingConfig(new, new))


@dataclass(frozen=True)
class Moved:
    """Seconds: of a row's standstill, of the transfer, and of a pass at the target; and bytes."""

    standstill: float
    transfer: float
    one_pass: float
    num_bytes: int


def move_one(pair: Pair, number: int, length: int, with_cache: bool) -> Moved:
    """Moves a row that has `length` tokens when it goes."""
    row = request(number, length - SETTLED, CAPACITY)
    pair.call(1, clear)
    pair.call(0, start, [row], SETTLED)
    order_migration(
        pair.client,
        pair.addresses[0],
        MigrationOrder(number, "bench", 0, 0, pair.addresses[1], (MigrationRequest((1, 1, number), with_cache),)),
    )
    over = pair.news.get()
    while not isinstance(over, MigrationDone):
        over = pair.news.get()
    assert over.num_rows == 1, over
    pair.call(0, finish)
    (asked,), _ = pair.call(0, times)
    _, passes = pair.call(1, times)
    first = 0 if with_cache else -(-length // BATCH_PROMPT_TOKENS) - 1
    steps = [after - before for before, after in zip(passes[first:], passes[first + 1 :], strict=False)]
    return Moved(passes[first] - asked, over.seconds, statistics.median(steps), over.num_bytes)


def run_tail(pair: Pair, number: int, tail: Sequence[Sequence[int]], below: int) -> tuple[float, float, int]:
    """(seconds until a replica was free, seconds until all rows were done, rows that moved)"""
    while not pair.news.empty():
        pair.news.get()
    tails = MigrationPlanner(below)
    began = time.perf_counter()
    for index, lengths in enumerate(tail):
        rows = [request(number + 100 * index + i, 32, new) for i, new in enumerate(lengths)]
        pair.client.submit(start, rows, 1, workers=[pair.addresses[index]], pure=False).result()
    ends = [pair.client.submit(finish, workers=[a], pure=False) for a in pair.addresses]
    for end in ends:
        end.add_done_callback(lambda _: pair.news.put(None))
    free, moved, running = 0.0, 0, len(ends)
    while running:
        news = pair.news.get()
        if news is None:
            running -= 1
        elif isinstance(news, MigrationDone):
            tails.arrived(news.number, news.num_bytes, news.seconds)
            moved += news.num_rows
        else:
            tails.update_load(news.index, news.load)
            if not free and not news.load.rows:
                free = time.perf_counter() - began
        for order, move in tails.next_migrations([0, 1], []):
            target = pair.addresses[move.target]
            order_migration(
                pair.client,
                pair.addresses[move.source],
                MigrationOrder(order, "bench", move.source, 0, target, move.rows),
            )
    return free, max(end.result() for end in ends) - began, moved


@contextmanager
def two_replicas(path: str, max_seq: int) -> Iterator[Pair]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=4, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        pair = Pair(client, sorted(client.scheduler_info(n_workers=-1)["workers"]))
        client.subscribe_topic(REPORTS, lambda event: pair.news.put(codec.decode(Report, event[1])))
        for index in range(2):
            pair.call(index, build, index, path, max_seq)
        yield pair


def main() -> None:
    options = arguments(__doc__ or "")
    repeats = 1 if options.quick else options.repeats
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = []
    tails: list[tuple[str, ...]] = []
    number = 0
    path = RANDOM_TINY if options.quick else str(MODEL)
    with (
        two_replicas(path, max(*lengths, 240) + CAPACITY if not options.quick else 256) as pair,
        measured_load() as load,
    ):
        tail = [[max(1, new // 2) for new in part] for part in TAIL] if options.quick else TAIL
        for length in lengths:
            seconds: dict[bool, list[Moved]] = {True: [], False: []}
            for _ in range(repeats + 1):  # the first opens connections and touches memory
                for with_cache in (True, False):
                    number += 1
                    seconds[with_cache].append(move_one(pair, number, length, with_cache))
                    print(f"{length} {with_cache}: {seconds[with_cache][-1]}", file=sys.stderr, flush=True)
            carried, fed = (
                statistics.median(m.standstill for m in seconds[with_cache][1:]) for with_cache in (True, False)
            )
            moved = seconds[True][1:]
            transfer = statistics.median(m.transfer for m in moved)
            one_pass = statistics.median(m.one_pass for m in moved)
            mib = moved[0].num_bytes / 2**20
            cells = (mib, carried * 1e3, transfer * 1e3, fed * 1e3, one_pass * 1e3, fed / carried)
            rows.append((str(length), *(f"{cell:.1f}" for cell in cells)))
            figures |= {
                f"{length}/carried_s": carried,
                f"{length}/transfer_s": transfer,
                f"{length}/fed_again_s": fed,
                f"{length}/pass_s": one_pass,
                f"{length}/mib": mib,
            }
        arms: dict[str, list[tuple[float, float, int]]] = {"stay": [], "move": []}
        for _ in range(repeats):
            for arm, below in (("stay", 0), ("move", BELOW)):
                number += 1000
                arms[arm].append(run_tail(pair, number, tail, below))
                print(f"{arm}: {arms[arm][-1]}", file=sys.stderr, flush=True)
        for arm, results in arms.items():
            free, total = (statistics.median(result[i] for result in results) for i in (0, 1))
            tails.append((arm, f"{free:.2f}", f"{total:.2f}", "/".join(str(result[2]) for result in results)))
            figures |= {f"tail/{arm}/free_s": free, f"tail/{arm}/total_s": total}
    others = f"{repeats} repeats, medians; others' load {load().others:.0%}"
    columns = ("tokens", "MiB", "carried, ms", "of it transfer", "fed again, ms", "a pass, ms", "fed / carried")
    report("moving a row: how long it stands still", columns, rows, [others])
    report(
        f"a tail of {sum(map(len, tail))} rows on two replicas",
        ("rows", "one replica free, s", "all done, s", "rows moved"),
        tails,
        [others],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

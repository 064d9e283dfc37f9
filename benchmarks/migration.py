"""Rows that move between replicas: what a move costs, and what it gains in a long tail.

Worker processes with an engine each (bfloat16, one thread), on this machine, over Dask's connections, with the code
that a run moves rows with (`pipeline.workers.row_migration`, `pipeline.graph.migration`).

1. A row of so many tokens moves: how long it stands still, from when it is taken out until the target has computed its
   next token. With its keys and values, copied before, or fed again. Beside it the time for which passes at both ends
   waited for the copies.
2. A tail while other work waits: 8 uneven rows on each of two replicas. Seconds until one replica is free, and until
   all rows are done, with moves and without, in turn.
3. A tail while nothing waits: three replicas of `random:tiny` whose passes sleep as long as a device would take, so
   that they do not share cores. The planner knows the rows' limit, not their lengths. Seconds until all rows are done:
   without moves, with moves, and without moves from the best assignment that could be chosen if lengths were known.
"""

from __future__ import annotations

import itertools
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster, get_worker

from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.graph.migration import MigrationPlanner
from pipeline.workers.messages import REPORTS, MigrationDone, MigrationOrder, Report, RowsReport, WorkerSpec
from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.row_migration import open_for_rows, order_migration
from stages.engines.config import EngineConfig
from stages.engines.embedded.batch import Batch
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.migration import CopiedPart, MigratedRow, MigratingEngine
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS
from stages.engines.protocol import Request
from stages.engines.row_loads import EngineLoad, MigrationRequest, PassCost, RowKey
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from storage import codec

MODEL = Path("assets/smollm2-135m-instruct")
SLOTS = 16
LENGTHS, QUICK_LENGTHS = (64, 256, 1024, 1900), (32, 128)
TAIL = ((24, 36, 48, 60, 72, 84, 96, 240), (24, 36, 48, 60, 72, 96, 200, 240))
"""New tokens of each row, by replica."""
THREE = ((20, 26, 34, 40), (48, 56, 66, 78), (90, 120, 160, 220))
LIMIT = 220
DEVICE = PassCost(0.020, 0.006)
"""Seconds of a pass in the third part."""
CAPACITY = 64
"""Tokens that a measured row gets."""
NUM_PROMPT = 32
"""Tokens of a prompt in a tail."""
SETTLED = 8
"""Passes of a row before it is asked for."""
_TRIES = 10
"""Maximum number of rows that are tried for one measured move."""


class Replica:
    """Owns the engine of a worker process; stands for `VersionedEngine`, with one version only."""

    def __init__(self, path: str, max_seq: int, device: PassCost | None) -> None:
        config = EngineConfig(max_rows=SLOTS, dtype="bfloat16", kv_budget_mb=1024)
        engine = build_embedded(path, config, max_seq=max_seq, threads=1, migratable=True)
        assert isinstance(engine, MigratingEngine)
        self.engine = engine
        self.migratable = self
        self.num_calls_migrated = 0
        self.deliver, self.tickets_awaited, self.give_back = engine.deliver, engine.tickets_awaited, engine.give_back
        self.copy_out, self.write_in, self.drop_parts = engine.copy_out, engine.write_in, engine.drop_parts
        self.migrate_in, self.version = engine.migrate_in, engine.version
        self.limit = 0
        """Tokens that each row may have as far as the planner hears; 0: it hears the truth."""
        self.asked: list[float] = []
        """When rows were taken out."""
        self.passes: list[float] = []
        """When passes were done."""
        self.running: threading.Thread | None = None
        collect = self.engine._runner.collect

        submit = self.engine._runner.submit

        def timed() -> Any:
            draws = collect()
            self.passes.append(time.perf_counter())
            return draws

        def slept(batch: Batch) -> None:
            ends = time.perf_counter() + device.seconds(len(batch.drawn))  # type: ignore[union-attr]
            submit(batch)
            time.sleep(max(ends - time.perf_counter(), 0.0))

        self.engine._runner.collect = timed  # type: ignore[method-assign]
        if device is not None:
            self.engine._runner.submit = slept  # type: ignore[method-assign]

    def watch_load(self, listener: Callable[[EngineLoad], None]) -> None:
        def listen(load: EngineLoad) -> None:
            if self.limit:
                rows = [replace(row, left=self.limit - (row.tokens - NUM_PROMPT)) for row in load.rows]
                load = replace(load, rows=tuple(rows))
            listener(load)

        self.engine.watch_load(listen)

    def migrate_out(self, rows: Collection[MigrationRequest], copied: Mapping[RowKey, CopiedPart]) -> list[MigratedRow]:
        self.asked.append(time.perf_counter())
        return self.engine.migrate_out(rows, copied)

    def rows_left(self) -> None:
        """Do nothing, since no shard waits for another version."""

    def resident(self, versions: Set[int]) -> AbstractContextManager[None]:
        """Do nothing, since every row has the same version."""
        del versions
        return nullcontext()


def build(index: int, path: str, max_seq: int, device: PassCost | None) -> None:
    """Make this worker process a replica."""
    worker = get_worker()
    worker.replica = Replica(path, max_seq, device)
    spec = WorkerSpec("bench", index, 1, 0, "", "", "")
    open_for_rows(worker, spec, ReplicaRows(worker.replica, timeout_s=30.0))


def start(requests: list[Request], passes: int, limit: int = 0) -> None:
    """Begin to generate. Return after that many passes, or at once if there are no rows."""
    replica: Replica = get_worker().replica
    replica.limit = limit
    replica.passes.clear()
    replica.asked.clear()
    results = replica.engine.generate(requests)
    replica.running = threading.Thread(target=lambda: list(results))
    replica.running.start()
    while requests and len(replica.passes) < passes:
        time.sleep(0.001)


def finish() -> float:
    """Return the time at which all rows that were started here were done."""
    replica: Replica = get_worker().replica
    assert replica.running is not None
    replica.running.join()
    return time.perf_counter()


def clear() -> None:
    get_worker().replica.passes.clear()


def times() -> tuple[list[float], list[float]]:
    """Return (times at which rows were taken out, times at which passes were done)."""
    replica: Replica = get_worker().replica
    return list(replica.asked), list(replica.passes)


@dataclass
class Pool:
    """The replicas as the driver sees them."""

    client: Client
    addresses: list[str]
    news: queue.SimpleQueue[RowsReport | MigrationDone | int] = field(default_factory=queue.SimpleQueue)
    """Reports of the replicas; a number: the rows that were started on that replica are done."""

    def call(self, index: int, function: Any, *args: Any) -> Any:
        return self.client.submit(function, *args, workers=[self.addresses[index]], pure=False).result()


def request(number: int, num_prompt: int, new: int) -> Request:
    prompt = tuple(3 + (7 * number + i * i) % 200 for i in range(num_prompt))
    return Request(number, 1, 1, prompt, 0, SamplingConfig(new, new))


@dataclass(frozen=True)
class Moved:
    """Seconds: of a row's standstill, in which passes at both ends waited for copies, and of a pass at the target; and
    bytes."""

    standstill: float
    held: float
    one_pass: float
    num_bytes: int


def move_one(pool: Pool, number: int, length: int, with_cache: bool) -> Moved:
    """Move a row that has `length` tokens by then. On busy cores a row can be done before its order arrives: then try
    with another row."""
    over: RowsReport | MigrationDone | int = 0
    for other in range(number, number + _TRIES * 1000, 1000):
        pool.call(1, clear)
        pool.call(0, start, [request(other, length - SETTLED, CAPACITY)], SETTLED)
        key = 1, 1, other
        order = MigrationOrder(other, "bench", 0, 0, pool.addresses[1], (MigrationRequest(key, with_cache),))
        order_migration(pool.client, pool.addresses[0], order)
        over = pool.news.get()
        while not isinstance(over, MigrationDone):
            over = pool.news.get()
        pool.call(0, finish)
        if over.num_rows:
            break
    assert isinstance(over, MigrationDone), over
    assert over.num_rows == 1, over
    (asked,), _ = pool.call(0, times)
    _, passes = pool.call(1, times)
    first = 0 if with_cache else -(-length // BATCH_PROMPT_TOKENS) - 1
    steps = [after - before for before, after in zip(passes[first:], passes[first + 1 :], strict=False)]
    return Moved(passes[first] - asked, over.held_s, statistics.median(steps), over.num_bytes)


@dataclass(frozen=True)
class Tail:
    """Seconds until a replica was free and until all rows were done, and the number of rows that moved."""

    free_s: float
    total_s: float
    num_moved: int


def run_tail(
    pool: Pool,
    number: int,
    tail: Sequence[Sequence[int]],
    planner: MigrationPlanner | None,
    waiting: int = 0,
    limit: int = 0,
) -> Tail:
    """Run rows with that many new tokens on each replica. `planner`: moves them. `waiting`: number of other nodes."""
    while not pool.news.empty():
        pool.news.get()
    replicas = range(len(tail))
    began = time.perf_counter()
    for index, lengths in enumerate(tail):
        rows = [request(number + 100 * index + i, NUM_PROMPT, new) for i, new in enumerate(lengths)]
        pool.client.submit(start, rows, 1, limit, workers=[pool.addresses[index]], pure=False).result()
    ends = [pool.client.submit(finish, workers=[a], pure=False) for a in pool.addresses]
    for index, end in enumerate(ends):
        end.add_done_callback(lambda _, index=index: pool.news.put(index))
    free, moved, busy = 0.0, 0, set(replicas)
    while busy:
        news = pool.news.get()
        if isinstance(news, int):
            busy.discard(news)
        elif planner is None:
            pass
        elif isinstance(news, MigrationDone):
            planner.arrived(news.number, news.num_rows, news.num_bytes, news.held_s, news.standstill_s)
            moved += news.num_rows
        else:
            planner.update_load(news.index, news.load, time.perf_counter())
        if isinstance(news, RowsReport) and not free and not news.load.rows:
            free = time.perf_counter() - began
        orders = (
            planner.next_migrations(replicas, busy, {1: waiting} if waiting else {}, time.perf_counter())
            if planner
            else []
        )
        for order, move in orders:
            order_migration(
                pool.client,
                pool.addresses[move.source],
                MigrationOrder(order, "bench", move.source, 0, pool.addresses[move.target], move.rows),
            )
    return Tail(free, max(end.result() for end in ends) - began, moved)


def best_assignment(lengths: Sequence[int], num_replicas: int, cost: PassCost) -> list[list[int]]:
    """Return the rows' lengths by replica under the assignment that ends first."""

    def end_s(part: Sequence[int]) -> float:
        return cost.floor_s * max(part, default=0) + cost.row_s * sum(part)

    best: list[list[int]] = [list(lengths), *([] for _ in range(num_replicas - 1))]
    for others in itertools.product(range(num_replicas), repeat=len(lengths) - 1):
        parts: list[list[int]] = [[] for _ in range(num_replicas)]
        for length, replica in zip(lengths, (0, *others), strict=True):
            parts[replica].append(length)
        best = min(best, parts, key=lambda parts: max(map(end_s, parts)))
    return best


@contextmanager
def replicas(num: int, path: str, max_seq: int, device: PassCost | None = None) -> Iterator[Pool]:
    with (
        LocalCluster(n_workers=num, threads_per_worker=4, dashboard_address=None, memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        pool = Pool(client, sorted(client.scheduler_info(n_workers=-1)["workers"]))
        client.subscribe_topic(REPORTS, lambda event: pool.news.put(codec.decode(Report, event[1])))
        for index in range(num):
            pool.call(index, build, index, path, max_seq, device)
        yield pool


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
        replicas(2, path, max(*lengths, 240) + CAPACITY if not options.quick else 256) as pool,
        measured_load() as load,
    ):
        tail = [[max(1, new // 2) for new in part] for part in TAIL] if options.quick else TAIL
        for length in lengths:
            seconds: dict[bool, list[Moved]] = {True: [], False: []}
            for _ in range(repeats + 1):  # the first opens connections and touches memory
                for with_cache in (True, False):
                    number += 1
                    seconds[with_cache].append(move_one(pool, number, length, with_cache))
                    print(f"{length} {with_cache}: {seconds[with_cache][-1]}", file=sys.stderr, flush=True)
            carried, fed = (
                statistics.median(m.standstill for m in seconds[with_cache][1:]) for with_cache in (True, False)
            )
            moved = seconds[True][1:]
            held = statistics.median(m.held for m in moved)
            one_pass = statistics.median(m.one_pass for m in moved)
            mib = moved[0].num_bytes / 2**20
            cells = (mib, carried * 1e3, carried / one_pass, held * 1e3, fed * 1e3, one_pass * 1e3)
            rows.append((str(length), *(f"{cell:.1f}" for cell in cells)))
            figures |= {
                f"{length}/carried_s": carried,
                f"{length}/held_s": held,
                f"{length}/fed_again_s": fed,
                f"{length}/pass_s": one_pass,
                f"{length}/mib": mib,
            }
        arms: dict[str, list[Tail]] = {"stay": [], "move": []}
        for _ in range(repeats):
            for arm in arms:
                number += 1000
                planner = MigrationPlanner(node_s=sum(map(max, tail)) * 1.0) if arm == "move" else None
                arms[arm].append(run_tail(pool, number, tail, planner, waiting=1))
                print(f"{arm}: {arms[arm][-1]}", file=sys.stderr, flush=True)
        for arm, results in arms.items():
            free, total = (
                statistics.median(each) for each in zip(*((t.free_s, t.total_s) for t in results), strict=True)
            )
            tails.append((arm, f"{free:.2f}", f"{total:.2f}", "/".join(str(result.num_moved) for result in results)))
            figures |= {f"tail/{arm}/free_s": free, f"tail/{arm}/total_s": total}
    best = best_assignment([new for part in THREE for new in part], len(THREE), DEVICE)
    three: dict[str, list[Tail]] = {"stay": [], "move": [], "best assignment": []}
    with replicas(len(THREE), RANDOM_TINY, NUM_PROMPT + LIMIT, DEVICE) as pool:
        run_tail(pool, number := number + 1000, THREE, None)  # each measures its passes
        for _ in range(repeats):
            for arm in three:
                number += 1000
                parts = best if arm == "best assignment" else THREE
                three[arm].append(
                    run_tail(pool, number, parts, MigrationPlanner() if arm == "move" else None, limit=LIMIT)
                )
                print(f"three, {arm}: {three[arm][-1]}", file=sys.stderr, flush=True)
    three_rows = []
    best_s = statistics.median(t.total_s for t in three["best assignment"])
    for arm, results in three.items():
        total = statistics.median(t.total_s for t in results)
        three_rows.append((arm, f"{total:.2f}", f"{total / best_s:.3f}", "/".join(str(t.num_moved) for t in results)))
        figures[f"three/{arm}/total_s"] = total
    others = f"{repeats} repeats, medians; others' load {load().others:.0%}"
    columns = ("tokens", "MiB", "carried, ms", "in passes", "passes waited, ms", "fed again, ms", "a pass, ms")
    report("moving a row: how long it stands still", columns, rows, [others])
    report(
        f"three replicas, {DEVICE.floor_s * 1e3:.0f} + {DEVICE.row_s * 1e3:.0f} ms a row and pass; nothing waits",
        ("rows", "all done, s", "/ best assignment", "rows moved"),
        three_rows,
        [others],
    )
    report(
        f"a tail of {sum(map(len, tail))} rows on two replicas; other work waits",
        ("rows", "one replica free, s", "all done, s", "rows moved"),
        tails,
        [others],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

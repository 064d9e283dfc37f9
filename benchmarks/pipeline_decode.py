"""Decoding with a model that spans two processes, one thread each: pipeline stages, tensor parallelism, and one process
with the threads of both.

Rows of equal length, so that all are in flight from the first token to the last: 16, and 64. Utilisation is the share
of the time in which a rank computed, as it counts it itself; waiting for the other rank is not computing. Two
groups of rows read the weights twice as often as one batch, and here both ranks share one memory: so on a CPU the gain
depends on the rows. On two cores nothing else may run beside it. Sides are taken in turn in every repeat; a figure is
the median of its repeats.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from benchmarks.generation import MODEL
from benchmarks.harness import arguments, measured_load, report, write_json
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY, read_spec

NUM_ROWS, PROMPT = (16, 64), 16
ONE_PROCESS = "one process, 2 threads"


@dataclass(frozen=True)
class Side:
    """A layout of the engine."""

    name: str
    threads: int
    tensor: int = 1
    pipeline: int = 1


SIDES = (
    Side(ONE_PROCESS, 2),
    Side("one process, 1 thread", 1),
    Side("2 stages", 1, pipeline=2),
    Side("2 tensor-parallel", 1, tensor=2),
)


def run(engine: EmbeddedEngine, vocab: int, num_rows: int, new: int) -> None:
    rng = random.Random(0)
    sampling = SamplingConfig(max_new_tokens=new, min_new_tokens=new)
    prompts = [tuple(rng.randrange(3, vocab) for _ in range(PROMPT)) for _ in range(num_rows)]
    for _ in engine.generate([Request(i, 1, 1, prompt, 0, sampling) for i, prompt in enumerate(prompts)]):
        pass


def main() -> None:
    options = arguments(__doc__ or "")
    path, new = (RANDOM_TINY, 8) if options.quick else (str(MODEL), 32)
    repeats = 1 if options.quick else options.repeats
    vocab = read_spec(path).vocab_size
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # of the ranks' processes; this one's maths has begun by now
    seconds: dict[tuple[str, int], list[float]] = {(side.name, rows): [] for rows in NUM_ROWS for side in SIDES}
    busy: dict[tuple[str, int], list[tuple[float, ...]]] = {key: [] for key in seconds}
    others: list[float] = []
    with ExitStack() as stack:
        engines: dict[str, EmbeddedEngine] = {}
        for side in SIDES:
            settings = EngineConfig(
                max_rows=max(NUM_ROWS),
                tensor_parallel=side.tensor,
                pipeline_parallel=side.pipeline,
            )
            engine = build_embedded(
                path, settings, max_seq=PROMPT + new, threads=side.threads, device=torch.device("cpu")
            )
            assert isinstance(engine, EmbeddedEngine)
            engines[side.name] = stack.enter_context(closing(engine))
            # before the next engine is built: what a thread's first product finds set, it keeps as number of threads
            run(engine, vocab, NUM_ROWS[0], 2)
        for _ in range(repeats):
            for name, num_rows in seconds:
                engine = engines[name]
                engine.stats()
                with measured_load() as load:
                    started = time.perf_counter()
                    run(engine, vocab, num_rows, new)
                    took = time.perf_counter() - started
                others.append(load().others)
                seconds[name, num_rows].append(took)
                busy[name, num_rows].append(tuple(s / took for s in engine.stats().rank_busy_s))
                print(f"{num_rows} rows, {name}: {num_rows * new / took:.0f} tok/s", file=sys.stderr, flush=True)
    table, figures = [], {}
    rates = {(name, num_rows): num_rows * new / statistics.median(s) for (name, num_rows), s in seconds.items()}
    for (name, num_rows), rate in rates.items():
        shares = [statistics.median(ranks) for ranks in zip(*busy[name, num_rows], strict=True)]
        figures[f"{num_rows} rows/{name}/tokens_per_s"] = rate
        figures |= {f"{num_rows} rows/{name}/utilisation/rank{rank}": share for rank, share in enumerate(shares)}
        against = f"{rate / rates[ONE_PROCESS, num_rows]:.2f}"
        table.append((f"{num_rows}", name, f"{rate:.0f}", against, ", ".join(f"{s:.0%}" for s in shares)))
    report(
        "decoding with a model on two ranks",
        ("rows", "layout", "tok/s", "x one process", "utilisation of each rank"),
        table,
        [f"{repeats} repeats, medians; {new} tokens a row; others' load at most {max(others):.0%}"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

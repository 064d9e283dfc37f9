"""A judge that takes its time: does the graph hide it? Whole runs of the random tiny model through the real path,
scored over HTTP by a server on loopback that waits as a remote one does; gangs of their own for generation, scoring,
advantages and training. Few rows are decoded together and nothing but the policy is trained, so that generation or
judging is what a step waits for, also on two cores.

    step time / the longer of generation and scoring     1: the other is hidden altogether

Both are what their gang was busy for per step (the union of its nodes' times, by the ledger). Each latency is run with
staleness 1 and 0. Rows are scored as soon as they are finished, and for comparison only when their shard is complete;
the judge then has the requests of one shard at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

import pipeline.driver.run as driver
from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.config.loading import load_config
from pipeline.driver.results import open_history
from storage.address import Address
from storage.ledger import Ledger

WARM_UP_STEPS = 2
ROWS, SHARDS = 32, 4
LATENCIES_S = (0.1, 0.25, 0.6)
"""Mean seconds of an answer: judging is shorter than generation, about as long, and longer."""
SPREAD = 0.3
"""An answer takes from 1 - SPREAD to 1 + SPREAD of that, by what is asked."""
TRAINING = ("reference", "logprob", "update_policy")
CONFIG = f"""
steps: 8
model: {{path: "random:tiny", policy: {{lr: 1.0e-3}}, critic: {{lr: 1.0e-3}}}}
prompts: {{url: conf/data/tiny_prompts.jsonl, max_tokens: 16, too_long: skip, held_out: 8}}
rollout: {{rows: {ROWS}, shards: {SHARDS}}}
sampling: {{max_new_tokens: 96, min_new_tokens: 96}}
engine: {{max_rows: 4, kv_budget_mb: 64}}
ppo: {{advantage: reinforce_pp, epochs: 1, minibatches: 1}}
placement:
  gangs: {{generate: {{concurrent_shards: 1}}, score: {{}}, collect: {{}}, train: {{}}}}
  roles: {{generate: generate, score: score, advantage: collect, reference: train, policy: train, critic: train}}
tracking: {{uri: null, report: false}}
cluster: {{dashboard: null}}
"""


@dataclass(frozen=True)
class Measured:
    """Seconds per step."""

    step_s: float
    generating_s: float
    judging_s: float
    training_s: float
    others: float
    """Share of the machine that others used."""

    @property
    def ratio(self) -> float:
        return self.step_s / max(self.generating_s, self.judging_s)


@contextmanager
def slow_judge(latency_s: float) -> Iterator[str]:
    """Yield the URL of a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(latency_s, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _serve(latency_s: float, port: Connection) -> None:
    web = importlib.import_module("aiohttp.web")

    async def answer(request: Any) -> Any:
        asked = (await request.json())["messages"][-1]["content"]
        draw = int.from_bytes(hashlib.sha256(asked.encode(errors="replace")).digest()[:4]) / 2**32
        await asyncio.sleep(latency_s * (1 - SPREAD + 2 * SPREAD * draw))
        grade = 1 + sum(c in "aeiou" for c in asked) % 5
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": str(grade)}}]})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def busy_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextmanager
def rows_wait_for_their_shard() -> Iterator[None]:
    """Let no row be scored before its shard is complete."""
    whole = driver._executor_settings
    driver._executor_settings = lambda config: replace(whole(config), scores_early=False)
    try:
        yield
    finally:
        driver._executor_settings = whole


def measure(folder: Path, name: str, url: str, staleness: int, steps: int, *, early: bool) -> Measured:
    """Run to the end, and return the figures of the steps after the warm-up. `early`: False to score rows only when
    their shard is complete."""
    file = folder / "judged.yaml"
    file.write_text(CONFIG)
    judge = {"url": url, "model": "m", "read": "text", "rubric": "{prompt} {response}", "on_unparsed": 0}
    judge |= {"concurrency": ROWS}
    changes = [f"runs_dir={folder}", f"name={name}", f"staleness={staleness}", f"steps={steps}"]
    config = load_config([file], [*changes, f"reward={json.dumps({'kind': 'judge', 'args': judge})}"])
    with measured_load() as load, nullcontext() if early else rows_wait_for_their_shard():
        driver.run(config, Console(file=StringIO()))
    ledger = open_history(config).ledger
    first, last = (ledger.find(Address("publish", v)) for v in (WARM_UP_STEPS, steps))
    assert first is not None
    assert last is not None
    num = steps - WARM_UP_STEPS
    measured = range(WARM_UP_STEPS, steps)
    generating, judging, training = (
        busy_s(_spans(ledger, stages, measured)) / num for stages in (("generate",), ("score",), TRAINING)
    )
    return Measured((last.finished - first.finished) / num, generating, judging, training, load().others)


def _spans(ledger: Ledger, stages: Iterable[str], steps: Iterable[int]) -> Iterator[tuple[float, float]]:
    for address in (Address(stage, step, shard) for step in steps for stage in stages for shard in range(SHARDS)):
        commit = ledger.find(address)
        if commit is not None:
            yield commit.provenance.started, commit.finished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8, help="steps of a run; the first two do not count")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    latencies, steps, repeats = (LATENCIES_S, options.steps, options.repeats) if not options.quick else ((0.3,), 5, 1)
    found: dict[tuple[float, int, str], list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="stageline-judge-") as scratch:
        for repeat in range(repeats):
            for latency_s in latencies:
                with slow_judge(latency_s) as url:
                    for staleness, when in itertools.product((1, 0), ("row", "shard")):
                        name = f"judge-{latency_s:g}-{staleness}-{when}-{repeat}".replace(".", "_")
                        measured = measure(Path(scratch), name, url, staleness, steps, early=when == "row")
                        found.setdefault((latency_s, staleness, when), []).append(measured)
                        print(f"{name}: {measured}", file=sys.stderr, flush=True)
    figures: dict[str, float] = {}
    rows = []
    for (latency_s, staleness, when), of_arm in found.items():
        names = ("step_s", "generating_s", "judging_s", "training_s", "ratio")
        medians = {name: statistics.median(getattr(m, name) for m in of_arm) for name in names}
        others = max(m.others for m in of_arm)
        numbers = (f"{value:.2f}" for value in medians.values())
        rows.append((f"{latency_s:g} s", str(staleness), when, *numbers, f"{others:.0%}"))
        arm = f"latency_{latency_s:g}s/staleness_{staleness}/after_{when}"
        figures |= {f"{arm}/{name}": value for name, value in medians.items()}
    report(
        "judge: seconds per PPO step",
        ("answer", "stale", "after each", "s/step", "generate", "score", "train", "s/step / longer", "others"),
        rows,
        [f"{repeats} repeats, medians; {ROWS} rows in {SHARDS} shards"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

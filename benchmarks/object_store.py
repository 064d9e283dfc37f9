"""Bookkeeping of the demo when its data is in an object store whose every answer takes some milliseconds.

Whole runs of the demo through the real path. Commits, arrays, checkpoints and exports are in the run's directory, or in
S3 (`storage.url`): moto's server in a process of its own, which waits before it answers a request. It computes on the
same cores as the run. Arms are taken in turn in each repeat.

    bookkeeping   share of the run's time in which the busiest gang waits for store, ledger, publication, driver and
                  Dask (`pipeline/observe/summary.py`); the aim is 8 % with 10 ms
    requests      requests of all processes of the run to the store, per step
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from benchmarks.harness import arguments, environment, measured_load, report, write_json
from pipeline.config.loading import load_config
from pipeline.driver.results import open_history, summarise_run
from pipeline.driver.run import run

BUCKET = "runs"
DIRECTORY = "directory"
ARMS: dict[str, float | None] = {DIRECTORY: None, "S3, 0 ms": 0.0, "S3, 10 ms": 0.01}
"""Seconds that the server waits before it answers; None: no server."""
FIXED = ("evaluate.every=0", "tracking={uri: null, report: false}", "cluster.dashboard=null")


@dataclass(frozen=True)
class Measured:
    """Figures of one run."""

    bookkeeping: float
    step_s: float
    requests: float
    others: float
    """Share of the machine that other programs used."""


@contextmanager
def serving(latency_s: float, requests: Any) -> Iterator[dict[str, str]]:
    """Serve S3 in a process of its own, which adds up `requests`. Yield the environment of its clients."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(latency_s, requests, theirs), daemon=True)
    process.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ours.recv()}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.join()


def _serve(latency_s: float, requests: Any, port: Connection) -> None:
    moto: Any = importlib.import_module("moto.moto_server.werkzeug_app")
    werkzeug: Any = importlib.import_module("werkzeug.serving")
    application = moto.DomainDispatcherApplication(moto.create_backend_app)

    def delayed(environ: dict[str, Any], start_response: Any) -> Any:
        with requests.get_lock():
            requests.value += 1
        time.sleep(latency_s)
        return application(environ, start_response)

    # connections stay open, as Amazon's do
    handler = type("Handler", (werkzeug.WSGIRequestHandler,), {"protocol_version": "HTTP/1.1"})
    server = werkzeug.make_server("127.0.0.1", 0, delayed, threaded=True, request_handler=handler)
    importlib.import_module("logging").getLogger("werkzeug").disabled = True
    port.send(server.port)
    server.serve_forever()


def measure(latency_s: float | None, files: list[str], changes: list[str]) -> Measured:
    """Run a config with its data in the run's directory or in the object store."""
    requests = multiprocessing.get_context("spawn").Value("L", 0)
    if latency_s is None:
        return _measure(files, changes, requests)
    with serving(latency_s, requests) as settings, environment(settings):
        client: Any = importlib.import_module("s3fs").S3FileSystem
        client.clear_instance_cache()  # a cached one talks to the server of an earlier arm
        client().mkdir(BUCKET)
        return _measure(files, [*changes, f"storage.url=s3://{BUCKET}/run"], requests)


def _measure(files: list[str], changes: list[str], requests: Any) -> Measured:
    config = load_config(files, changes)
    before = requests.value
    ends: list[float] = []
    with measured_load() as load:
        run(config, Console(file=StringIO()), callbacks=[lambda step, metrics: ends.append(time.perf_counter())])
    summary = summarise_run(config, open_history(config))
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return Measured(summary.overhead_fraction, step_s, (requests.value - before) / config.steps, load().others)


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=8)

    options = arguments(__doc__ or "", add_options)
    files = ["conf/run/tiny.yaml"] if options.quick else ["conf/run/demo.yaml"]
    repeats, steps = (1, 3) if options.quick else (options.repeats, options.steps)
    measured: dict[str, list[Measured]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory(prefix="stageline-store-") as scratch:
        for repeat in range(repeats):
            for number, (name, latency_s) in enumerate(ARMS.items()):
                own = [f"name=arm-{number}-repeat-{repeat}", f"runs_dir={scratch}", f"steps={steps}"]
                measured[name].append(measure(latency_s, files, [*FIXED, *own]))
                print(f"{name}: {measured[name][-1].bookkeeping:.1%}", file=sys.stderr, flush=True)
    rows, figures = [], dict[str, float]()
    for name, runs in measured.items():
        shares = [one.bookkeeping for one in runs]
        step_s, requests = (statistics.median(getattr(one, field) for one in runs) for field in ("step_s", "requests"))
        figures |= {f"{name}/bookkeeping": statistics.median(shares), f"{name}/step_s": step_s}
        figures |= {f"{name}/requests_per_step": requests}
        rows.append(
            (
                name,
                f"{statistics.median(shares):.1%}",
                f"{min(shares):.1%} to {max(shares):.1%}",
                f"{step_s:.2f}",
                f"{requests:.0f}",
                f"{max(one.others for one in runs):.0%}",
            )
        )
    report(
        "bookkeeping with an object store",
        ("data in", "bookkeeping", "range", "s/step", "requests a step", "others' load"),
        rows,
        [f"{repeats} repeats of {steps} steps, medians; others' load does not count the store's server"],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

"""The cost of being watched: the dashboard with its markers, an open page `/stageline`, MLflow, the report.

The same run three times in every repeat: without a dashboard, with one that nobody opens, and with `/stageline` open
(fetched as its script does it). Beside each: seconds a step, CPU seconds a step of the driver's process (Dask's
scheduler is in it), and when MLflow's database had a step's metrics after the step's weights were published.
Then `stageline report` of the last run, or of `--run`: seconds of wall clock and of CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.observe.graph_page import PATH, REFRESH_S
from pipeline.observe.journal import Event, EventKind, read_events

ROOT = Path(__file__).resolve().parents[1]
NONE, UNSEEN, OPEN = "no dashboard", "dashboard, not opened", "page open"
ARMS = (NONE, UNSEEN, OPEN)
LOOK_S = 0.1
LOGGED = "time/step_s"
"""The metric of a step that is known last."""


@dataclass(frozen=True)
class Ran:
    step_s: float
    """Seconds a step, over all but the first."""
    driver_s: float
    """CPU seconds a step of the driver's process, over the same steps."""
    mlflow_s: Sequence[float]
    """For each step but the last: seconds from the publication of its weights to its metrics in MLflow's database."""
    looks: Sequence[float]
    """Seconds that each answer of the page took."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def visitor(port: int | None) -> Iterator[list[float]]:
    """Fetch the page in a thread while the block runs, as soon as it is there. Yield the seconds of each answer."""
    took: list[float] = []
    gone = threading.Event()

    def look() -> None:
        while not gone.wait(REFRESH_S):
            started = time.perf_counter()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/{PATH}/view", timeout=60) as answer:
                    answer.read()
            except (urllib.error.URLError, ConnectionError):
                continue  # not there yet, or no more
            took.append(time.perf_counter() - started)

    thread = threading.Thread(target=look, daemon=True)
    if port is not None:
        thread.start()
    try:
        yield took
    finally:
        gone.set()
        if port is not None:
            thread.join()


def logged_steps(database: Path) -> set[int]:
    """Return the steps whose metrics MLflow has; none before it has its tables."""
    if not database.exists():
        return set()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)) as there:
        try:
            return {int(step) for (step,) in there.execute("select step from metrics where key = ?", (LOGGED,))}
        except sqlite3.OperationalError:
            return set()


def run(config: str, steps: int, arm: str, folder: Path) -> Ran:
    port = free_port()
    dashboard = "null" if arm == NONE else f"127.0.0.1:{port}"
    settings = [
        f"steps={steps}", "name=seen", f"runs_dir={folder}", f"tracking.uri=sqlite:///{folder}/mlflow.db",
        f"cluster.dashboard={dashboard}", "evaluate.every=0", "checkpoint.every=1000",
    ]  # fmt: skip
    command = [sys.executable, "-m", "pipeline.cli", "run", str(ROOT / f"conf/run/{config}.yaml"), *settings]
    spent, logged = list[tuple[float, float]](), dict[int, float]()
    with visitor(port if arm == OPEN else None) as looks:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                times = driver.cpu_times()
                spent.append((time.time(), times.user + times.system))
            except psutil.NoSuchProcess:
                break
            for step in logged_steps(folder / "mlflow.db"):
                logged.setdefault(step, time.time())
            time.sleep(LOOK_S)
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    events = list(read_events(folder / "seen/events.jsonl"))
    ends = [e.t for e in events if e.kind is EventKind.FINISHED and e.stage == "update_critic" and not e.rank]
    within = [cpu for at, cpu in spent if ends[0] <= at <= ends[-1]]
    counted = len(ends) - 1
    return Ran((ends[-1] - ends[0]) / counted, (within[-1] - within[0]) / counted, delays(events, logged), looks)


def delays(events: Sequence[Event], logged: Mapping[int, float]) -> list[float]:
    published = {e.step - 1: e.t for e in events if e.kind is EventKind.PUBLISHED and e.step}
    return [logged[step] - at for step, at in published.items() if step in logged]


def report_seconds(run_dir: Path, out: Path) -> tuple[float, float]:
    """Return the seconds of wall clock and of CPU of `stageline report`, including the interpreter's start."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "pipeline.cli", "report", str(run_dir), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run", type=Path, help="a finished run, whose report is timed instead")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    repeats, config = (1, "tiny") if options.quick else (options.repeats, "demo")
    found: dict[str, list[Ran]] = {arm: [] for arm in ARMS}
    reports: list[tuple[float, float]] = []
    with measured_load() as load, tempfile.TemporaryDirectory(prefix="stageline-pages-") as place:
        for repeat in range(repeats):
            for arm in ARMS:
                folder = Path(place) / f"{ARMS.index(arm)}-{repeat}"
                found[arm].append(run(config, options.steps, arm, folder))
                print(f"{arm}, repeat {repeat + 1}: {found[arm][-1].step_s:.3f} s a step", file=sys.stderr, flush=True)
        made, out = options.run or folder / "seen", Path(place) / "report.html"
        reports += [report_seconds(made, out) for _ in range(repeats)]
        size = out.stat().st_size
    figures: dict[str, float] = {"others_load": load().others, "report/bytes": size}
    figures["report/wall_s"], figures["report/cpu_s"] = (statistics.median(one) for one in zip(*reports, strict=True))
    rows = []
    for arm in ARMS:
        step, driver = (statistics.median(getattr(ran, name) for ran in found[arm]) for name in ("step_s", "driver_s"))
        late = [delay for ran in found[arm] for delay in ran.mlflow_s]
        looks = [took for ran in found[arm] for took in ran.looks]
        figures |= {f"{arm}/step_s": step, f"{arm}/driver_s": driver, f"{arm}/mlflow_latest_s": max(late)}
        if looks:
            figures[f"{arm}/look_s"] = statistics.median(looks)
        share = (driver - figures[f"{NONE}/driver_s"]) / (step * (os.cpu_count() or 1))
        looked = f"{1000 * statistics.median(looks):.0f} ms ({len(looks)})" if looks else ""
        rows.append((arm, f"{step:.3f}", f"{1000 * driver:.0f}", f"{share:.2%}", looked, f"{max(late):.1f}"))
    columns = ("arm", "s/step", "driver ms CPU/step", "more, of all cores' time", "a look (looks)", "MLflow latest s")
    notes = [
        f"report: {figures['report/wall_s']:.1f} s, {figures['report/cpu_s']:.1f} s of CPU, {size / 2**20:.2f} MiB",
        f"{repeats} runs of each; others' load {figures['others_load']:.0%}",
    ]
    report(f"{config}, {options.steps} steps, {os.cpu_count()} cores", columns, rows, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

"""The same run with engine and trainer side by side, and on shared devices (`placement.device_sharing`).

The demo's model with longer responses, without evaluations; whole runs by the command line, arms in turn in every
repeat. Resident memory of each worker is looked at ten times a second, and told apart by what its gang did just then
(`events.jsonl`): while it worked, and while the other gang did. On a CPU an engine's cache and a trainer's gradient
buffers are given up, and the weights stay; on GPUs these leave too (`stages/models/offload.py`). Both arms must end in
the same weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.observe.journal import Event, EventKind, read_events
from pipeline.observe.timeline import read_boxes
from storage.ledger import Ledger

ROOT = Path(__file__).resolve().parents[1]
GANGS = ("generate", "train")
WHEN = ("working", "waiting")
ARMS = {"side by side": "placement.device_sharing=[]", "shared devices": "placement.device_sharing=[[generate,train]]"}
LOOK_S = 0.1


@dataclass(frozen=True)
class Ran:
    step_s: float
    """Seconds a step, over all but the first."""
    passing_s: float
    """Mean seconds to pass the devices on; 0 side by side."""
    working: Mapping[str, float]
    """Median bytes of a gang's worker while it worked."""
    waiting: Mapping[str, float]
    """While the other gang worked, and it did not."""
    digests: tuple[str | None, ...]


def run(config: str, steps: int, arm: str, folder: Path) -> Ran:
    name = arm.replace(" ", "-")
    settings = [
        f"steps={steps}", f"name={name}", f"runs_dir={folder}", "tracking.uri=null", "tracking.report=false",
        "cluster.dashboard=null", "evaluate.every=0", "checkpoint.every=1000", ARMS[arm],
    ]  # fmt: skip
    if config == "demo":
        settings += ["sampling.max_new_tokens=64", "sampling.min_new_tokens=64", "engine.dtype=float32"]
    command = [sys.executable, "-m", "pipeline.cli", "run", str(ROOT / f"conf/run/{config}.yaml"), *settings]
    looks: list[tuple[float, dict[int, int]]] = []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else []
        looks.append((time.time(), dict(filter(None, map(_resident, below)))))
        time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    directory = folder / name
    events = list(read_events(directory / "events.jsonl"))
    commits = Ledger(str(directory / "ledger")).list()
    digests = tuple(c.digest for c in sorted(commits, key=lambda c: c.address) if c.address.stage.startswith("update"))
    passes = [e.detail or "" for e in events if e.kind is EventKind.DEVICES_HANDED_OVER]
    return Ran(
        step_s=_step_s(events),
        passing_s=statistics.mean([float(text.split()[-2]) for text in passes] or [0.0]),
        digests=digests,
        **_resident_by_work(events, looks, {gang: _process_id(directory, gang) for gang in GANGS}),
    )


def _resident(process: psutil.Process) -> tuple[int, int] | None:
    try:
        return process.pid, process.memory_info().rss
    except psutil.NoSuchProcess:
        return None


def _process_id(directory: Path, gang: str) -> int:
    lines = (directory / f"logs/{gang}-0.log").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("----")).rpartition(" ")[2])


def _step_s(events: Sequence[Event]) -> float:
    ends = [e.t for e in events if e.kind is EventKind.FINISHED and e.stage == "update_critic" and not e.rank]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _resident_by_work(
    events: Sequence[Event], looks: Sequence[tuple[float, dict[int, int]]], pids: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    work = {gang: [(b.start_s, b.end_s) for b in read_boxes(events) if b.gang == gang] for gang in GANGS}
    first = min(start for spans in work.values() for start, _ in spans[len(spans) // 4 :])  # when all has been touched
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, resident in looks:
        busy = {gang: any(start + LOOK_S < at < end for start, end in spans) for gang, spans in work.items()}
        for gang, other in (GANGS, GANGS[::-1]):
            if at > first and pids[gang] in resident and (busy[gang] or busy[other]):
                found["working" if busy[gang] else "waiting", gang].append(resident[pids[gang]])
    medians = {key: statistics.median(sizes) for key, sizes in found.items()}
    return {when: {g: medians.get((when, g), float("nan")) for g in GANGS} for when in WHEN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=6)


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    repeats, config = (1, "tiny") if options.quick else (options.repeats, "demo")
    found: dict[str, list[Ran]] = {arm: [] for arm in ARMS}
    with measured_load() as load:
        for repeat in range(repeats):
            for arm in ARMS:
                with tempfile.TemporaryDirectory(prefix="stageline-sharing-") as folder:
                    found[arm].append(run(config, options.steps, arm, Path(folder)))
                print(f"{arm}, repeat {repeat + 1}: {found[arm][-1].step_s:.2f} s a step", file=sys.stderr, flush=True)
    assert len({ran.digests for of_arm in found.values() for ran in of_arm}) == 1, "the arms ended in other weights"
    rows, figures = [], {"others_load": load().others}
    for arm, ran in found.items():
        step_s, passing_s = (statistics.median(getattr(one, name) for one in ran) for name in ("step_s", "passing_s"))
        figures |= {f"{arm}/step_s": step_s, f"{arm}/passing_s": passing_s}
        cells = []
        for gang in GANGS:
            for when in WHEN:
                size = statistics.median(getattr(one, when)[gang] for one in ran) / 2**20
                figures[f"{arm}/{gang}/{when}_mib"] = size
                cells.append(f"{size:.0f}")
        rows.append((arm, f"{step_s:.2f}", f"{passing_s:.3f}", *cells))
    columns = ("arm", "s/step", "s to pass", *(f"{gang} {when}" for gang in GANGS for when in WHEN))
    notes = [f"resident memory in MiB; others' load {figures['others_load']:.0%}; the arms' digests are equal"]
    report(f"{config}, {options.steps} steps, {os.cpu_count()} cores", columns, rows, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

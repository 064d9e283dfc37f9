"""Memory that trainers of whole runs take, beside what `stageline check` predicts, by layout, dtype and adapters.

The lowest blocks of SmolLM2-135M as policy, critic and reference; 32 rows of exactly 6 + 58 tokens, two micro-batches,
two steps with a checkpoint each, so that every item of the prediction is there. Whole runs by the command line. A
process's peak is its largest resident set as Linux counts it (VmHWM), looked at until the process ends; the files of
the model, which it maps while it reads them, are among it. The base is the peak of a run of `random:tiny` on as many
ranks in the same dtype, less its own prediction. Each rank is compared; the table shows the one that differs most.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.config.loading import load_config
from pipeline.config.memory import PROCESS, Phase, WorkerMemory, planned_run, workers_memory
from pipeline.config.role_models import role_models
from stages.models.hf_weights import write_lowest_blocks
from stages.models.spec import RANDOM_TINY, read_spec

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets/smollm2-135m-instruct"
BLOCKS = 4
LOOK_S = 0.1
_STARTED = re.compile(r"---- (train-\d+), incarnation \d+, process (\d+)")
SETTINGS = (
    "steps=2", "staleness=0", "tracking.uri=null", "tracking.report=false",
    "cluster.dashboard=null", "evaluate.every=0", "checkpoint.every=1", "rollout={rows: 32, shards: 2}",
    "ppo={epochs: 1, minibatches: 1}", "engine.kv_budget_mb=256", "model.policy.micro_batch_rows=16",
    "model.critic.micro_batch_rows=16",
)  # fmt: skip
ROWS = (
    "model.frozen_blocks=0", "model.critic_blocks=null", "sampling.max_new_tokens=58", "sampling.min_new_tokens=58",
)  # fmt: skip
"""Settings of the demo's config for rows of one length."""


@dataclass(frozen=True)
class Case:
    ranks: int = 1
    layout: str = "{}"
    dtype: str = "float32"
    others: tuple[str, ...] = ()

    @property
    def settings(self) -> list[str]:
        gang = [f"placement.gangs.train.workers={self.ranks}", f"placement.gangs.train.layout={self.layout}"]
        return [*gang, f"model.dtype={self.dtype}", *self.others]


CASES = {
    "one rank": Case(),
    "one rank, bfloat16": Case(dtype="bfloat16"),
    "one rank, LoRA of rank 16": Case(others=("model.lora.rank=16",)),
    "one rank, recompute full": Case(layout="{recompute: full}"),
    "tensor 2": Case(2, "{tensor: 2, sequence_parallel: true}"),
    "pipeline 2": Case(2, "{pipeline: 2}"),
    "data 2": Case(2),
    "data 2, ZeRO-1": Case(2, "{distributed_optimizer: true}"),
    "data 2, ZeRO-1, bfloat16": Case(2, "{distributed_optimizer: true}", "bfloat16"),
}


def run(name: str, config: str, settings: Sequence[str], folder: Path) -> dict[str, int]:
    """Run a config and return the peak bytes of each rank of the trainer."""
    command = [
        sys.executable, "-m", "pipeline.cli", "run", str(ROOT / f"conf/run/{config}.yaml"), f"name={name}",
        f"runs_dir={folder}", *SETTINGS, *settings,
    ]  # fmt: skip
    peaks: dict[int, int] = {}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else []
        for child in below:
            peaks[child.pid] = max(peaks.get(child.pid, 0), _peak(child.pid))
        time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    logs = (path.read_text("utf8", "replace") for path in (folder / name).rglob("*.log"))
    return {rank: peaks[int(pid)] for log in logs for rank, pid in _STARTED.findall(log)}


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def predict(config: str, settings: Sequence[str]) -> tuple[dict[str, WorkerMemory], int]:
    """Return (the prediction of each rank of the trainer, the bytes of the model's files)."""
    loaded = load_config([ROOT / f"conf/run/{config}.yaml"], [*SETTINGS, *settings])
    planned = planned_run(loaded, role_models(loaded, read_spec(loaded.model.path)), on_gpus=False)
    ranks = (worker for worker in workers_memory(planned) if worker.worker[0] == "train")
    return {f"train-{w.worker[1]}": w for w in ranks}, planned.model.stored_bytes if planned.model.is_mapped else 0


def resident(worker: WorkerMemory, mapped: int) -> int:
    """Return the predicted resident set without the process itself: mapped files are among it while they are read."""
    reading = worker.at(Phase.START) + mapped
    return max(reading, worker.at(Phase.STEP), worker.at(Phase.PUBLISH)) - worker.items[PROCESS]


def base_of(case: Case, folder: Path, known: dict[tuple[int, str], int]) -> int:
    """Return the peak of a rank's process without a model of any size."""
    key = case.ranks, case.dtype
    if key not in known:
        settings = [f"placement.gangs.train.workers={case.ranks}", f"model.dtype={case.dtype}"]
        peaks = run(f"base-{case.ranks}-{case.dtype}", "tiny", settings, folder)
        ranks, mapped = predict("tiny", settings)
        known[key] = max(peak - resident(ranks[rank], mapped) for rank, peak in peaks.items())
    return known[key]


def measure(name: str, case: Case, config: str, path: str, folder: Path, base: int) -> Mapping[str, float]:
    """Return peak, predicted and their ratio for the rank that differs most, without the base."""
    settings = [*case.settings, f"model.path={path}", *(ROWS if config == "demo" else ())]
    peaks = run(re.sub(r"\W+", "-", name), config, settings, folder)
    ranks, mapped = predict(config, settings)
    found = {rank: (peak - base, resident(ranks[rank], mapped)) for rank, peak in peaks.items()}
    worst = max(found, key=lambda rank: abs(found[rank][1] / max(1, found[rank][0]) - 1))
    measured, predicted = found[worst]
    return {"measured_bytes": measured, "predicted_bytes": predicted, "ratio": predicted / max(1, measured)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], help="these runs")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    cases = {"one rank": Case()} if options.quick else {name: CASES[name] for name in options.only}
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="stageline-predicted-") as temporary, measured_load() as load:
        folder, known = Path(temporary), dict[tuple[int, str], int]()
        config, path = ("tiny", RANDOM_TINY) if options.quick else ("demo", str(folder / "model"))
        if not options.quick:
            write_lowest_blocks(folder / "model", str(MODEL), BLOCKS)
        for name, case in cases.items():
            base = base_of(case, folder, known)
            found = measure(name, case, config, path, folder, base)
            figures |= {f"{name}/{key}": value for key, value in found.items()} | {f"{name}/base_bytes": base}
            megabytes = [f"{found[key] / 2**20:,.0f}" for key in ("measured_bytes", "predicted_bytes")]
            rows.append((name, f"{base / 2**20:,.0f}", *megabytes, f"{found['ratio'] - 1:+.1%}"))
            print(*rows[-1], flush=True)
    figures["others_load"] = load().others
    columns = ("run", "process, MiB", "measured beyond it", "predicted", "predicted / measured - 1")
    report("peak memory of a trainer's rank", columns, rows, [f"others' load {figures['others_load']:.0%}"])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

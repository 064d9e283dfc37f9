"""Seconds of a synchronous PPO step, ours against TRL's PPOTrainer: the same model, prompts, lengths, epochs, reward.

SmolLM2-135M, 16 prompts x (32 + 32) tokens, separate critic, every parameter trained (or adapters of LoRA), no end of
sequence, reward a cheap function of the text; two threads on either side. TRL runs in an environment of its own
(`--peer DIR`), which is made at the first use, by exact versions; `--no-peer` leaves it out. Sides are taken in turn in
every repeat.

What is possible: the arithmetic of the updates' and the forwards' matrix products, at the rate of a large product that
torch reaches in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness import arguments, gemm_gflops, measured_load, report, write_json
from pipeline.config.loading import load_config
from pipeline.config.preflight import preflight
from pipeline.driver.run import run
from stages.models.flops import matrix_numbers
from stages.models.spec import read_spec

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = ROOT / "benchmarks/ppo_step.yaml"
TRL = ROOT / "benchmarks/peers/trl_ppo.py"
MODEL = "assets/smollm2-135m-instruct"
ROWS, PROMPT, NEW = 16, 32, 32
WARM_UP = 2
"""Steps: in the first ones memory is touched for the first time."""
PEER_PACKAGES = ("trl==1.12.0", "transformers==5.17.0", "datasets", "accelerate", "peft")


@dataclass(frozen=True)
class Arm:
    """One kind of step."""

    dtype: str
    epochs: int
    lora_rank: int = 0
    """0: every parameter is trained."""

    @property
    def name(self) -> str:
        trained = f", LoRA {self.lora_rank}" if self.lora_rank else ""
        return f"{self.dtype}{trained}, {self.epochs} epoch{'s' if self.epochs > 1 else ''}"

    def changes(self, threads: int) -> list[str]:
        """Return the workload's settings."""
        return [
            f"model.dtype={self.dtype}",
            f"engine.dtype={self.dtype}",
            f"ppo.epochs={self.epochs}",
            f"model.lora.rank={self.lora_rank}",
            f"placement.gangs.all.threads={threads}",
        ]


ARMS = tuple(
    Arm(dtype, epochs, rank) for dtype, rank in (("float32", 0), ("bfloat16", 0), ("bfloat16", 16)) for epochs in (1, 4)
)


@dataclass(frozen=True)
class Measured:
    """A side's seconds per step, and how they divide."""

    step_s: float
    stages: dict[str, float]
    others: float
    """Share of the machine that others used."""


def ours(arm: Arm, threads: int, steps: int, name: str, scratch: Path) -> Measured:
    """Measure a whole run through the real path (Dask, Zarr, ledger), without its first steps and its workers'
    start."""
    changes = [*arm.changes(threads), f"steps={steps + WARM_UP}", f"name={name}", f"runs_dir={scratch}"]
    with measured_load() as load:
        paths = run(load_config([WORKLOAD], changes), Console(file=StringIO())).paths
    commits = [json.loads(path.read_text("utf8")) for path in (paths.root / "ledger").rglob("*.json")]
    ends = sorted(commit["finished"] for commit in commits if commit["address"]["stage"] == "publish")
    seconds = [after - before for before, after in itertools.pairwise(ends[WARM_UP:])]
    stages: dict[str, float] = {}
    for commit in commits:
        stage, step = commit["address"]["stage"], commit["address"]["step"]
        if WARM_UP <= step < steps + WARM_UP:
            duration = commit["finished"] - commit["provenance"]["started"]
            stages[stage] = stages.get(stage, 0.0) + duration / steps
    return Measured(statistics.median(seconds), stages, load().others)


def peer_python(folder: Path) -> Path:
    """Return the interpreter of the peer's environment, which is made if it is not there."""
    python = folder / "bin/python"
    if not (folder / ".complete").exists():
        print(f"making {folder} for {', '.join(PEER_PACKAGES)}: some minutes, once", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}"], check=True)
        subprocess.run([*pip, *PEER_PACKAGES], check=True)
        (folder / ".complete").touch()
    return python


def peers(python: Path, arm: Arm, threads: int, steps: int, prompts: list[list[int]], scratch: Path) -> Measured:
    """Measure TRL's trainer, in a process of its own."""
    job = {
        "model": str(ROOT / MODEL), "dtype": arm.dtype, "epochs": arm.epochs, "threads": threads, "new": NEW,
        "lora_rank": arm.lora_rank,
        "prompts": prompts, "steps": steps, "warm_up": WARM_UP,
        "micro_batch_rows": ROWS, "stop_token": None, "seconds_per_row": 0.0,
    }  # fmt: skip
    return run_job([str(python), str(TRL)], job, scratch)


def run_job(program: list[str], job: dict[str, Any], scratch: Path, python_path: str = "") -> Measured:
    """Run a trainer that is no run of ours, in a process of its own: `program JOB.json`."""
    file = scratch / "job.json"
    file.write_text(json.dumps(job), "utf8")
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": python_path}
    with measured_load() as load:
        done = subprocess.run(
            [*program, str(file)], env=environment, capture_output=True, text=True, check=False, cwd=scratch
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(program)} failed:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Measured(statistics.median(answer["step_s"]), answer["stages"], load().others)


def the_prompts(scratch: Path) -> list[list[int]]:
    """Return the first prompts of the source, as tokens."""
    config = load_config([WORKLOAD], ["name=prompts", f"runs_dir={scratch}"])
    table = preflight(config).prompts
    return table.tokens[table.train[:ROWS], :PROMPT].tolist()


def least_seconds(arm: Arm, gflops: float) -> float:
    """Return the seconds that the products of a step take at the rate of a large one: a forward pass each of
    generation, reference and critic, then forward and backward of both trained models in every epoch. The output layer
    counts for sampled tokens only. Under LoRA the backward pass has gradients of inputs and none of weights."""
    spec = read_spec(str(ROOT / MODEL))
    blocks = 2 * spec.num_layers * matrix_numbers(spec) * ROWS * (PROMPT + NEW)
    output = 2 * spec.vocab_size * spec.hidden_size * ROWS * NEW
    passes = 2 if arm.lora_rank else 3
    return (3 * blocks + 2 * output + arm.epochs * passes * (2 * blocks + output)) / gflops / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", type=Path, default=ROOT / ".peers/trl", help="folder of TRL's environment")
    parser.add_argument("--no-peer", action="store_true", help="only our side")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--steps", type=int, default=3, help="steps measured in each run, after those that warm up")
    parser.add_argument("--arms", nargs="+", default=[arm.name for arm in ARMS], help="which of the arms, by name")


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    repeats, steps = (1, 1) if options.quick else (options.repeats, options.steps)
    arms = ARMS[2:3] if options.quick else [arm for arm in ARMS if arm.name in options.arms]
    python = None if options.no_peer or options.quick else peer_python(options.peer.resolve())
    found: dict[tuple[str, str], list[Measured]] = {}
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="stageline-ppo-step-") as folder:
        scratch = Path(folder)
        prompts = the_prompts(scratch)
        for repeat in range(repeats):
            for number, arm in enumerate(arms):
                rates.setdefault(arm.dtype, []).append(gemm_gflops(options.threads, getattr(torch, arm.dtype)))
                sides = {"ours": ours(arm, options.threads, steps, f"arm{number}-{repeat}", scratch)}
                if python is not None:
                    sides["TRL"] = peers(python, arm, options.threads, steps, prompts, scratch)
                for side, measured in sides.items():
                    found.setdefault((arm.name, side), []).append(measured)
                    print(f"{arm.name}: {side}: {measured.step_s:.2f} s a step", file=sys.stderr, flush=True)
    figures: dict[str, float] = {f"gemm_gflops/{dtype}": statistics.median(each) for dtype, each in rates.items()}
    rows, notes = [], []
    for arm in arms:
        least = least_seconds(arm, figures[f"gemm_gflops/{arm.dtype}"])
        seconds = {
            side: statistics.median(m.step_s for m in of_side)
            for (name, side), of_side in found.items()
            if name == arm.name
        }
        for side, step_s in seconds.items():
            repeated = found[arm.name, side]
            speed = step_s / seconds["ours"]
            load = max(m.others for m in repeated)
            rows.append((arm.name, side, f"{step_s:.2f}", f"{speed:.2f}", f"{least / step_s:.0%}", f"{load:.0%}"))
            figures[f"{arm.name}/{side}/step_s"] = step_s
            for stage in repeated[0].stages:
                figures[f"{arm.name}/{side}/{stage}_s"] = statistics.median(m.stages[stage] for m in repeated)
            split = {stage: figures[f"{arm.name}/{side}/{stage}_s"] for stage in repeated[0].stages}
            notes.append(f"{arm.name}, {side}: " + ", ".join(f"{stage} {s:.2f}" for stage, s in split.items()))
    title = f"PPO step, {ROWS} x ({PROMPT} + {NEW}) tokens, {options.threads} threads"
    report(title, ("arm", "side", "s/step", "x ours", "of the limit", "others' load"), rows, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

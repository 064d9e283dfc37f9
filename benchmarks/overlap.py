"""Asynchronous PPO (staleness 1) against the best synchronous schedule of the same work, on this machine's cores.

Whole runs through the real path (Dask, Zarr, ledger), arms taken in turn, repeated; a repeat's figure is its steady
seconds per step, and an arm's is the median of its repeats. The synchronous arm gives every stage all cores in turn
(and scoring still overlaps generation): comparing with a one-thread serial schedule would flatter the overlap.

Policy and critic may also be trained beside each other, each by a gang of two pipeline stages on the same two cores. A
pipeline idles while it fills and drains; the other gang's micro-batches then use the cores. The arm to compare with has
one such gang, which trains the policy and then the critic.

`--plan` adds the placement that `stageline plan` chooses for these cores. It is calibrated on the runs of the first two
arms of each repeat.

The limit: no step is shorter than 1 / n of the processor seconds that all processes of the run spend in it on n cores.
The limit of a workload takes the fewest of any arm and repeat, so no arm can pass it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.harness import arguments, gemm_gflops, measured_load, own_cpu_s, report, this_hardware, write_json
from pipeline.cli.main import main as stageline
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.run import run

CORES = os.cpu_count() or 1
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Arm:
    """A schedule: how stale, and which threads each gang has."""

    name: str
    staleness: int
    overrides: tuple[str, ...]

    baseline: bool = False
    """True if the other arms of the workload are compared with this one, or with a faster one like it."""


def gangs(generate: int, train: int) -> tuple[str, ...]:
    return (f"placement.gangs.generate.threads={generate}", f"placement.gangs.train.threads={train}")


ARMS = (
    Arm("sync, each gang all cores", 0, gangs(CORES, CORES), baseline=True),
    Arm("async, one thread each", 1, gangs(1, 1)),
    Arm("async, training all cores", 1, gangs(1, CORES)),
    Arm(
        "async, the reference beside them",
        1,
        (*gangs(1, CORES), "placement.gangs.reference={threads: 1}", "placement.roles.reference=reference"),
    ),
)
PLANNED = Arm("as planned", 1, ())
"""`--plan`. Its staleness is what the plan says."""
PIPELINE = "{workers: 2, layout: {pipeline: 2}}"
ROLES = "roles: {generate: generate, score: generate, reference: policy, policy: policy, critic: "
BESIDE = (
    Arm(
        "policy, then critic",
        0,
        (f"placement={{gangs: {{generate: {{threads: {CORES}}}, policy: {PIPELINE}}}, {ROLES}policy}}}}",),
        baseline=True,
    ),
    Arm(
        "policy beside critic",
        0,
        (
            f"placement={{gangs: {{generate: {{threads: {CORES}}}, policy: {PIPELINE}, critic: {PIPELINE}}}, "
            f"{ROLES}critic}}}}",
        ),
    ),
)
PIPELINES = "two pipeline stages"
WORKLOADS: dict[str, tuple[str, ...]] = {
    "demo (training dominates)": (),
    "long responses (balanced)": (
        "sampling.max_new_tokens=40",
        "sampling.min_new_tokens=40",
        "rollout.rows=32",
        "ppo.epochs=1",
        "model.critic_blocks=1",
        "model.frozen_blocks=28",
    ),
    PIPELINES: (
        "rollout.rows=16",
        "sampling.max_new_tokens=40",
        "sampling.min_new_tokens=40",
        "ppo.minibatches=1",
        "model.policy.micro_batch_rows=8",
        "model.critic.micro_batch_rows=8",
        "model.critic_blocks=null",
        "model.frozen_blocks=0",
    ),
}
QUICK = ("steps=4", "prompts.held_out=8")


@dataclass(frozen=True)
class Measured:
    step_s: float
    cpu_s: float
    """Processor seconds of a step, of all processes of the run."""
    others: float
    """Share of the machine that others used."""


def measure(config: RunConfig) -> Measured:
    """Run a config. Its steps after the warm-up count, each from the end of the one before. The last eta steps do not
    count: no later step is generated beside them."""
    ends: list[tuple[float, float]] = []

    def step_over(step: int, metrics: Mapping[str, float]) -> None:
        ends.append((time.perf_counter(), own_cpu_s()))

    with measured_load() as load:
        run(config, Console(file=StringIO()), callbacks=[step_over])
    steps = len(ends) - WARM_UP_STEPS - config.staleness
    (began_s, cpu_before), (ended_s, cpu_after) = ends[WARM_UP_STEPS - 1], ends[WARM_UP_STEPS + steps - 1]
    return Measured((ended_s - began_s) / steps, (cpu_after - cpu_before) / steps, load().others)


def write_plan(runs: Sequence[Path], before: Path, folder: Path) -> Path:
    """Calibrate on some runs, plan the run `before` anew for this machine's cores, and return the plan's file."""
    folder.mkdir()
    calibration, plan = folder / "calibration.yaml", folder / "plan.yaml"
    hardware = f"{CORES}x{this_hardware()}"
    commands = (
        ["calibrate", *map(str, runs), "--hardware", f"1x{hardware}", "--write", str(calibration)],
        ["plan", str(before / "config.yaml"), "--devices", hardware, "--calibration", str(calibration),
         "--write", str(plan)],
    )  # fmt: skip
    with redirect_stdout(StringIO()) as printed:
        done = all(stageline(command) == 0 for command in commands)
    print(printed.getvalue(), file=sys.stderr)
    if not done:
        raise SystemExit("no plan was found")
    return plan


def arms_of(workload: str, options: argparse.Namespace) -> tuple[Sequence[Arm], Sequence[Arm]]:
    """Return the arms of a workload that have settings of their own, and all its arms."""
    if workload == PIPELINES:
        return BESIDE, BESIDE
    arms = ARMS[:2] if options.quick else ARMS
    return arms, [*arms, *([PLANNED] if options.plan else [])]


def main() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
        parser.add_argument("--plan", action="store_true", help="also measure the placement that `plan` chooses")
        parser.add_argument(
            "--steps", type=int, default=7, help="steps of a run; the first two and the last do not count"
        )

    options = arguments(__doc__ or "", add_options)
    base = ["conf/run/tiny.yaml"] if options.quick else ["conf/run/demo.yaml"]
    common = QUICK if options.quick else (f"steps={options.steps}",)
    workloads = {"tiny": ()} if options.quick else {name: WORKLOADS[name] for name in options.workloads}
    repeats = 1 if options.quick else options.repeats
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="stageline-overlap-") as scratch:
        found: dict[tuple[str, str], list[Measured]] = {}
        for repeat in range(repeats):
            for place, (workload, changes) in enumerate(workloads.items()):
                arms, shown = arms_of(workload, options)
                names = {arm.name: f"workload-{place}-arm-{arms.index(arm)}-repeat-{repeat}" for arm in arms}
                for arm in shown:
                    fixed = ("evaluate.every=0", "tracking={uri: null, report: false}", "cluster.dashboard=null")
                    if arm is PLANNED:
                        runs = [Path(scratch, names[one.name]) for one in arms[:2]]
                        plan = write_plan(runs, runs[1], Path(scratch, f"plan-{place}-{repeat}"))
                        config = load_config([str(plan)], [*common, *fixed, f"name=plan-{place}-repeat-{repeat}"])
                    else:
                        own = (f"name={names[arm.name]}", f"runs_dir={Path(scratch)}", f"staleness={arm.staleness}")
                        config = load_config(base, [*common, *changes, *arm.overrides, *fixed, *own])
                    measured = measure(config)
                    found.setdefault((workload, arm.name), []).append(measured)
                    print(f"{workload}: {arm.name}: {measured.step_s:.2f} s a step", file=sys.stderr, flush=True)
    for workload in workloads:
        _, shown = arms_of(workload, options)
        step_s = {arm: statistics.median(m.step_s for m in found[workload, arm.name]) for arm in shown}
        base_s = min(seconds for arm, seconds in step_s.items() if arm.baseline)
        limit = min(m.cpu_s for arm in shown for m in found[workload, arm.name]) / CORES
        for arm, seconds in step_s.items():
            others = max(m.others for m in found[workload, arm.name])
            rows.append(
                (
                    workload,
                    arm.name,
                    f"{seconds:.2f}",
                    f"{base_s / seconds:.2f}",
                    f"{limit / seconds:.0%}",
                    f"{others:.0%}",
                )
            )
            figures[f"{workload}/{arm.name}/step_s"] = seconds
            figures[f"{workload}/{arm.name}/speedup"] = base_s / seconds
        figures[f"{workload}/limit_s"] = limit
    gemm = {threads: gemm_gflops(threads) for threads in (1, CORES)}
    figures |= {f"gemm_fp32_gflops/{threads}_threads": rate for threads, rate in gemm.items()}
    report(
        "overlap: seconds per PPO step",
        ("workload", "schedule", "s/step", "x the first", "of the limit", "others' load"),
        rows,
        [
            f"{repeats} repeats, medians; {CORES} cores; fp32 GEMM "
            + ", ".join(f"{rate:.0f} GFLOP/s on {threads} thread(s)" for threads, rate in gemm.items()),
            "limit: fewest processor seconds of a step in any schedule / cores",
        ],
    )
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

"""Predicted step times against published ones, and against runs on this machine.

**Published.** NeMo-Aligner's PPO of a 70B actor and a 70B critic on nodes of 8 H100, 1,024 rollouts in train batches of
128. The first row of a table calibrates one factor for everything (`calibration.scaled`); the others are predicted. No
number is fitted to them. Each engine (TP 8, one a node) generates 8 rows at a time, the `rollout_micro_batch_size` of
that setup, and takes the next 8 when the longest has ended; all stages of a step follow one another.

- arXiv 2405.01481: 8 + 8, 16 + 16 and 32 + 32 nodes of actor and critic.
- docs/user-guide/rlhf.rst of NVIDIA/NeMo-Aligner: 8 + 4 to 64 + 32 nodes; the last with 16 rows at a time.

Neither says the training layout, the prompts, or the spread of the lengths. Assumed are TP 8 x PP 8 (8 nodes hold one
copy), prompts of 200 tokens, and a lognormal with sigma 0.7 cut at 1,024 tokens, whose mean the second table gives.

**Runs on this machine** (`--runs tiny demo`): variants of two configs that differ in staleness, threads, gangs, shards,
rows, lengths, frozen blocks and dtype. Calibrated on the first two of a config, the steady seconds per step of the
others are predicted, and the order of every pair that differs by more than 5 %. In the demo's steps arithmetic takes
the time. The tiny model's steps consist of fixed costs. A variant's figure is the median of its repeats. Needs a quiet
machine: other load counts as slowness of the stages that it happened to.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from rich.console import Console

from benchmarks.harness import arguments, measured_load, report, this_hardware, write_json
from pipeline.cli.calibrate import read_observed_run
from pipeline.config.hardware import hardware_of, read_cluster
from pipeline.config.loading import load_config
from pipeline.config.memory import planned_run
from pipeline.config.role_models import read_model, role_models
from pipeline.driver.results import open_history
from pipeline.driver.run import run
from pipeline.graph.graph import Node, step_nodes
from pipeline.plan.calibrate import calibrate
from pipeline.plan.calibration import Calibration, scaled, typical
from pipeline.plan.cost import Costs, costs_of
from pipeline.plan.lengths import EmpiricalLengths, Lengths, lognormal_with_mean
from pipeline.plan.observed import ObservedRun
from pipeline.plan.scenario import scenario_of
from pipeline.plan.simulate import play
from storage.address import Address

ROLLOUTS, LONGEST = 1024, 1024
STEPS_DRAWN = 8
"""Steps of random lengths that a prediction is the mean of: one draw of 1,024 lengths moves a step by some percent."""
SIGMA, PROMPT = 0.7, 200.0
"""Assumed: spread of the lengths (of their logarithm), tokens of a prompt."""


@dataclass(frozen=True)
class PublishedStep:
    """A row of a published table."""

    actor_nodes: int
    critic_nodes: int
    seconds: float
    mean_tokens: float
    rows_at_once: int = 8


TABLES = {
    "arXiv 2405.01481": (
        PublishedStep(8, 8, 253.8, 340),
        PublishedStep(16, 16, 143.4, 340),
        PublishedStep(32, 32, 81.2, 340),
    ),
    "NeMo-Aligner's guide": (
        PublishedStep(8, 4, 366.7, 350.7),
        PublishedStep(16, 8, 190.4, 323.3),
        PublishedStep(32, 16, 108.0, 331.7),
        PublishedStep(64, 32, 56.9, 334.0, rows_at_once=16),
    ),
}


def predicted_steps(table: Sequence[PublishedStep], *, pipeline: int = 8, sigma: float = SIGMA) -> list[float]:
    """Return the predicted seconds of each row, calibrated on the first. `pipeline`: stages of actor and critic, on as
    many nodes; a critic on fewer nodes has as many stages as nodes."""
    assumed = typical("H100-80", on_gpus=True)
    first = step_s(table[0], assumed, pipeline=pipeline, sigma=sigma)
    calibration = scaled(assumed, first, table[0].seconds, f"a published step of {table[0].seconds} s")
    return [step_s(row, calibration, pipeline=pipeline, sigma=sigma) for row in table]


def step_s(row: PublishedStep, calibration: Calibration, *, pipeline: int, sigma: float) -> float:
    """Return the predicted seconds of a synchronous step, the mean over `STEPS_DRAWN` steps of random lengths. Shards
    of `rows_at_once` go to the engine that is free first. Then come both forward passes, both updates side by side, and
    publication."""
    costs = _costs(row, calibration, pipeline)
    lengths = lognormal_with_mean(row.mean_tokens, sigma, LONGEST)
    stages: dict[str, list[Node]] = {}
    for node in step_nodes(costs.run.config.graph(), 1):
        stages.setdefault(node.stage, []).append(node)
    drawn = [_drawn_step_s(row, costs, stages, lengths, step) for step in range(STEPS_DRAWN)]
    return statistics.fmean(drawn) + costs.seconds(stages["publish"][0], []) + costs.refit_s()


def _drawn_step_s(
    row: PublishedStep, costs: Costs, stages: Mapping[str, Sequence[Node]], lengths: Lengths, step: int
) -> float:
    free = [0.0] * row.actor_nodes
    every: list[int] = []
    for node in stages["generate"]:
        shard = lengths.rows(step, node.address.shard, row.rows_at_once)
        heapq.heappush(free, heapq.heappop(free) + costs.seconds(node, shard))
        every += shard
    after = [costs.seconds(stages[stage][0], every) for stage in ("reference", "logprob")]
    updates = max(costs.seconds(stages[stage][0], every) for stage in ("update_policy", "update_critic"))
    return math.fsum([max(free), *after, updates])


def _costs(row: PublishedStep, calibration: Calibration, pipeline: int) -> Costs:
    layout = "tensor: 8, sequence_parallel: true, distributed_optimizer: true, recompute: selective"
    actor, critic = (
        f"{{workers: {8 * nodes}, layout: {{{layout}, pipeline: {min(pipeline, nodes)}}}}}"
        for nodes in (row.actor_nodes, row.critic_nodes)
    )
    changes = [
        "staleness=0",
        f"rollout={{rows: {ROLLOUTS}, shards: {ROLLOUTS // row.rows_at_once}}}",
        f"engine.max_rows={row.rows_at_once}",
        "engine.tensor_parallel=8",
        f"sampling.max_new_tokens={LONGEST}",
        f"placement.gangs.generate={{workers: {row.actor_nodes}, concurrent_shards: 1}}",
        f"placement.gangs.train={actor}",
        f"placement.gangs.critic={critic}",
        "placement.roles.reference=train",
        "ppo={epochs: 1, minibatches: 8, proximal: recompute}",
        "model.policy.micro_batch_rows=1",
        "model.critic.micro_batch_rows=1",
    ]
    config = load_config(["conf/run/slurm_70b.yaml"], changes)
    models = role_models(config, read_model("model.path", config.model.path, weights=False), weights=False)
    cluster = read_cluster(f"{row.actor_nodes + row.critic_nodes}x8xH100-80")
    return costs_of(planned_run(config, models, on_gpus=True), cluster, calibration, PROMPT)


def published() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the rows of the table and the figures by name."""
    rows, figures = list[tuple[str, ...]](), dict[str, float]()
    for name, table in TABLES.items():
        for row, seconds in zip(table, predicted_steps(table), strict=True):
            nodes, error = f"{row.actor_nodes} + {row.critic_nodes}", seconds / row.seconds - 1
            kind = "calibrates" if row is table[0] else f"{error:+.1%}"
            rows.append((name, nodes, f"{row.seconds:.1f}", f"{seconds:.1f}", kind))
            figures[f"{name}/{nodes}/error"] = error
    return rows, figures


# ---- runs on this machine --------------------------------------------------------------------------------

WARM_UP_STEPS = 2
COMMON = (
    "evaluate.every=0",
    "tracking.uri=null",
    "tracking.report=false",
    "cluster.dashboard=null",
    "checkpoint.every=99",
)


@dataclass(frozen=True)
class Workload:
    """A config and its variants."""

    config: str
    steps: int
    """Steps of each run, the warm-up included."""
    variants: Mapping[str, tuple[str, ...]]
    """Name -> changes to the config. The first two calibrate."""


ONE_GANG = (
    "placement.gangs={all: {}}",
    "placement.roles={generate: all, score: all, reference: all, policy: all, critic: all}",
)
WORKLOADS = {
    "tiny": Workload(
        "conf/run/tiny.yaml",
        16,
        {
            "base": (),
            "large": ("rollout={rows: 64, shards: 2}", "sampling.max_new_tokens=48", "engine.max_rows=32"),
            "synchronous": ("staleness=0",),
            "large, synchronous": ("staleness=0", "rollout={rows: 64, shards: 2}", "sampling.max_new_tokens=48"),
            "four shards": ("rollout={rows: 32, shards: 4}",),
            "one gang": ONE_GANG,
            "training on two threads": ("placement.gangs.train.threads=2", "rollout={rows: 64, shards: 2}"),
            "long responses": ("sampling.max_new_tokens=96", "sampling.min_new_tokens=96"),
            "frozen blocks": ("model.frozen_blocks=2", "rollout={rows: 64, shards: 2}"),
            "bfloat16": ("model.dtype=bfloat16", "engine.dtype=bfloat16", "rollout={rows: 64, shards: 2}"),
        },
    ),
    "demo": Workload(
        "conf/run/demo.yaml",
        8,
        {
            "base": (),
            "longer": ("sampling={max_new_tokens: 32, min_new_tokens: 32}",),
            "synchronous": ("staleness=0",),
            "longer, synchronous": ("staleness=0", "sampling={max_new_tokens: 32, min_new_tokens: 32}"),
            "four shards": ("rollout={rows: 64, shards: 4}",),
            "one gang": ONE_GANG,
            "training on two threads": ("placement.gangs.train.threads=2",),
            "long responses": ("rollout={rows: 16, shards: 2}", "sampling={max_new_tokens: 96, min_new_tokens: 96}"),
            "fewer frozen blocks": ("model.frozen_blocks=12",),
            "float32": ("model.dtype=float32", "engine.dtype=float32"),
        },
    ),
}


def first_variants(workload: Workload, number: int) -> Workload:
    """Return a workload with only its first variants."""
    return replace(workload, variants=dict(itertools.islice(workload.variants.items(), number)))


@dataclass(frozen=True)
class Measured:
    """A variant that ran."""

    step_s: float
    observed: ObservedRun
    others: float
    """Share of the machine that other processes used."""


def measure(file: str, name: str, changes: Sequence[str], folder: str, steps: int, hardware: str) -> Measured:
    """Run a variant of the config in `file`; seconds from one publication to the next, over the steps after the
    warm-up. `hardware`: this machine."""
    fixed = (f"name={name}", f"runs_dir={folder}", f"steps={steps}")
    config = load_config([file], [*COMMON, *changes, *fixed])
    with measured_load() as load:
        run(config, Console(file=StringIO()))
    ledger = open_history(config).ledger
    first, last = (ledger.get(Address("publish", version)) for version in (WARM_UP_STEPS, steps))
    step_s = (last.finished - first.finished) / (steps - WARM_UP_STEPS)
    return Measured(step_s, read_observed_run(str(config.run_dir), read_cluster(hardware)), load().others)


def simulated_step_s(one: ObservedRun, calibration: Calibration, hardware: str) -> float:
    """Return the predicted seconds of a step of a run, with its own lengths."""
    costs = costs_of(one.run, read_cluster(hardware), calibration, one.prompt_tokens)
    played = play(scenario_of(costs, EmpiricalLengths(one.lengths)))
    times = played.published_s
    return (times[-1] - times[WARM_UP_STEPS]) / (len(times) - 1 - WARM_UP_STEPS)


def runs_here(name: str, options: argparse.Namespace) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Run the variants of a workload. Return the rows of the table and the figures by name."""
    workload = first_variants(WORKLOADS[name], 4) if options.quick else WORKLOADS[name]
    variants = workload.variants
    steps = 8 if options.quick else options.steps or workload.steps
    found: dict[str, list[Measured]] = {}
    cluster = options.hardware or f"1x{os.cpu_count() or 1}x{this_hardware()}"
    with tempfile.TemporaryDirectory(prefix="stageline-planning-") as scratch:
        for repeat in range(1 if options.quick else options.repeats):
            for place, (variant, changes) in enumerate(variants.items()):
                run_name = f"variant-{place}-repeat-{repeat}"
                measured = measure(workload.config, run_name, changes, scratch, steps, cluster)
                found.setdefault(variant, []).append(measured)
                print(f"{name}, {variant}: {measured.step_s:.3f} s a step", file=sys.stderr, flush=True)
    seconds = {variant: statistics.median(one.step_s for one in of) for variant, of in found.items()}
    calibrating = list(variants)[:2]
    sources = [one.observed for variant in calibrating for one in found[variant]]
    calibration = calibrate(sources, read_cluster(cluster), hardware_of(cluster))
    predicted = {variant: simulated_step_s(of[0].observed, calibration, cluster) for variant, of in found.items()}
    rows, figures = list[tuple[str, ...]](), dict[str, float]()
    for variant in variants:
        error = predicted[variant] / seconds[variant] - 1
        said = f"{error:+.1%}{' (calibrates)' if variant in calibrating else ''}"
        others = max(one.others for one in found[variant])
        rows.append((variant, f"{seconds[variant]:.3f}", f"{predicted[variant]:.3f}", said, f"{others:.0%}"))
        figures[f"{name}/{variant}/seconds"] = seconds[variant]
        figures[f"{name}/{variant}/error"] = error
    pairs = [
        pair for pair in itertools.combinations(variants, 2) if abs(math.log(_ratio(seconds, pair))) > math.log(1.05)
    ]
    right = [pair for pair in pairs if (_ratio(seconds, pair) > 1) == (_ratio(predicted, pair) > 1)]
    if pairs:
        share = figures[f"{name}/order"] = len(right) / len(pairs)
        rows.append(("pairs in the right order", f"{len(pairs)}", f"{len(right)}", f"{share:.0%}", ""))
    return rows, figures


def _ratio(seconds: dict[str, float], pair: tuple[str, str]) -> float:
    return seconds[pair[0]] / seconds[pair[1]]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="steps of each of --runs; the first two do not count")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=list(WORKLOADS),
        default=[],
        help="also run variants of these configs on this machine, which must be quiet",
    )
    parser.add_argument(
        "--hardware", help="what this machine is, for --runs, as in 1x2xcpu (default: by its processor's instructions)"
    )


def main() -> None:
    options = arguments(__doc__ or "", _arguments)
    rows, figures = published()
    report("published steps, seconds", ("table", "nodes", "published", "predicted", "error"), rows, [])
    for name in options.runs:
        rows, more = runs_here(name, options)
        columns = ("variant", "measured", "predicted", "error", "others' load")
        report(f"runs of {name} here, seconds per step", columns, rows, [])
        figures |= more
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

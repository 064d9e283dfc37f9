"""Predicted step times against published ones, and against runs on this machine.

**Published.** NeMo-Aligner's PPO of a 70B actor and a 70B critic on nodes of 8 H100, 1,024 rollouts in train batches of
128. The first row of a table calibrates one factor for everything (`calibration.scaled`); the others are predicted. No
number is fitted to them. Each engine (TP 8, one a node) generates 8 rows at a time, the `rollout_micro_batch_size` of
that setup, and takes the next 8 when the longest has ended; all stages of a step follow one another.

- arXiv 2405.01481: 8 + 8, 16 + 16 and 32 + 32 nodes of actor and critic.
- docs/user-guide/rlhf.rst of NVIDIA/NeMo-Aligner: 8 + 4 to 64 + 32 nodes; the last with 16 rows at a time.

Neither says the training layout, the prompts, or the spread of the lengths. Assumed are TP 8 x PP 8 (8 nodes hold one
copy), prompts of 200 tokens, and a lognormal with sigma 0.7 cut at 1,024 tokens, whose mean the second table gives.

**Runs on this machine** (`--runs`): the tiny and the demo model in ten variants, calibrated on two of them. Needs a
quiet machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import arguments, report, write_json
from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config
from pipeline.config.memory import planned_run
from pipeline.config.role_models import read_model, role_models
from pipeline.graph.graph import Node, step_nodes
from pipeline.plan.calibration import Calibration, scaled, typical
from pipeline.plan.cost import Costs, costs_of
from pipeline.plan.lengths import lognormal_with_mean

ROLLOUTS, LONGEST = 1024, 1024
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
    factor = table[0].seconds / step_s(table[0], assumed, pipeline=pipeline, sigma=sigma)
    calibration = scaled(assumed, factor, f"a published step of {table[0].seconds} s")
    return [step_s(row, calibration, pipeline=pipeline, sigma=sigma) for row in table]


def step_s(row: PublishedStep, calibration: Calibration, *, pipeline: int, sigma: float) -> float:
    """Return the predicted seconds of a synchronous step: shards of `rows_at_once` go to the engine that is free first;
    then both forward passes, both updates side by side, and publication."""
    costs = _costs(row, calibration, pipeline)
    lengths = lognormal_with_mean(row.mean_tokens, sigma, LONGEST)
    stages: dict[str, list[Node]] = {}
    for node in step_nodes(costs.run.config.graph(), 1):
        stages.setdefault(node.stage, []).append(node)
    free = [0.0] * row.actor_nodes
    every: list[int] = []
    for node in stages["generate"]:
        shard = lengths.rows(1, node.address.shard, row.rows_at_once)
        heapq.heappush(free, heapq.heappop(free) + costs.seconds(node, shard))
        every += shard
    after = [costs.seconds(stages[stage][0], every) for stage in ("reference", "logprob")]
    updates = max(costs.seconds(stages[stage][0], every) for stage in ("update_policy", "update_critic"))
    return math.fsum([max(free), *after, updates, costs.seconds(stages["publish"][0], []), costs.refit_s()])


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


def main() -> None:
    options = arguments(__doc__ or "")
    rows, figures = published()
    report("published steps, seconds", ("table", "nodes", "published", "predicted", "error"), rows, [])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()

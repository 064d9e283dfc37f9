"""`stageline inspect RUN --step N`: the rows of a step as a table."""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.answers import output
from pipeline.cli.exit_codes import DONE
from pipeline.cli.sources import saved_config
from pipeline.config.errors import ConfigError
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import step_nodes
from pipeline.observe.tables import InspectRow, inspect_table
from stages.models.hf_files import read_tokenizer
from storage.address import Address
from storage.errors import DroppedOutput, MissingOutput
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Scores


def command(options: argparse.Namespace) -> int:
    output().print(inspect_step(saved_config(options.run_dir), options.step, options.rows))
    return DONE


def inspect_step(config: RunConfig, step: int, rows: int) -> RenderableType:
    """Rows of a step with what the stages made of them, and the step's nodes: who ran them, from what, how long.

    Raises:
        ConfigError: no such step.
        MissingOutput: nothing of the step is there yet.
    """
    if not 0 <= step < config.steps:
        raise ConfigError("--step", f"given {step}; the run has steps 0 to {config.steps - 1}")
    history = open_history(config)
    commits = [c for c in map(history.ledger.find, history.addresses(step)) if c is not None]
    if not any(c.address.stage == "generate" for c in commits):
        raise MissingOutput(f"step {step} has no rollouts yet")
    shown: RenderableType
    try:
        shown = inspect_table(step_rows(config, step)[:rows], f"step {step} of {config.name}")
    except DroppedOutput as error:
        shown = Text(f"rows of step {step}: {error}")
    nodes = Table(title="nodes", title_justify="left")
    for heading in ("node", "worker", "attempt", "weights", "seconds"):
        nodes.add_column(heading)
    order = {node.address: i for i, node in enumerate(step_nodes(config.graph(), step))}
    for c in sorted(commits, key=lambda c: order[c.address]):
        versions = ", ".join(f"v{v}" for v in c.provenance.weight_versions) or "-"
        seconds = f"{c.finished - c.provenance.started:.3f}"
        nodes.add_row(str(c.address), c.provenance.worker, c.attempt, versions, seconds)
    return Group(shown, nodes)


def step_rows(config: RunConfig, step: int) -> list[InspectRow]:
    """The rows of a step whose shard has been generated; what a stage has not made yet is None."""
    history, shards = open_history(config), config.rollout.shards
    decode = read_tokenizer(config.model.path).decode

    def read(stage: str, shard: int = 0) -> object | None:
        address = Address(stage, step, shard)
        return history.store.read(address) if history.ledger.find(address) is not None else None

    advantages = read("advantage")
    of_step = advantages if isinstance(advantages, Advantages) else None
    found: list[InspectRow] = []
    for shard in range(shards):
        rollout = read("generate", shard)
        if not isinstance(rollout, Rollout):
            continue
        scores, reference = read("score", shard), read("reference", shard)
        policy = read("logprob", shard)
        for i in range(rollout.num_rows):
            mask = rollout.response_mask[i]
            start, length = int(rollout.prompt_lengths[i]), int(rollout.response_lengths[i])
            versions = sorted({int(v) for v in rollout.token_versions[i][mask]})
            kl = None
            if isinstance(reference, ReferenceLogprobs):
                ours = policy.policy_logprobs if isinstance(policy, PolicyLogprobs) else rollout.sampler_logprobs
                kl = float(np.sum((ours[i] - reference.ref_logprobs[i])[mask], dtype=np.float64))
            row = int(rollout.row[i])
            found.append(
                InspectRow(
                    row=row,
                    prompt=decode(rollout.tokens[i, :start].tolist()),
                    response=decode(rollout.tokens[i, start : start + length].tolist()),
                    score=float(scores.scores[i]) if isinstance(scores, Scores) else None,
                    kl=kl,
                    version="-".join(str(v) for v in dict.fromkeys((versions[0], versions[-1]))),
                    advantage=None if of_step is None else float(of_step.advantages[row][mask].mean()),
                )
            )
    return found

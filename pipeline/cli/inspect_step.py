"""`stageline inspect RUN [--step N]`: print the rows of a step as a table. The default is the newest step with a
rollout."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.answers import SUCCESS, output_console, read_saved_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.driver.tracked import span_name
from pipeline.errors import ConfigError
from pipeline.graph.graph import step_nodes
from pipeline.observe.rows import PART_COLUMN, read_step_shards, row_columns, token_decoder
from pipeline.observe.tables import InspectRow, inspect_table
from stages.prompts import last_questions
from storage.errors import DroppedOutput, MissingOutput


def command(options: argparse.Namespace) -> int:
    config = read_saved_config(options.run_dir)
    if options.rows < 1:
        raise ConfigError("--rows", f"given {options.rows}; must be 1 or more")
    step = last_step(config) if options.step is None else options.step
    output_console().print(inspect_step(config, step, options.rows))
    return SUCCESS


def last_step(config: RunConfig) -> int:
    """Return the newest step that has a committed shard of rollouts. The rows of the step may have been deleted. Raises
    MissingOutput if there is no such step."""
    steps = [address.step for address in open_history(config).ledger.addresses("generate")]
    if not steps:
        raise MissingOutput(f"{config.run_dir} has no rollouts yet")
    return max(steps)


def inspect_step(config: RunConfig, step: int, rows: int) -> RenderableType:
    """Return two tables about a step. The first table has the first rows of the step, at most `rows` of them, with the
    results of the stages. If the rows were deleted, a text replaces this table. The second table has the step's
    committed nodes: worker, attempt, versions of the weights, duration.

    Raises:
        ConfigError: no such step.
        MissingOutput: the step has no rollouts yet.
    """
    if not 0 <= step < config.steps:
        count = f"the terminal's step N/{config.steps} is step N - 1"
        raise ConfigError("--step", f"given {step}; the run has steps 0 to {config.steps - 1} ({count})")
    history = open_history(config)
    commits = [c for c in map(history.ledger.find, history.addresses(step)) if c is not None]
    if not any(c.address.stage == "generate" for c in commits):
        raise MissingOutput(f"step {step} has no rollouts yet")
    shown: RenderableType
    try:
        shown = inspect_table(step_rows(config, step)[:rows], f"step {step} of {config.name}")
    except DroppedOutput as error:
        shown = Text(f"rows of step {step}: {error}")
    nodes = Table(title=f"nodes of step {step}", title_justify="left")
    for heading in ("node", "worker", "attempt", "weights", "seconds"):
        nodes.add_column(heading, overflow="fold")
    order = {node.address: i for i, node in enumerate(step_nodes(config.graph(), step))}
    for c in sorted(commits, key=lambda c: order[c.address]):
        versions = ", ".join(f"v{v}" for v in c.provenance.weight_versions) or "-"
        seconds = f"{c.finished - c.provenance.started:.3f}"
        nodes.add_row(span_name(c.address), c.provenance.worker, c.attempt, versions, seconds)
    return Group(shown, nodes)


def step_rows(config: RunConfig, step: int) -> list[InspectRow]:
    """Return the rows of a step's generated shards. Results that do not exist yet are None."""
    decode = token_decoder(config.stored.root, config.model.path)
    tables = [row_columns(shard, decode) for shard in read_step_shards(open_history(config), step)]
    asked = last_questions(RunPaths(config.run_dir).prompts)
    lines = (dict(zip(table, line, strict=True)) for table in tables for line in zip(*table.values(), strict=True))
    return [_inspect_row(line, asked) for line in lines]


def _inspect_row(line: Mapping[str, Any], user_messages: Sequence[str] | None) -> InspectRow:
    """Return a row for the table. Its prompt is the last user message, or the whole prompt if that message is unknown
    or empty. `line`: column of `row_columns` -> value of this row. `user_messages`: the last user message of each
    prompt, by prompt index."""

    def number(name: str) -> float | None:
        value = float(line[name])
        return None if math.isnan(value) else value

    parts = {name.removeprefix(PART_COLUMN): float(v) for name, v in line.items() if name.startswith(PART_COLUMN)}
    return InspectRow(
        row=int(line["row"]),
        prompt=("" if user_messages is None else user_messages[int(line["prompt_index"])]) or line["prompt"],
        response=line["response"],
        score=number("score"),
        kl=number("kl"),
        version="-".join(dict.fromkeys(str(line[name]) for name in ("version_first", "version_last"))),
        advantage=number("advantage_mean"),
        parts=parts,
    )

"""What `stageline check RUN` holds a run to that was not always what it is now."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.proofs import earlier_graphs
from pipeline.config.changes import sections
from pipeline.config.identity import Identity, Statement, write_identity
from pipeline.config.loading import config_hash, load_config
from pipeline.config.run import RunConfig
from pipeline.graph.graph import run_nodes
from storage.address import Address
from tests.support.paths import TINY

CONSTANT = ("model.policy.decay=constant", "model.critic.decay=constant")


def stated(config: RunConfig) -> Statement:
    return Statement(0.0, "resumed", sections(config), config_hash(config), {})


def test_the_evaluation_of_what_was_once_the_last_version_is_of_the_runs_graph(tmp_path: Path) -> None:
    """A run of 5 steps that evaluates every second version evaluates its last, too, and may go on to 8."""
    where = (f"runs_dir={tmp_path}", *CONSTANT, "evaluate.every=2")
    short, longer = load_config([TINY], [*where, "steps=5"]), load_config([TINY], [*where, "steps=8"])
    longer.run_dir.mkdir()
    write_identity(longer.run_dir, Identity({}, "", (stated(short), stated(longer))))
    (before,) = earlier_graphs(longer)
    assert Address("evaluate", 5) not in {node.address for node in run_nodes(longer.graph())}
    assert Address("evaluate", 5) in {node.address for node in run_nodes(before)}

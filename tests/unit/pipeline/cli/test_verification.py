"""Proofs of `stageline check RUN` that were added later."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.cli.replay import update_range
from pipeline.cli.verification import CheckResult, RunContent, Verification, check_identity, earlier_graphs
from pipeline.config.identity import Identity, Statement, config_sections, write_identity
from pipeline.config.loading import config_hash, load_config
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import preflight
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.graph.graph import run_nodes
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import provenance_here
from tests.support.configs import arguments, write_config
from tests.support.paths import TINY

CONSTANT = ("model.policy.decay=constant", "model.critic.decay=constant")


def stated(config: RunConfig) -> Statement:
    return Statement(0.0, "resumed", config_sections(config), config_hash(config), {})


def test_the_evaluation_of_what_was_once_the_last_version_is_of_the_runs_graph(tmp_path: Path) -> None:
    """A run of 5 steps that evaluates every second version evaluates its last one too, and may be continued to 8."""
    where = (f"runs_dir={tmp_path}", *CONSTANT, "evaluate.every=2")
    short, longer = load_config([TINY], [*where, "steps=5"]), load_config([TINY], [*where, "steps=8"])
    longer.run_dir.mkdir()
    write_identity(longer.run_dir, Identity({}, "", (stated(short), stated(longer))))
    (before,) = earlier_graphs(longer)
    assert Address("evaluate", 5) not in {node.address for node in run_nodes(longer.graph())}
    assert Address("evaluate", 5) in {node.address for node in run_nodes(before)}


def test_prompts_that_are_not_those_that_were_stated_are_named(tmp_path: Path) -> None:
    """The fields that a reward is given are part of them."""
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    config = load_config([file], changes)
    paths, prompts = RunPaths(config.run_dir), preflight(config).prompts
    paths.root.mkdir(parents=True)
    prompts.save(paths.prompts)
    write_identity(paths.root, Identity({}, prompts.digest(), (stated(config),)))
    evidence = RunContent(config, paths, open_history(config), {}, {}, {})
    assert check_identity(evidence) == ("1 statements", [])
    extras = paths.prompts.with_suffix(".jsonl")
    extras.write_text(extras.read_text().replace("{}", '{"rating": 3}', 1))
    assert check_identity(evidence)[1] == [f"{paths.prompts} or its .jsonl is not what was written"]


def test_a_problem_is_one_line_however_long() -> None:
    """In files nothing folds a line back."""
    fault, out = f"/runs/{'x' * 200}/zarr.json: is not what was written", io.StringIO()
    report = Verification(Counter(), (CheckResult("claim", "1 array", (fault,)),), (), 1)
    Console(file=out, width=80).print(report.render(), crop=False)
    assert f"PROBLEM {fault}" in out.getvalue().splitlines()


def test_updates_that_would_need_dropped_rollouts_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    config = load_config([file], [*changes, "steps=6"])
    store, checkpoints = open_history(config).store, Checkpoints(RunPaths(config.run_dir).checkpoints)
    for node in run_nodes(config.graph()):
        store.commit_only(node.address, provenance_here(seed=0, config_hash=""))
    for role in ("policy", "critic"):
        checkpoints.finish(role, 4, checkpoints.begin(role, 4), {})
    assert update_range(config, "1:6") == range(1, 6)
    store.drop(2)
    for text in ("1:6", "3:6"):
        with pytest.raises(ConfigError, match=r"trained from version 0, and the rollouts before step 2 were dropped"):
            update_range(config, text)
    assert update_range(config, "4:6") == range(4, 6)

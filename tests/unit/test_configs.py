"""Every config that ships is loaded, and goes as far as it goes without a model on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.loading import load_config, load_yaml, to_yaml
from pipeline.config.placement import gang_of
from pipeline.config.preflight import preflight
from pipeline.graph.graph import run_nodes
from tests.support.paths import ROOT

RUNS = sorted((ROOT / "conf/run").glob("*.yaml"))


def test_the_configs_that_the_docs_name_are_there() -> None:
    assert {"demo", "tiny"} <= {path.stem for path in RUNS}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_describes_a_run(path: Path) -> None:
    config = load_config([path])
    assert config.name == path.stem
    assert load_yaml(to_yaml(config)) == config
    nodes = list(run_nodes(config.graph()))
    assert len({node.address for node in nodes}) == len(nodes)
    for node in nodes:
        assert gang_of(config.placement, node.role) in config.placement.gangs


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_takes_changes_from_the_command_line(path: Path) -> None:
    config = load_config([path], ["staleness=0", "ppo.kl.coef=0.25", "model.policy.betas=[0.8, 0.9]"])
    assert (config.staleness, config.ppo.kl.coef) == (0, 0.25)
    assert list(config.model.policy.betas) == [0.8, 0.9]


def test_tiny_passes_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    checked = preflight(load_config([ROOT / "conf/run/tiny.yaml"]))
    assert (len(checked.prompts.train), len(checked.prompts.held_out)) == (24, 8)


@pytest.mark.smollm2
def test_demo_passes_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config([ROOT / "conf/run/demo.yaml"])
    checked = preflight(config)
    assert len(checked.prompts.held_out) == config.prompts.held_out >= 64

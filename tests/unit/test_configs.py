"""Every config that ships is loaded, and goes as far as it goes without a model on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.slurm_jobs import cluster_config
from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config, load_yaml, to_yaml
from pipeline.config.placement import gang_of_role
from pipeline.config.preflight import preflight
from pipeline.errors import ConfigError
from pipeline.graph.graph import run_nodes
from pipeline.launch.submission import run_script
from pipeline.launch.target_cluster import check_target
from stages.models.spec import RANDOM_1B, RANDOM_8B, RANDOM_70B, is_random, read_spec
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
        assert gang_of_role(config.placement, node.role) in config.placement.gangs


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_takes_changes_from_the_command_line(path: Path) -> None:
    config = load_config([path], ["staleness=0", "ppo.kl.coef=0.25", "model.policy.betas=[0.8, 0.9]"])
    assert (config.staleness, config.ppo.kl.coef) == (0, 0.25)
    assert list(config.model.policy.betas) == [0.8, 0.9]


CLUSTERS = ("1xH100-80", "2xH100-80", "8xH100-80", "16x8xH100-80")
REFUSED = {
    ("8xh100_8b", "1xH100-80"): {"placement.gangs.train.workers"},
    ("8xh100_8b", "2xH100-80"): {"placement.gangs.train.workers"},
    ("slurm_70b", "1xH100-80"): {"slurm.gangs", *(f"slurm.gangs.{g}.nodes" for g in ("train", "critic", "generate"))},
    ("slurm_70b", "2xH100-80"): {"slurm.gangs", *(f"slurm.gangs.{g}.nodes" for g in ("train", "critic", "generate"))},
    ("slurm_70b", "8xH100-80"): {"slurm.gangs"},
}
"""Configs that clusters are too small for, with the settings that the refusal names. All others fit."""


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_fits_on_a_cluster_or_the_refusal_names_why(
    path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config([path])
    read = [config.model.path, *(str(args["path"]) for args in config.scoring_models().values())]
    if missing := [one for one in read if not (is_random(one) or (ROOT / one / "config.json").is_file())]:
        pytest.skip(f"no model in {', '.join(missing)}")
    try:
        refused = {problem.key for problem in check_target(config, read_cluster(cluster), cluster).problems}
    except ConfigError as error:
        refused = {one.key for one in error.errors}
    assert refused == REFUSED.get((path.stem, cluster), set())


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_has_a_script_for_slurm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = run_script(cluster_config([str(path)]))
    assert f"#SBATCH --job-name={path.stem}" in script


@pytest.mark.parametrize(
    ("shape", "alike"),
    [("llama-3.2-1b", RANDOM_1B), ("llama-3.1-8b", RANDOM_8B), ("llama-3.1-70b", RANDOM_70B)],
)
def test_shapes_are_those_of_the_random_models_of_their_size(shape: str, alike: str) -> None:
    assert read_spec(str(ROOT / "conf/model" / shape)) == read_spec(alike)


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

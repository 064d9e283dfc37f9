"""Reward models as rewards of a run: what preflight refuses, the memory that they are counted with, and that their
files belong to what the run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.identity import change_problems, config_sections, write_identity
from pipeline.config.loading import load_config
from pipeline.config.memory import host_bytes, planned_run, workers_memory
from pipeline.config.preflight import preflight
from pipeline.config.role_models import role_models
from pipeline.config.run import RunConfig
from pipeline.driver.preparation import check_identity, new_identity
from pipeline.errors import ConfigError
from stages.models.protocol import Role
from stages.models.spec import read_spec
from storage.ledger import Ledger
from tests.support.configs import SCORES_APART, arguments, write_config
from tests.support.families import random_model
from tests.support.reward_models import change_config, export_reward_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    export_reward_model(tmp_path / "model")
    return tmp_path


def load(folder: Path, *changes: str, path: str | None = None, own_gang: bool = True) -> RunConfig:
    """Load a config with VADER as the reward and a reward model among the parts that score evaluations."""
    file, *fixed = arguments(folder)
    part = f"{{kind: model, args: {{path: {path or folder / 'model'}}}}}"
    parts = f"evaluate.reward.parts={{learned: {part}, mood: {{kind: vader, weight: 0}}}}"
    return load_config([file], [*fixed, "evaluate.every=1", parts, *(SCORES_APART if own_gang else ()), *changes])


def refusal_of(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    return str(refused.value)


def test_a_reward_model_in_a_gang_of_its_own_passes(folder: Path) -> None:
    preflight(load(folder))


def test_what_is_no_reward_model_is_refused_by_its_key(folder: Path) -> None:
    said = refusal_of(load(folder, path="random:tiny"))
    assert said.startswith("evaluate.reward.parts.learned.args.path: given 'random:tiny'; ")
    assert "RUN/model, which `stageline reward train` exports" in said


@pytest.mark.parametrize(
    ("reward", "keys"),
    [
        ("{kind: model}", ["args.path"]),
        ("{kind: model, args: {paths: [x]}}", ["args.path"]),
        ("{kind: local_judge}", ["args.path"]),
        ("{parts: {a: {kind: model}}}", ["parts.a.args.path"]),
        ("{kind: ensemble}", ["args.members"]),
        ("{kind: ensemble, args: {members: []}}", ["args.members"]),
        ("{kind: ensemble, args: {members: {a: vader, b: {kind: model}}}}",
         ["args.members.a", "args.members.b.args.path"]),
    ],
)  # fmt: skip
def test_a_model_that_a_reward_does_not_name_is_refused_when_the_config_is_read(
    folder: Path, reward: str, keys: list[str]
) -> None:
    """So whatever reads a config can look up the models of its rewards."""
    with pytest.raises(ConfigError) as refused:
        load_config([arguments(folder)[0]], [*arguments(folder)[1:], f"evaluate.reward={reward}"])
    assert refused.value.keys == [f"evaluate.reward.{key}" for key in keys]


def test_a_gang_that_holds_other_models_is_refused(folder: Path) -> None:
    said = refusal_of(load(folder, own_gang=False))
    assert said.startswith("placement.roles.score: given 'all'; evaluate.reward.parts.learned is a model ")
    assert "critic, generate, policy, reference: a gang of its own" in said


def test_a_context_that_ends_before_a_row_and_its_eos_is_refused(folder: Path) -> None:
    change_config(folder / "model", max_position_embeddings=17)
    preflight(load(folder))
    change_config(folder / "model", max_position_embeddings=16)
    said = refusal_of(load(folder))
    assert said.startswith("evaluate.reward.parts.learned.args.path: given ")
    assert "has 17 tokens, its context is 16" in said


def test_a_smaller_vocabulary_is_refused(folder: Path) -> None:
    random_model("Llama 2", vocab_size=128).save_pretrained(folder / "start")
    path = export_reward_model(folder / "other", source=str(folder / "start"))
    said = refusal_of(load(folder, path=path))
    assert said.startswith("evaluate.reward.parts.learned.args.path: given ")
    assert "its vocabulary has 128 tokens, the policy ('random:tiny') needs 256 or more" in said


def test_every_scoring_worker_is_counted_with_the_model(folder: Path) -> None:
    def predicted(config: RunConfig) -> tuple[dict[str, int], int]:
        spec = read_spec(config.model.path)
        run = planned_run(config, role_models(config, spec), on_gpus=False)
        workers = workers_memory(run)
        (scoring,) = [worker for worker in workers if worker.worker == ("score", 0)]
        return dict(scoring.items), host_bytes(run, workers)

    items, total = predicted(load(folder))
    stored = (folder / "model" / "model.safetensors").stat().st_size
    assert "reading weights" not in items, "a mapping that all processes of the host share"
    assert 0.9 * stored < items["reward models"] < 1.2 * stored, "both are float32"
    (folder / "model" / "config.json").rename(folder / "config.json")
    without, before = predicted(load(folder, "evaluate.reward.parts.learned={kind: vader, args: {path: null}}"))
    assert "reward models" not in without
    assert total - before == items["reward models"] + stored


@pytest.mark.parametrize(("settings", "gpus"), [((), 1), (("placement.gangs.score.device=cpu",), 0)])
def test_scoring_workers_hold_reward_models_on_gpus_unless_told_otherwise(
    folder: Path, settings: tuple[str, ...], gpus: int
) -> None:
    config = load(folder, *settings)
    assert {gang.name: gang.gpus for gang in config.gangs()}["score"] == gpus
    run = planned_run(config, role_models(config, read_spec(config.model.path)), on_gpus=True)
    (scoring,) = [worker for worker in workers_memory(run) if worker.worker == ("score", 0)]
    assert bool(scoring.on_device) == ("reward models" in scoring.device_items) == bool(gpus)
    assert scoring.on_host + scoring.on_device == scoring.total
    sharing = {config.placement.roles["generate"], "score"}
    if gpus:
        load(folder, f"placement.device_sharing=[[{','.join(sharing)}]]")
    else:
        with pytest.raises(ConfigError, match=r"^placement\.device_sharing\.0: given 'score'"):
            load(folder, *settings, f"placement.device_sharing=[[{','.join(sharing)}]]")


def test_other_files_of_a_reward_model_are_another_run(folder: Path) -> None:
    config = load(folder)
    prompts, ledger = preflight(config).prompts, Ledger(f"{folder}/runs/small/ledger")
    config.run_dir.mkdir(parents=True)
    stated = new_identity(config, prompts).identity
    write_identity(config.run_dir, stated)
    assert stated.models["evaluate.reward.parts.learned.args"].keys() == {"config.json", "model.safetensors"}
    assert check_identity(config, prompts, ledger).identity == stated
    export_reward_model(folder / "model", seed=6)
    with pytest.raises(ConfigError) as refused:
        check_identity(config, prompts, ledger)
    assert refused.value.key == "evaluate.reward.parts.learned.args.path"
    assert "its files are not those that the run began with: model.safetensors: " in str(refused.value)


TWO_RANKS = "placement.gangs.score={workers: 2, layout: {tensor: 2}}"


def refused_keys(folder: Path, *changes: str) -> set[str]:
    with pytest.raises(ConfigError) as refused:
        preflight(load(folder, *changes))
    return {error.key for error in refused.value.errors}


def test_a_layout_of_the_gang_that_scores_is_checked_with_its_models(folder: Path) -> None:
    preflight(load(folder, TWO_RANKS))
    settings = "{workers: 3, concurrent_shards: 2, layout: {tensor: 2, distributed_optimizer: true}}"
    keys = {
        f"placement.gangs.score.{name}" for name in ("workers", "concurrent_shards", "layout.distributed_optimizer")
    }
    assert keys <= refused_keys(folder, f"placement.gangs.score={settings}")
    blocks = read_spec(str(folder / "model")).num_layers
    deep = f"placement.gangs.score={{workers: {blocks + 1}, layout: {{pipeline: {blocks + 1}}}}}"
    assert refused_keys(folder, deep) == {"placement.gangs.score.layout.pipeline"}
    rules = "evaluate.reward.parts.learned={kind: vader, args: {path: null}}"
    assert refused_keys(folder, TWO_RANKS, rules) >= {"placement.gangs.score.layout"}
    lonely = "placement.gangs.score={layout: {sequence_parallel: true}}"
    assert refused_keys(folder, lonely) == {"placement.gangs.score.layout.sequence_parallel"}


def test_the_ranks_of_the_gang_that_scores_are_counted_and_stay(folder: Path) -> None:
    one, two = load(folder), load(folder, TWO_RANKS)

    def scorers(config: RunConfig) -> list[int]:
        run = planned_run(config, role_models(config, read_spec(config.model.path)), on_gpus=False)
        return [worker.items["reward models"] for worker in workers_memory(run) if worker.worker[0] == "score"]

    (whole,), parts = scorers(one), scorers(two)
    assert len(parts) == 2
    assert all(0.5 * whole <= part < 0.6 * whole for part in parts), "norms are on both"
    (gang,) = [gang for gang in two.gangs() if gang.name == "score"]
    assert (gang.ranks_of(Role.SCORE), gang.ranks_of(Role.ADVANTAGE)) == (2, 1)
    (problem,) = change_problems(config_sections(two), load(folder, TWO_RANKS, "placement.gangs.score.workers=4"))
    assert problem.key == "placement.gangs.score.workers"

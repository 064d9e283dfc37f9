"""Refusals after a look at the disk (model, prompts, reward, run directory); and that looking leaves nothing behind."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.config.identity import Identity, Statement, write_identity
from pipeline.config.loading import load_config, to_yaml
from pipeline.config.memory import planned_run, workers_memory
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import (
    check_run_directory,
    check_shapes,
    check_trackers,
    device_notes,
    preflight,
    will_be_replaced,
)
from pipeline.config.role_models import role_models
from pipeline.config.run import RunConfig
from pipeline.config.sections import TrackingConfig
from pipeline.errors import ConfigError
from stages.engines.remote.process import ENVIRONMENTS, Environment, environment_problem
from stages.models.config import LayoutConfig
from stages.models.hf_weights import read_weights, write_model
from stages.models.layouts import check_layout
from stages.models.protocol import Role
from stages.models.spec import read_config, read_spec, spec_of, tensor_shapes
from tests.support.configs import arguments, write_config

TRAINED_APART = "placement.roles={generate: all, score: all, reference: train, policy: train, critic: train}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


def load(folder: Path, *overrides: str) -> RunConfig:
    file, *changes = arguments(folder)
    return load_config([file], [*changes, *overrides])


def model_directory(folder: Path, weights: bool = True, **changes: object) -> Path:
    """A directory that looks like a model, as far as preflight looks."""
    directory = folder / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(read_config("random:tiny") | changes))
    if weights:
        shapes = tensor_shapes(read_spec("random:tiny"))
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    return directory


def test_a_tracker_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"wandb": [object()]}
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: installed.get(name, []))
    check_trackers(TrackingConfig(also=["wandb"]))
    with pytest.raises(ConfigError, match="`pip install tensorboard`") as refused:
        check_trackers(TrackingConfig(also=["wandb", "tensorboard"]))
    assert refused.value.key == "tracking.also"


def test_what_was_read_is_handed_on(folder: Path) -> None:
    checked = preflight(load(folder))
    assert (len(checked.prompts.train), len(checked.prompts.held_out)) == (4, 2)
    assert checked.tokenizer.vocab_size == 256


@pytest.mark.parametrize(
    ("change", "key", "parts"),
    [
        ("model.path=nowhere", "model.path", ("nowhere", "config.json", "random:tiny", "make assets")),
        ("model.frozen_blocks=4", "model.frozen_blocks", ("given 4", "at most 3")),
        ("model.critic_blocks=5", "model.critic_blocks", ("given 5", "from 1 to 4")),
        ("prompts.url=gone.jsonl", "prompts.url", ("gone.jsonl",)),
        ("prompts.url=prompts.xml", "prompts.url", (".xml", ".csv", ".jsonl", ".parquet")),
        ("prompts.field=text", "prompts.field", ("'text'", "prompt")),
        ("prompts.max_tokens=5", "prompts.max_tokens", ("given 5", "has 6 tokens", "prompts.too_long=skip")),
        ("prompts.max_tokens=249", "prompts.max_tokens", ("257 tokens", "context is 256", "at most 248")),
        ("sampling.max_new_tokens=256", "sampling.max_new_tokens", ("given 256", "context is 256")),
        ("prompts.held_out=6", "prompts.held_out", ("hold out 6 prompts", "usable prompts: 6", "evaluate.every=0")),
        ("sampling.suppress_token_ids=[256]", "sampling.suppress_token_ids", ("given 256", "0 to 255")),
        ("model.eos_token_ids=[2,256]", "model.eos_token_ids", ("given 256", "0 to 255")),
        ("model.eos_token_ids=[-1]", "model.eos_token_ids", ("given -1", "0 to 255")),
        ("model.lora.rank=33", "model.lora.rank", ("given 33", "self_attn.k_proj is 32 x 64: at most 32", "targets")),
        ("reward.kind=magic", "reward.kind", ("magic", "vader", "module:function")),
        ("reward.args={letters: a}", "reward.args.letters", ("no such argument", "takes characters")),
        ("engine.tensor_parallel=3", "engine.tensor_parallel", ("given 3", "4 query and 2 key/value", "1, 2, 4 ranks")),
        ("engine.pipeline_parallel=5", "engine.pipeline_parallel", ("given 5", "from 1 to 4")),
        ("placement.gangs.all.layout.pipeline=3", "placement.gangs.all.workers", ("= 3",)),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(folder: Path, change: str, key: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, change))
    assert refusal.value.key == key
    for part in parts:
        assert part in str(refusal.value)
    assert not (folder / "runs").exists()


def evaluated(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> list[str]:
    """Overrides for evaluations with these rows as a source of their own."""
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["prompts.held_out=null", f"evaluate.prompts.url={folder}/mine.jsonl", *overrides]


def test_evaluations_may_have_prompts_of_their_own(folder: Path) -> None:
    """All prompts of the training source are then trained on. The number is settled, so that a file that grows changes
    nothing for a resumed run."""
    rows = [{"ask": f"ask {i}"} for i in range(5)]
    config = load(folder, *evaluated(folder, rows, "evaluate.prompts.field=ask", "evaluate.prompts.max=4"))
    table = preflight(config).prompts
    assert (table.train.tolist(), table.held_out.tolist()) == ([*range(6)], [6, 7, 8, 9])
    assert bytes(table.tokens[9, : table.lengths[9]].tolist()) == b"ask 3"
    config = load(folder, *evaluated(folder, rows, "evaluate.prompts.field=ask"))
    assert len(preflight(config).prompts.held_out) == 5
    assert (config.held_out, config.prompts.held_out, config.evaluate.prompts.max) == (5, 0, 5)
    evaluated(folder, [*rows, {"ask": "more"}])
    digest = preflight(config).prompts.digest()
    evaluated(folder, [*rows[1:], rows[0]])
    assert preflight(config).prompts.digest() != digest


@pytest.mark.parametrize(
    ("rows", "changes", "key", "parts"),
    [
        (3, ("evaluate.prompts.url=gone.jsonl",), "evaluate.prompts.url", ("gone.jsonl",)),
        (3, ("evaluate.prompts.field=text",), "evaluate.prompts.field", ("'text'", "mine.jsonl", "prompt")),
        (3, ("evaluate.prompts.format=chat",), "evaluate.prompts.format", ("mine.jsonl", "role")),
        (3, ("prompts.max_tokens=6",), "prompts.max_tokens", ("mine.jsonl", "7 tokens")),
        (3, ("evaluate.shards=2",), "evaluate.prompts.max", ("mine.jsonl", "3 prompts", "2 would work")),
        (1, (), "evaluate.prompts.url", ("mine.jsonl", "2 prompts or more", "the source has 1")),
        (3, ("evaluate.reward.kind=answer",), "evaluate.reward.args", ("'answer'", "prompt 0 of ", "mine.jsonl")),
    ],
)
def test_prompts_that_cannot_be_evaluated_are_refused_by_their_key(
    folder: Path, rows: int, changes: tuple[str, ...], key: str, parts: tuple[str, ...]
) -> None:
    mine = evaluated(folder, [{"prompt": f"asked {i}"} for i in range(rows)], *changes)
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, *mine))
    assert refusal.value.key == key
    for part in parts:
        assert part in str(refusal.value)


def test_a_reward_needs_its_fields_in_the_prompts_that_it_scores_alone(folder: Path) -> None:
    rows = [{"prompt": f"{i}", "answer": i} for i in range(3)]
    preflight(load(folder, *evaluated(folder, rows, "evaluate.reward.kind=answer")))


def test_wrong_files_of_both_sources_are_said_together(folder: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, *evaluated(folder, [], "prompts.url=gone.jsonl")))
    assert [error.key for error in refusal.value.errors] == ["prompts.url", "evaluate.prompts.url"]


def test_a_rank_that_no_linear_can_have_is_refused_by_what_is_adapted(folder: Path) -> None:
    preflight(load(folder, "model.lora.rank=32"))
    preflight(load(folder, "model.lora.rank=64", "model.lora.targets=[fc1]"))
    narrow = own_model(folder, "narrow", intermediate_size=48)
    with pytest.raises(ConfigError, match=r"given 64; the critic's mlp.gate_proj is 48 x 64: at most 48"):
        preflight(load(folder, "model.lora.rank=64", "model.lora.targets=[fc1]", f"model.critic_path={narrow}"))


def give_gpus(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """Let this host say that it has so many GPUs. Most hosts of tests have none."""
    monkeypatch.setattr("pipeline.config.memory._GPU_DRIVERS", (Path("/dev/null"),))
    monkeypatch.setattr("torch.cuda.device_count", lambda: num)


def test_replicas_that_need_more_gpus_than_there_are_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most hosts have no GPU, so this one is told that it has three."""
    give_gpus(monkeypatch, 3)
    preflight(load(folder, "engine.pipeline_parallel=3"))
    with pytest.raises(
        ConfigError, match=r"engine\.tensor_parallel: given 4; .* ranks of a replica need 4 GPUs.* at most 3"
    ):
        preflight(load(folder, "engine.pipeline_parallel=2", "engine.tensor_parallel=2"))


@pytest.mark.parametrize(
    ("change", "key", "need"),
    [
        ("model.tf32=true", "model.tf32", "the host has none: false"),
        ("placement.gangs.all.offload=idle", "placement.gangs.all.offload", "none, or gradients"),
        ("engine.embedded.kernels=triton", "engine.embedded.kernels", "auto, native or torch"),
    ],
)
def test_gpu_settings_need_one(folder: Path, monkeypatch: pytest.MonkeyPatch, change: str, key: str, need: str) -> None:
    give_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=need) as refusal:
        preflight(load(folder, change))
    assert refusal.value.key == key
    give_gpus(monkeypatch, 1)
    preflight(load(folder, change))


def test_gangs_that_need_more_gpus_than_there_are_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most hosts have no GPU, so this one is told that it has two."""
    give_gpus(monkeypatch, 2)
    gangs = "placement.gangs={all: {}, train: {workers: 2, layout: {tensor: 2}}}"
    with pytest.raises(ConfigError, match=r"gangs\.train\.workers: given 2; the gangs need 3 GPUs \(all 1, train 2\)"):
        preflight(load(folder, gangs, TRAINED_APART))
    preflight(load(folder, gangs, TRAINED_APART, "placement.oversubscribe=true"))


def test_more_threads_than_cores_are_noted(folder: Path) -> None:
    config = load(folder, "placement.gangs.all.threads=3")
    (note,) = device_notes(config, 0, 2)
    assert note.startswith("placement.gangs.all.threads=3, but this host has 2 cores")
    assert device_notes(config, 0, 4) == []


def test_on_a_single_gpu_gangs_share_it_and_are_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if the config forbids it, or if they share it one at a time."""
    give_gpus(monkeypatch, 1)
    gangs = "placement.gangs={all: {}, train: {}}"
    roles = "placement.roles={generate: all, score: train, reference: train, policy: train, critic: train}"
    config = load(folder, gangs, roles)
    preflight(config)
    (note,) = device_notes(config, 1, 64)
    assert "the gangs all, train share their host's only GPU" in note
    assert device_notes(load(folder, gangs, roles, "placement.device_sharing=[[all,train]]"), 1, 64) == []
    with pytest.raises(ConfigError, match="the gangs need 2 GPUs"):
        preflight(load(folder, gangs, roles, "placement.oversubscribe=false"))


@pytest.mark.parametrize(
    ("python", "what"),
    [
        ("/nowhere/bin/python", "it cannot be run: No such file"),
        ("/bin/true", "it cannot list its modules: no output"),
        (sys.executable, "its environment lacks no_such_engine"),
    ],
)
def test_an_environment_without_engine(folder: Path, python: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "vllm", Environment("no_such_engine", ("no-such-engine",), ("1",)))
    directory = model_directory(folder, weights=True)
    settings = (f"model.path={directory}", "sampling.max_new_tokens=8", "prompts.max_tokens=8", "engine.kind=vllm")
    with pytest.raises(ConfigError, match=r"engine\.python: .*" + re.escape(what)):
        preflight(load(folder, *settings, f"engine.python={python}"))


def test_vllm_cannot_share_a_cpu(folder: Path) -> None:
    """It can free its memory on GPUs alone."""
    directory = model_directory(folder, weights=True)
    settings = (f"model.path={directory}", "sampling.max_new_tokens=8", "prompts.max_tokens=8", "engine.kind=vllm")
    shared = "placement={gangs: {engines: {}}, roles: {generate: engines}, device_sharing: [[engines, all]]}"
    config = load(folder, *settings, f"engine.python={sys.executable}", shared)
    with pytest.raises(ConfigError, match=r"placement\.device_sharing: "):
        check_shapes(config, on_gpus=False)
    check_shapes(config, on_gpus=True)


def test_an_engine_of_a_version_that_nobody_knows_is_refused() -> None:
    assert environment_problem(sys.executable, Environment("numpy", ("numpy",), (np.__version__,))) is None
    found = environment_problem(sys.executable, Environment("numpy", ("numpy",), ("0.1",)))
    assert found == f"its environment has numpy {np.__version__}; the adapter knows 0.1"
    lacks = environment_problem(sys.executable, Environment("numpy", ("numpy",), ("0.1",), beside=("no_such_ray",)))
    assert lacks == "its environment lacks no_such_ray"
    none = environment_problem(sys.executable, Environment("numpy", ("no-such-package",), ("0.1",)))
    assert "has numpy None" in str(none)


def test_a_cache_too_small_for_a_row_is_refused(folder: Path) -> None:
    """Keys and values of 4 blocks, 2 heads of 4096 in float32 take 256 KB a token, and a
    block has 16."""
    directory = own_model(folder, "own", head_dim=4096)
    settings = (f"model.path={directory}", "sampling.max_new_tokens=8", "prompts.max_tokens=8")
    with pytest.raises(
        ConfigError, match=r"engine\.kv_budget_mb: given 3; .* row of 16 tokens .* take 4, .*max_rows 64"
    ):
        preflight(load(folder, *settings, "engine.kv_budget_mb=3"))


@pytest.mark.parametrize(
    ("layout", "workers", "key", "parts", "settings"),
    [
        ("{tensor: 8}", 8, "tensor", ("given 8", "4 query heads: at most 4"), ()),
        ("{pipeline: 8}", 8, "pipeline", ("given 8", "num_hidden_layers = 4"), ()),
        (
            "{tensor: 2}", 2, "tensor",
            ("given 2", "model.policy.optimizer=muon needs whole matrices", ": 1 (", "model.policy.optimizer=adamw"),
            ("model.policy.optimizer=muon",),
        ),
        (
            "{distributed_optimizer: true}", 2, "distributed_optimizer",
            ("given true", "model.critic.optimizer=adafactor needs", ": false (", "model.critic.optimizer=adamw"),
            ("model.critic.optimizer=adafactor",),
        ),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_cut_it(
    folder: Path, layout: str, workers: int, key: str, parts: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    gangs = f"placement.gangs={{all: {{}}, train: {{workers: {workers}, layout: {layout}}}}}"
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, gangs, TRAINED_APART, *settings))
    assert refusal.value.key == f"placement.gangs.train.layout.{key}"
    for part in parts:
        assert part in str(refusal.value)


def test_a_frozen_trunk_is_on_one_pipeline_stage(folder: Path) -> None:
    gangs = "placement.gangs={all: {}, train: {workers: 2, layout: {pipeline: 2}}}"
    preflight(load(folder, gangs, TRAINED_APART))
    with pytest.raises(ConfigError, match=r"given 2; a shared .* needs placement.gangs.train.layout.pipeline=1") as no:
        preflight(load(folder, gangs, TRAINED_APART, "model.frozen_blocks=2"))
    assert no.value.key == "model.frozen_blocks"
    with pytest.raises(ConfigError) as no:
        preflight(load(folder, "model.frozen_blocks=2", "model.critic_blocks=3"))
    assert no.value.key == "model.critic_blocks", "of the four blocks two are frozen"


def test_a_gang_is_held_to_the_models_that_it_has(folder: Path) -> None:
    """Three blocks of a critic elsewhere do not divide over this pipeline, and need not."""
    roles = "placement.roles={generate: all, score: all, reference: train, policy: train, critic: all}"
    gangs = "placement.gangs={all: {}, train: {workers: 2, layout: {pipeline: 2}}}"
    preflight(load(folder, gangs, roles, "model.critic_blocks=3"))
    spec = read_spec("random:tiny")
    model, layout = load(folder, "model.critic_blocks=3").model, LayoutConfig(pipeline=2)
    check_layout(model, {Role.POLICY: spec, Role.REFERENCE: spec}, layout, 2)
    with pytest.raises(ValueError, match=r"model\.critic_blocks = 3"):
        check_layout(model, {Role.POLICY: spec, Role.CRITIC: spec}, layout, 2)


def own_model(folder: Path, name: str, seed: int | None = None, **changes: object) -> Path:
    """A model of `random:tiny`'s architecture but for some changes, with its weights but for those of other shapes and,
    with a `seed`, those of its last block and (256) its first."""
    directory = folder / name
    directory.mkdir()
    config = read_config("random:tiny") | changes
    (directory / "config.json").write_text(json.dumps(config))
    spec, tiny = spec_of(config), read_weights("random:tiny")
    tensors = {n: torch.ones(s) if n not in tiny else tiny[n] for n, s in tensor_shapes(spec).items()}
    tensors = {
        n: t if t.shape == tensor_shapes(spec)[n] else torch.ones(tensor_shapes(spec)[n]) for n, t in tensors.items()
    }
    for block in [] if seed is None else [3] if seed < 256 else [0, 3]:
        tensors[f"model.layers.{block}.mlp.down_proj.weight"] = torch.full((64, 176), float(seed))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_reference_and_critic_may_have_models_of_their_own(folder: Path) -> None:
    larger = own_model(folder, "larger", hidden_size=128, num_hidden_layers=6, vocab_size=300)
    preflight(load(folder, f"model.critic_path={larger}", "model.critic_blocks=6"))
    other = own_model(folder, "other", seed=256)
    preflight(load(folder, f"model.reference_path={other}", f"model.critic_path={other}"))
    tuned = own_model(folder, "tuned", seed=1)
    changes = (f"model.reference_path={tuned}", f"model.critic_path={tuned}", "model.frozen_blocks=2")
    preflight(load(folder, *changes))


def test_a_rounded_export_has_the_frozen_blocks_of_its_model_if_the_run_rounds_as_well(folder: Path) -> None:
    write_model(folder / "rounded", "random:tiny", {}, "bfloat16")
    changes = (f"model.reference_path={folder}/rounded", "model.frozen_blocks=1")
    preflight(load(folder, *changes, "model.dtype=bfloat16"))
    with pytest.raises(ConfigError, match="differs from the policy"):
        preflight(load(folder, *changes))


@pytest.mark.parametrize("role", ["reference", "critic"])
@pytest.mark.parametrize(
    ("model", "overrides", "parts"),
    [
        ({"vocab_size": 128}, (), ("has 128 tokens", "random:tiny", "256")),
        ({"max_position_embeddings": 15}, (), ("has 16 tokens", "context is 15")),
        ({"hidden_size": 128}, ("model.frozen_blocks=1",), ("frozen_blocks = 1", "architecture differs", "=null")),
        ({"num_hidden_layers": 2}, ("model.frozen_blocks=2",), ("frozen_blocks = 2", "architecture differs")),
        ({"seed": 256}, ("model.frozen_blocks=1",), ("model.layers.0.mlp.down_proj.weight differs",)),
        ({"model_type": "gpt2"}, (), ("gpt2", "llama")),
    ],
    ids=["vocabulary", "context", "width", "depth", "weights", "family"],
)
def test_a_model_that_does_not_go_with_the_policys_is_refused(
    folder: Path, role: str, model: dict[str, Any], overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    known = "model_type" not in model
    directory = own_model(folder, "own", **model) if known else model_directory(folder, **model)
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, f"model.{role}_path={directory}", *overrides))
    assert refusal.value.key == f"model.{role}_path"
    for part in (str(directory), *parts):
        assert part in str(refusal.value)


def test_without_a_critic_its_model_is_not_looked_at(folder: Path) -> None:
    """Nor is its memory counted: weights, gradients and moments of a second model."""
    changes = ("model.critic_path=nowhere", "ppo.advantage=reinforce_pp")
    config = load(folder, *changes)
    preflight(config)
    models = role_models(config, read_spec("random:tiny"))
    assert set(models) == {Role.POLICY, Role.REFERENCE}
    (alone,) = workers_memory(planned_run(config, models, on_gpus=False))
    with_one = load(folder)
    (both,) = workers_memory(planned_run(with_one, role_models(with_one, read_spec("random:tiny")), on_gpus=False))
    assert alone.items["moments"] < 0.6 * both.items["moments"]


def test_a_reference_has_no_more_tokens_than_the_policy(folder: Path) -> None:
    wide = own_model(folder, "wide", vocab_size=300)
    preflight(load(folder, f"model.critic_path={wide}"))
    with pytest.raises(ConfigError, match=r"model\.reference_path: .* has 300 tokens, .* needs 256$"):
        preflight(load(folder, f"model.reference_path={wide}"))


def test_a_critics_tokens_must_be_the_policys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them are welcome (a value model's own padding, say); others are not."""
    directory = own_model(folder, "own")
    of_critic = {"a": 0, "b": 1, "<value>": 2}
    tables = {"random:tiny": {"a": 0, "b": 1}, str(directory): of_critic}
    monkeypatch.setattr("pipeline.config.role_models.read_vocabulary", tables.get)
    preflight(load(folder, f"model.critic_path={directory}"))
    of_critic["b"] = 3
    with pytest.raises(
        ConfigError, match=r"model\.critic_path: .*another.*'b' is token 1 there and 3 here, and 0 more"
    ):
        preflight(load(folder, f"model.critic_path={directory}"))


def test_the_critics_blocks_are_counted_in_its_own_model(folder: Path) -> None:
    deep = own_model(folder, "deep", num_hidden_layers=6)
    preflight(load(folder, f"model.critic_path={deep}", "model.critic_blocks=6"))
    with pytest.raises(ConfigError, match=r"model\.critic_blocks: given 7; must be from 1 to 6"):
        preflight(load(folder, f"model.critic_path={deep}", "model.critic_blocks=7"))


def test_a_critics_gang_must_cut_the_critics_model(folder: Path) -> None:
    odd = own_model(folder, "odd", num_hidden_layers=3)
    gangs = "placement.gangs={all: {}, value: {workers: 2, layout: {pipeline: 2}}}"
    roles = "placement.roles={generate: all, score: all, reference: all, policy: all, critic: value}"
    preflight(load(folder, gangs, roles))
    with pytest.raises(ConfigError, match=r"gangs\.value\.layout\.pipeline: given 2; .*critic's num_hidden_layers = 3"):
        preflight(load(folder, gangs, roles, f"model.critic_path={odd}"))


@pytest.mark.parametrize(
    ("weights", "changes", "parts"),
    [
        (True, {"model_type": "gpt2"}, ("gpt2", "llama")),
        (False, {}, (".safetensors",)),
        (True, {"vocab_size": 300}, ("config.json says [300, 64] for model.embed_tokens.weight", "[256, 64]")),
        (True, {}, ("tokenizer",)),
    ],
)
def test_an_unusable_model_fails(
    folder: Path, weights: bool, changes: dict[str, object], parts: tuple[str, ...]
) -> None:
    directory = model_directory(folder, weights, **changes)
    with pytest.raises(ConfigError) as refusal:
        preflight(load(folder, f"model.path={directory}"))
    assert refusal.value.key == "model.path"
    for part in (str(directory), *parts):
        assert part in str(refusal.value)


def test_a_layout_that_leaves_zeros_is_accepted(folder: Path) -> None:
    """Three ranks for 4 query and 2 key/value heads: the trainer pads, and says nothing."""
    gangs = "placement.gangs={all: {}, train: {workers: 3, layout: {tensor: 3}}}"
    preflight(load(folder, gangs, TRAINED_APART))


def test_a_resumed_run_keeps_its_prompts(folder: Path) -> None:
    """Their source may have changed, or be gone: the stored rollouts belong to the prompts that were."""
    first = preflight(load(folder)).prompts
    saved = folder / "saved.npz"
    first.save(saved)
    (folder / "prompts.jsonl").unlink()
    again = preflight(load(folder), saved).prompts
    np.testing.assert_array_equal(again.tokens, first.tokens)
    np.testing.assert_array_equal(again.train, first.train)


def test_a_changed_copy_of_the_prompts_is_not_used(folder: Path) -> None:
    """The copy can be read but differs from the run's prompts; the source does not."""
    config = load(folder)
    first, saved = preflight(config).prompts, RunPaths(config.run_dir).prompts
    saved.parent.mkdir(parents=True)
    first.save(saved)
    stated = Statement(0.0, "started", {}, "", {})
    write_identity(config.run_dir, Identity({}, first.digest(), (stated,)))
    assert preflight(config, saved).lost_prompts is None
    extras = saved.with_suffix(".jsonl")
    extras.write_text(extras.read_text().replace("{}", '{"rating": 3}', 1))
    again = preflight(config, saved)
    assert again.lost_prompts == f"{saved} or prompts.jsonl is not what was written"
    assert again.prompts.digest() == first.digest()


@pytest.mark.parametrize("below", ["a file", "/proc"])
def test_an_unwritable_run_directory_is_refused(folder: Path, below: str) -> None:
    (folder / "a file").write_text("")
    runs = Path("/proc/runs") if below == "/proc" else folder / "a file" / "runs"
    with pytest.raises(ConfigError, match=r"cannot write to .*Set runs_dir=") as refusal:
        check_run_directory(load(folder, f"runs_dir={runs}"), resume=False)
    assert refusal.value.key == "runs_dir"
    assert str(runs) in str(refusal.value)


@pytest.mark.parametrize("section", ["placement.gangs.all", "cluster"])
def test_an_unwritable_directory_for_weights_is_refused(folder: Path, section: str) -> None:
    config = load(folder, f"{section}.weights_dir=/proc/weights")
    with pytest.raises(ConfigError, match=f"given '/proc/weights'; cannot write to /proc: .* Set {section}") as refusal:
        check_run_directory(config, resume=False)
    assert refusal.value.key == f"{section}.weights_dir"


def test_a_file_for_tracking_that_cannot_be_made_is_refused(folder: Path) -> None:
    (folder / "a file").write_text("")
    with pytest.raises(ConfigError, match=r"tracking\.uri: given .*cannot write to .*a file"):
        preflight(load(folder, f"tracking.uri=sqlite:///{folder}/a file/mlflow.db"))


def test_something_must_be_left_to_sample(folder: Path) -> None:
    """The end is forbidden before min_new_tokens."""
    tokens = [token for token in range(256) if token != 7]
    given = (f"sampling.suppress_token_ids={tokens}", "model.eos_token_ids=[7]")
    preflight(load(folder, *given, "sampling.min_new_tokens=0"))
    with pytest.raises(ConfigError, match=r"sampling\.suppress_token_ids: given 256 token ids; .*no token is left"):
        preflight(load(folder, *given, "sampling.min_new_tokens=1"))


def test_a_run_without_an_update_gives_its_name_away(folder: Path) -> None:
    config = load(folder)
    assert not will_be_replaced(config), "there is none"
    config.run_dir.mkdir(parents=True)
    RunPaths(config.run_dir).config.write_text(to_yaml(config))
    other = load(folder, "seed=1")
    assert will_be_replaced(other)
    check_run_directory(other, resume=False, replaces=True)
    (config.run_dir / "job").mkdir()
    assert not will_be_replaced(other), "Slurm may start it again"


def test_a_directory_with_another_config_is_refused(folder: Path) -> None:
    config = load(folder)
    check_run_directory(config, resume=False)
    assert not config.run_dir.exists()
    config.run_dir.mkdir(parents=True)
    RunPaths(config.run_dir).config.write_text(to_yaml(config))
    check_run_directory(config, resume=False)  # the same config, and nothing has run: it may start
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"without these settings: seed=1\. Choose another name=") as refusal:
            check_run_directory(load(folder, "seed=1"), resume=resume)
        assert refusal.value.key == "name"
    for change, way in (
        ("evaluate.every=3", f"`stageline resume {config.run_dir} evaluate.every=3`"),
        ("steps=11", "steps=11`"),
    ):
        with pytest.raises(ConfigError, match=r"continues it|A new run") as refusal:
            check_run_directory(load(folder, change), resume=False)
        assert way in str(refusal.value)


def test_a_directory_that_holds_this_run_is_for_resume(folder: Path) -> None:
    config = load(folder)
    paths = RunPaths(config.run_dir)
    paths.root.mkdir(parents=True)
    paths.config.write_text(to_yaml(config))
    paths.events.write_text("")
    with pytest.raises(ConfigError, match=f"`stageline resume {paths.root}` continues it"):
        check_run_directory(config, resume=False)
    check_run_directory(config, resume=True)
    constant = ("model.policy.decay=constant", "model.critic.decay=constant")
    paths.config.write_text(to_yaml(load(folder, *constant)))
    with pytest.raises(ConfigError, match=f"`stageline resume {paths.root} steps=99` makes it longer"):
        check_run_directory(load(folder, *constant, "steps=99"), resume=False)


def test_a_run_that_has_lost_its_journal_is_not_begun_again(folder: Path) -> None:
    config = load(folder)
    (config.run_dir / "ledger" / "publish").mkdir(parents=True)
    with pytest.raises(ConfigError, match="`stageline resume "):
        check_run_directory(config, resume=False)


def test_a_run_that_was_moved_to_what_is_no_name_says_so(folder: Path) -> None:
    """The driver says so, before each of its workers would when it is built."""
    config = load(folder)
    config.name = "a run (copy)"
    with pytest.raises(ConfigError, match=r"given 'a run \(copy\)'; must be a name of up to") as refusal:
        check_run_directory(config, resume=True)
    assert refusal.value.key == "name"


@pytest.mark.parametrize("kind", ["nfs4", "lustre"])
def test_one_file_of_mlflow_for_several_hosts_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A server works, and so does a file of the run's own; local workers are of one host."""
    monkeypatch.setattr("pipeline.config.preflight.network_filesystem", lambda path: kind)
    shared = f"tracking.uri=sqlite:///{folder}/runs/mlflow.db"
    with pytest.raises(ConfigError, match=rf"tracking\.uri: given .*\({kind}\).*a server's URI.*runs/small/mlflow\.db"):
        preflight(load(folder, "cluster.kind=attached", shared))
    preflight(load(folder, "cluster.kind=attached", f"tracking.uri=sqlite:///{folder}/runs/small/mlflow.db"))
    preflight(load(folder, "cluster.kind=attached", "tracking.uri=http://n1:5000"))
    preflight(load(folder, shared))


def test_what_other_hosts_have_is_not_asked_of_this_one(folder: Path) -> None:
    """Memory and devices are those of the workers' hosts."""
    changes = ("cluster.host_memory_gb=0.001", "model.tf32=true")
    with pytest.raises(ConfigError):
        preflight(load(folder, *changes))
    preflight(load(folder, *changes, "cluster.kind=attached"))

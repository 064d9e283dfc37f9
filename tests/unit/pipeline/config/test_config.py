"""Configs: one merge order, a round trip, a digest of what matters, and every refusal with its key path."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from pipeline.config.loading import SYNONYMS, UNSUPPORTED, config_hash, load_config, load_yaml, setting_paths, to_yaml
from pipeline.config.preflight import engine_line
from pipeline.config.reward_model import RewardModelConfig
from pipeline.config.rules import run_problems
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from stages.models.protocol import Role

BASE = """
name: base
steps: 4
model: {path: "random:tiny"}
prompts: {url: prompts.jsonl, max_tokens: 8, held_out: 8}
rollout: {rows: 16, shards: 2}
reward: {kind: characters, args: {characters: aeiou}}
placement:
  gangs: {generate: {concurrent_shards: 2}, train: {}}
  roles: {generate: generate, score: train, reference: train, policy: train, critic: train}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def load(base: Path, *overrides: str) -> RunConfig:
    return load_config([base], overrides)


def test_defaults_then_files_in_order_then_overrides(base: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("steps: 5\nstaleness: 2\nppo: {kl: {coef: 0.5}}\n")
    config = load_config([base, second], ["steps=6"])
    assert config.steps == 6  # override over second file over first
    assert config.staleness == 2  # second file over the default
    assert config.ppo.kl.coef == 0.5
    assert config.ppo.kl.estimator == "k1"  # a sibling keeps its default
    assert config.rollout.rows == 16  # first file
    assert config.engine.max_rows == 16  # default
    assert load_config([second, base], []).steps == 4  # the order given decides


def test_models_may_be_named_as_in_the_hub_s_cache(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's, and those of rewards. A resumed run keeps the directory that the name meant."""
    stored = tmp_path / "models--org--small"
    for file, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        (stored / file).parent.mkdir(parents=True)
        (stored / file).write_text(text)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = load(base, "model.path=org/small", "evaluate.reward={kind: model, args: {path: org/small}}")
    there = str(stored / "snapshots/abc")
    assert (config.model.path, config.evaluate.reward.args["path"]) == (there, there)


def test_round_trip(base: Path) -> None:
    config = load(
        base, "model.eos_token_ids=[2, 3]", "evaluate.every=2", "ppo.value_clip=null", "sampling.temperature=0.7"
    )
    again = load_yaml(to_yaml(config))
    assert again == config
    assert to_yaml(again) == to_yaml(config)


def test_an_engines_python_works_in_any_directory(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links stay as they are: by its own path an interpreter knows its environment. A resume reads what was saved."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    vllm = ("engine.kind=vllm", "model.path=x")
    monkeypatch.chdir(tmp_path)
    config = load(base, *vllm, "engine.python=venv/bin/python")
    assert config.engine.python == str(python)
    monkeypatch.chdir(tmp_path / "venv")
    assert load_yaml(to_yaml(config)).engine.python == str(python)
    assert load_yaml(to_yaml(config), ["engine.python=bin/python"]).engine.python == str(python)
    monkeypatch.setenv("PATH", str(python.parent))
    assert load(base, *vllm, "engine.python=python").engine.python == str(python)
    assert load(base, *vllm, "engine.python=nowhere").engine.python == "nowhere"  # which `preflight` cannot run


def test_an_engine_uses_the_environment_of_make(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config's own setting comes first, and the embedded engine has no environment."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / ".engines/vllm/bin/python"
    made.parent.mkdir(parents=True)
    made.symlink_to(sys.executable)
    vllm = ("engine.kind=vllm", "model.path=x")
    assert load(base, *vllm).engine.python == str(made)
    assert engine_line(load(base, *vllm), "cpu").endswith(f"; its Python is {made}")
    assert load(base, *vllm, "engine.python=/usr/bin/other").engine.python == "/usr/bin/other"
    assert load(base).engine.python is None
    made.unlink()
    with pytest.raises(ConfigError, match=r"engine\.python: given null.*make engine-vllm"):
        load(base, *vllm)


def test_the_time_to_start_grows_with_the_models_files(base: Path, tmp_path: Path) -> None:
    """A 70B model of 140 GB on a disk of 100 MB/s takes 1400 s to read. (The files are sparse.)"""
    for size in (100 * 10**9, 40 * 10**9):
        with (tmp_path / f"model-{size}.safetensors").open("wb") as file:
            file.truncate(size)
    assert load(base, "model.path=random:tiny").start_timeout_s == 300
    large = load(base, "model.path=random:tiny", f"model.reference_path={tmp_path}")
    assert large.start_timeout_s == 1700
    assert large.engine_start_s == 1360
    assert load(base, f"model.path={tmp_path}", "cluster.start_timeout_s=60").start_timeout_s == 60


def test_an_engine_has_less_time_to_start_than_its_worker(base: Path) -> None:
    """Otherwise nobody would hear the reason of a slow start."""
    vllm = ("engine.kind=vllm", "model.path=x", "engine.python=x")
    assert load(base, *vllm).engine_start_s == 240
    assert load(base, *vllm, "cluster.start_timeout_s=1000").engine_start_s == 800


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "runs_dir=/elsewhere",
        "tracking.uri=null",
        "cluster.deadline_s=5",
        "export.every=1",
        "checkpoint.every=1",
        "placement.gangs.generate.weights_dir=/dev/shm/elsewhere",
        "placement.oversubscribe=true",
        "placement.device_sharing=[[generate,train]]",
        "placement.gangs.train.offload=gradients",
        "evaluate={every: null, select: {max_kl: 3}}",
    ],
)
def test_the_digest_ignores_what_changes_no_result(base: Path, override: str) -> None:
    assert config_hash(load(base, override)) == config_hash(load(base))


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "staleness=0",
        "ppo.clip=0.1",
        "model.policy.lr=0.1",
        "model.critic.moments_dtype=bfloat16",
        "model.critic.optimizer=muon",
        "reward.args.characters=xyz",
        "placement.gangs.train.threads=2",
    ],
)
def test_the_digest_tells_other_results_apart(base: Path, override: str) -> None:
    assert config_hash(load(base, override)) != config_hash(load(base))


def test_a_run_may_be_prolonged_only_where_no_learning_rate_depends_on_its_end(base: Path) -> None:
    assert config_hash(load(base, "steps=9")) != config_hash(load(base))
    constant = ("model.policy.decay=constant", "model.critic.decay=constant")
    assert config_hash(load(base, "steps=9", *constant)) == config_hash(load(base, *constant))


REFUSED = {
    # engines of other projects
    "engine.kind=vllm model.path=x": "engine.python",
    "engine.python=x": "engine.python",
    "VLLM engine.embedded.speculation.drafter=ngram": "engine.embedded.speculation.drafter",
    "engine.vllm.compile=true": "engine.vllm.compile",
    "VLLM rollout.versions=inflight engine.pipeline_parallel=2": "rollout.versions",
    "engine.kind=vllm engine.python=x": "model.path",
    "VLLM cluster.migrate_rows=true": "cluster.migrate_rows",
    "TRTLLM sampling.temperature=0.7": "sampling.temperature",
    "TRTLLM sampling.min_new_tokens=2": "sampling.min_new_tokens",
    "TRTLLM evaluate.every=2 evaluate.temperature=0.5": "evaluate.temperature",
    "TRTLLM alarms.stop=[mismatch]": "alarms.stop",
    "TRTLLM rollout.versions=inflight": "rollout.versions",
    # a value in the place of a section
    "model=tiny": "model",
    # ranges
    "sampling.min_new_tokens=65": "sampling.min_new_tokens",
    "ppo.dual_clip=inf": "ppo.dual_clip",
    "ppo.value_clip=0": "ppo.value_clip",
    "ppo.critic_warmup_steps=4": "ppo.critic_warmup_steps",
    "model.policy.min_lr=0.1": "model.policy.min_lr",
    "model.critic.min_lr=1e-6 model.critic.decay=constant": "model.critic.min_lr",
    "model.policy.gradients_dtype=bfloat16": "model.policy.gradients_dtype",
    "model.dtype=float16 model.critic.gradients_dtype=bfloat16": "model.critic.gradients_dtype",
    "model.policy.moments_dtype=bfloat16 model.policy.betas=[0.9,0.999]": "model.policy.moments_dtype",
    "model.policy.optimizer=adafactor model.policy.betas=[0.8,0.9]": "model.policy.betas",
    "model.critic.optimizer=adafactor model.critic.eps=1e-8": "model.critic.eps",
    "model.policy.optimizer=adafactor model.policy.moments_dtype=bfloat16": "model.policy.moments_dtype",
    "model.critic.optimizer=muon model.lora.rank=4": "model.critic.optimizer",
    "tracking.register=a/b": "tracking.register",
    "tracking.register=mine tracking.uri=http://host:5000": "tracking.register",
    "predicted_s.nowhere=1.0": "predicted_s",
    "predicted_s.step=0": "predicted_s",
    "tracking.also=[wandb,wandb]": "tracking.also",
    "tracking.also=[wandb] tracking.uri=null": "tracking.also",
    "tracking.also=[wandb] tracking.experiment=a/b": "tracking.experiment",
    "runs_dir=s3://bucket/runs": "runs_dir",
    "cluster.kind=attached cluster.address=a cluster.interface=b": "cluster.address",
    "cluster.arrival_timeout_s=60": "cluster.arrival_timeout_s",
    "cluster.dashboard=foo": "cluster.dashboard",
    "cluster.dashboard=127.0.0.1:70000": "cluster.dashboard",
    "cluster.address=n1": "cluster.address",
    "cluster.kind=attached cluster.address=::1": "cluster.address",
    "placement.gangs={a/b: {}}": "placement.gangs.a/b",
    "prompts.opening_tokens=9": "prompts.opening_tokens",
    # sizes that do not divide
    "model.reuse_forward=[reference]": "model.reuse_forward",
    "model.reuse_forward=[critic]": "model.reuse_forward",
    "model.reuse_forward=[policy] ppo.minibatches=1 rollout.shards=1 ppo.proximal=loglinear": "model.reuse_forward",
    "evaluate={every: 1, shards: 3}": "evaluate.shards",
    "placement.gangs.train.workers=3": "placement.gangs.train.workers",
    "placement.gangs.train={workers: 3, layout: {tensor: 2}}": "placement.gangs.train.workers",
    # rows that move
    "cluster.migrate_rows=true": "cluster.migrate_rows",
    # placement
    "placement.device_sharing=[[generate]]": "placement.device_sharing.0",
    "placement.device_sharing=[[generate,trian]]": "placement.device_sharing.0",
    "placement.device_sharing=[[generate,train],[train,generate]]": "placement.device_sharing.1",
    "placement={device_sharing: [[train, scores]], gangs: {scores: {}}, roles: {score: scores}}": "placement.device_sharing.0",  # noqa: E501
    "placement={gangs: {scores: {device: cpu}}, roles: {score: scores}}": "placement.gangs.scores.device",  # no models
    "placement.gangs.train.device=cpu": "placement.gangs.train.device",
    "placement.roles.judge=train": "placement.roles.judge",
    "placement.gangs.idle={}": "placement.gangs.idle",
    "placement.gangs.train.weights_dir=weights": "placement.gangs.train.weights_dir",
    "placement.gangs.score.weights_dir=/dev/shm/a placement.roles.score=score": "placement.gangs.score.weights_dir",
    "placement.gangs.train.concurrent_shards=2": "placement.gangs.train.concurrent_shards",
    "placement.gangs.train.layout={recompute: selective, recompute_modules: [mlp, layernorm, moe_act]}": "placement.gangs.train.layout.recompute_modules",  # noqa: E501
    "placement.gangs.train.layout.recompute_modules=[mlp]": "placement.gangs.train.layout.recompute_modules",
    "placement.gangs.generate.offload=gradients": "placement.gangs.generate.offload",
    "placement.gangs.generate.offload=idle": "placement.gangs.generate.offload",
    "model.dtype=float16 model.kernels=native": "model.kernels",
    "model.dtype=float16 model.products=onednn": "model.products",
    # numbers that are none, and what would be neither an error nor of use
    "model.policy.betas=[0.9,.nan]": "model.policy.betas",
    "model.lora.alpha=8": "model.lora.alpha",
    "model.lora.targets=[qkv]": "model.lora.targets",
    "model.lora={rank: 8, targets: [q_proj, qkv]}": "model.lora.targets",
    "model.lora={rank: 8, targets: []}": "model.lora.targets",
    "model.lora={rank: 8, targets: [qkv, qkv]}": "model.lora.targets",
    "ppo.kl.target=5 ppo.kl.coef=0": "ppo.kl.target",
    "ppo.dual_clip=1.1": "ppo.dual_clip",
    "ppo.anchor=sampler ppo.correction=mask": "ppo.correction",
    "placement.gangs.generate.layout.tensor=2": "placement.gangs.generate.layout.tensor",
    "placement.gangs.generate.layout={recompute: full}": "placement.gangs.generate.layout.recompute",
    "placement.gangs.train.layout={recompute: selective, recompute_modules: [mlp, mlp]}": "placement.gangs.train.layout.recompute_modules",  # noqa: E501
    "placement.gangs.train.layout.sequence_parallel=true": "placement.gangs.train.layout.sequence_parallel",
    # things that exclude one another
    "evaluate.every=1 prompts.held_out=1": "prompts.held_out",
    "evaluate.prompts.url=x.jsonl": "prompts.held_out",
    "prompts.held_out=0 evaluate.shards=3 evaluate.prompts.url=x.jsonl evaluate.prompts.max=4": "evaluate.shards",
    "prompts.held_out=0 evaluate.prompts.url=x.jsonl evaluate.prompts.max=1": "evaluate.prompts.max",
    "alarms.staleness_steps=9": "alarms.staleness_steps",
    "mismatch.rows=0 alarms.stop=[mismatch]": "alarms.stop",
    "placement.roles.generate=train placement.roles.score=generate placement.gangs.train.workers=2": "placement.roles.generate",  # noqa: E501
    # estimators of advantages, each by itself in GRPO's or RLOO's usual form otherwise
    "ppo.advantage=group ppo.kl.where=loss": "rollout.responses_per_prompt",
    "ppo.advantage=group rollout.responses_per_prompt=4": "ppo.kl.where",
    "ppo.advantage=rloo rollout.responses_per_prompt=4 ppo.gamma=0.9": "ppo.gamma",
    "ppo.advantage=reinforce_pp ppo.whiten_rewards=true": "ppo.whiten_rewards",
    "ppo.advantage=reinforce_pp ppo.truncated=bootstrap": "ppo.truncated",
    "ppo.advantage=reinforce_pp ppo.critic_warmup_steps=1": "ppo.critic_warmup_steps",
    "ppo.advantage=reinforce_pp ppo.skip_equal_groups=true": "ppo.skip_equal_groups",
    "ppo.skip_equal_groups=true": "ppo.skip_equal_groups",
    "ppo.advantage=rloo rollout.responses_per_prompt=2 reward.normalize.mean=true": "reward.normalize.mean",
    "ppo.advantage=group rollout.responses_per_prompt=2 ppo.kl.where=loss reward.normalize.scale=true": "reward.normalize.scale",  # noqa: E501
    "ppo.advantage=rloo rollout.responses_per_prompt=2 alarms.stop=[critic]": "alarms.stop",
    "alarms.stop=[equal_groups]": "alarms.stop",
    # rewards, and which version is the best
    "reward={kind: vader, parts: {a: {kind: vader}}}": "reward.kind",
    "reward={kind: null, parts: [vader]}": "reward.parts",
    "reward.args=[a]": "reward.args",
    "reward={kind: null, parts: {a: {weight: 2}}}": "reward.parts.a.kind",
    "reward.normalize.clip=0": "reward.normalize.clip",
    "reward.kind=reasoning_gym": "reward.kind",
    "prompts.url=reasoning-gym:chain_sum reward.kind=reasoning_gym prompts.held_out=0 evaluate.prompts.url=x.jsonl": "reward.kind",  # noqa: E501
    "evaluate.every=0 evaluate.reward.kind=vader": "evaluate.reward",
    "evaluate.every=2 evaluate.select.max_kl=5 evaluate.temperature=0.5": "evaluate.temperature",
    "evaluate={every: 2, reward: {parts: {a: {kind: vader, weight: 0}}}}": "evaluate.reward.parts",
    # settings that nothing reads, beside the ones above
    "engine.embedded.speculation.max_tokens=3": "engine.embedded.speculation.max_tokens",
    "engine.cuda_graphs=false engine.embedded.kernels=torch": "engine.cuda_graphs",
    "TRTLLM engine.cuda_graphs=false": "engine.cuda_graphs",
    "model.trunk_cache_mb=10": "model.trunk_cache_mb",
    "ppo.kl.horizon=100": "ppo.kl.horizon",
    "ppo.target_kl=0.1 ppo.epochs=1 ppo.minibatches=1": "ppo.target_kl",
    "evaluate.every=0 evaluate.temperature=0.5": "evaluate.temperature",
    "evaluate={every: 0, prompts: {url: x.jsonl}}": "evaluate.prompts.url",
    "evaluate.prompts.max=4": "evaluate.prompts.max",
    "prompts.held_out=0 evaluate.prompts.url=reasoning-gym:chain_sum evaluate.prompts.field=text": "evaluate.prompts.field",  # noqa: E501
    "model.pad_token=x": "model.pad_token",
    "alarms.stop=[staleness]": "alarms.stop",
    "prompts.url=reasoning-gym:chain_sum prompts.field=text": "prompts.field",
    # not overrides at all
    "=1": "=1",
}


ENGINES = {
    "TRTLLM": "engine.kind=tensorrt_llm engine.python=x model.path=x",
    "VLLM": "engine.kind=vllm engine.python=x model.path=x",
}


@pytest.mark.parametrize("changes", REFUSED)
def test_a_bad_config_is_refused_by_its_key(base: Path, monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    """The message is one line for each key, and every key exists."""
    monkeypatch.chdir(base.parent)  # which has no engine's environment
    first, _, rest = changes.partition(" ")
    written = f"{ENGINES[first]} {rest}" if first in ENGINES else changes
    overrides = [written] if "{" in written or written.startswith("=") else written.split(" ")
    with pytest.raises(ConfigError) as refusal:
        load(base, *overrides)
    assert refusal.value.key == REFUSED[changes]
    named = [line.partition(": ")[0] for line in str(refusal.value).splitlines()]
    assert named == [error.key for error in refusal.value.errors]
    assert len(named) == len({*named})
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    assert changes == "=1" or {key.partition(".")[0] for key in named} <= sections


@pytest.mark.parametrize(
    ("change", "suggestion"),
    [
        ("stalenes=1", "staleness"),
        ("run_dir=x", "runs_dir"),  # derived, an attribute of the config
        ("slurm.qos=long", "slurm.sbatch"),
        ("cluster.migrate_row=true", "cluster.migrate_rows?"),
        ("engine.kernels=torch", "engine.embedded.kernels"),  # the same word elsewhere
        ("placement.gangs.train.worker=2", "placement.gangs.train.workers"),
        ("learning_rate=1e-5", "model.policy.lr, model.critic.lr?"),  # another system's
        ("sampling.max_completion_length=9", "sampling.max_new_tokens?"),
        ("kl_coeff=0.1", "ppo.kl.coef?"),  # another system's, misspelt
        ("num_generations=8", "rollout.responses_per_prompt?"),
        ("reward_fn=f", "reward.kind?"),
        ("report_to=wandb", "tracking.uri, tracking.also?"),
        ("sampling.max_tokens=9", "sampling.max_new_tokens?"),  # preferred to prompts.max_tokens
        ("model.critic.learning_rate=1", "model.critic.lr?"),
        ("STEPS=3", "steps?"),
        ("reward.weight=2", "reward.parts.NAME.weight?"),  # below a mapping of names
        ("gradient_checkpointing=true", "placement.gangs.NAME.layout.recompute?"),
        ("rolout={rows: 8, shards: 2}", "rollout?"),  # a section, misspelt
        ("delta=1", "ppo.dual_clip?"),  # another system's, spelt like a section
        ("eval.steps=1", "evaluate.every?"),  # its end alone means another setting
        ("algo.advantage.estimator=gae", "ppo.advantage?"),
        ("reward.model_name_or_path=x", "reward.kind=model with reward.args.path=DIR?"),
        ("mask_truncated_completions=true", "ppo.truncated=mask?"),
        ("peft_config=x", "model.lora.rank, model.lora.alpha, model.lora.targets?"),
    ],
)
def test_an_unknown_key_is_refused_with_one_spelt_alike(base: Path, change: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"no such key.*did you mean {re.escape(suggestion)}") as refusal:
        load(base, change)
    assert refusal.value.key == change.partition("=")[0]


def test_each_key_in_another_systems_section_has_its_own_suggestion(base: Path) -> None:
    """The names are those of verl. They come from a file and from overrides, and may refer to one another."""
    verl = base.with_name("verl.yaml")
    verl.write_text("trainer: {total_epochs: 3, n_gpus_per_node: '${trainer.nnodes}', nnodes: 2, zzzz: 1}")
    rollout = ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.top_p=0.9")
    with pytest.raises(ConfigError) as refusal:
        load_config([base, verl], ["data.train_batch_size=64", "data.max_response_length=32", *rollout])
    asked = r"^(\S+): no such key \(in [^)]*\)[;:] (?:did you mean (.*)\?|(.{12}).*)$"
    assert {key: meant or text for key, meant, text in re.findall(asked, str(refusal.value), re.MULTILINE)} == {
        "trainer.total_epochs": "steps",
        "trainer.n_gpus_per_node": "placement.gangs.NAME.workers",
        "trainer.nnodes": "placement.gangs.NAME.workers, slurm.gangs.NAME.nodes",
        "trainer.zzzz": "docs/coming-",
        "data.train_batch_size": "rollout.rows",
        "data.max_response_length": "sampling.max_new_tokens",
        "actor_rollout_ref.rollout.n": "rollout.responses_per_prompt",
        "actor_rollout_ref.rollout.top_p": "it is left o",
    }


def test_an_unknown_key_like_no_other_is_refused_with_what_its_section_has(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such key.*; ppo has advantage, .*, minibatches"):
        load(base, "ppo.zzzz=1")
    with pytest.raises(ConfigError, match=r"no such key.*; a config has name, .*; docs/coming-from\.md"):
        load(base, "zzzz=1")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sampling.top_p", "top_p"),
        ("top_k", "top_k"),
        ("sampling.topp", "top_p"),
        ("sampling.stop", "stop"),
        ("stop", "stop"),
        ("vf_coef", "vf_coef"),
    ],
)
def test_a_setting_that_is_absent_on_purpose_is_refused_with_the_reason(base: Path, key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(base, f"{key}=1")
    assert refusal.value.key == key
    assert UNSUPPORTED[meant] in str(refusal.value)


def test_another_kind_of_reward_replaces_the_arguments_of_the_one_before(base: Path) -> None:
    """`base` gives one kind with arguments. Arguments of the new kind stay, also before it on the command line."""
    assert load(base, "reward.kind=format").reward.args == {}
    assert load(base, "reward.kind=characters").reward.args == {"characters": "aeiou"}
    both = load(base, "reward.args.pattern=x", "reward.kind=format").reward
    assert (both.kind, both.args) == ("format", {"pattern": "x"})
    parts = load(base, "reward.parts={a: {kind: characters, args: {characters: x}}}").reward
    assert (parts.kind, parts.args, parts.parts["a"].args) == (None, {}, {"characters": "x"})
    other_kind = load(base, "reward.parts={a: {kind: characters, args: {characters: x}}}", "reward.parts.a.kind=format")
    assert other_kind.reward.parts["a"].kind == "format"
    assert other_kind.reward.parts["a"].args == {"characters": "x"}, "overrides of one command belong together"
    for first in ("reward.parts={a: {kind: characters}}", "reward={parts: {a: {kind: vader}}}"):
        for later in ("reward={kind: format}", "reward.kind=format"):
            replaced = load(base, first, later).reward
            assert (replaced.kind, replaced.parts) == ("format", {})


def test_other_systems_names_stand_beside_keys_that_exist() -> None:
    meant = {key.partition("=")[0] for key in SYNONYMS}
    assert meant <= {*setting_paths(RunConfig), *setting_paths(RewardModelConfig)}


REINFORCE = "ppo.advantage=reinforce_pp"


@pytest.mark.parametrize("changes", [
    (REINFORCE,), ("ppo.advantage=rloo", "rollout.responses_per_prompt=2"),
    ("ppo.advantage=group", "rollout.responses_per_prompt=8", "ppo.kl.where=loss", "ppo.kl.estimator=k3"),
    ("ppo.advantage=group_mean", "rollout.responses_per_prompt=8", "ppo.skip_equal_groups=true"),
    ("ppo.advantage=group", "rollout.responses_per_prompt=8", "ppo.kl.coef=0", "ppo.whiten_advantages=true"),
])  # fmt: skip
def test_without_a_critic_nothing_of_one_is_in_the_run(base: Path, changes: tuple[str, ...]) -> None:
    """The config may keep the settings of a critic, so that one key compares an algorithm with `gae`; they are not
    read."""
    own = ("placement.gangs.critic={workers: 2}", "placement.roles.critic=critic", "model.reuse_forward=[critic]")
    config = load(base, *changes, *own, "model.critic_path=nowhere", "ppo.critic_lam=1", "model.policy.decay=constant")
    assert not config.graph().has_critic
    assert {gang.name: Role.CRITIC in gang.roles for gang in config.gangs()} == {"generate": False, "train": False}
    assert load_yaml(to_yaml(config)) == config
    assert config_hash(load_yaml(to_yaml(config), ["steps=9"])) == config_hash(config), "no rate depends on the steps"
    assert config_hash(load(base, *changes)) != config_hash(load(base)), "it decides what is computed"


def test_without_a_critic_it_need_not_be_placed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE.replace(", critic: train", ""))
    assert {role for gang in load(path, REINFORCE).gangs() for role in gang.roles} == set(Role) - {Role.CRITIC}
    with pytest.raises(ConfigError, match=r"placement\.roles\.critic: .*placed nowhere"):
        load(path)


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ADVANTAGE])
def test_a_role_placed_nowhere_is_refused(tmp_path: Path, role: Role) -> None:
    path = tmp_path / "c.yaml"
    gangs = ", ".join(f"{r}: all" for r in Role if r is not role)
    path.write_text(BASE.split("placement:")[0] + f"placement: {{gangs: {{all: {{}}}}, roles: {{{gangs}}}}}\n")
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert refusal.value.key == f"placement.roles.{role}"


def test_advantage_is_where_score_is_unless_it_is_placed(base: Path) -> None:
    gangs = {gang.name: gang.roles for gang in load(base).gangs()}
    assert Role.ADVANTAGE in gangs["train"]
    placed = load(base, "placement.gangs.collect={}", "placement.roles.advantage=collect")
    gangs = {gang.name: gang.roles for gang in placed.gangs()}
    assert gangs["collect"] == {Role.ADVANTAGE}
    assert Role.ADVANTAGE not in gangs["train"]


def test_evaluations_are_scored_by_their_own_reward_or_by_the_trainings(base: Path) -> None:
    config = load(base)
    assert config.held_out_reward == ("reward", config.reward)
    config = load(base, "evaluate.every=2", "evaluate.reward.kind=vader")
    assert config.held_out_reward == ("evaluate.reward", config.evaluate.reward)


ONE_STEP, IN_LOSS = ("ppo.epochs=1", "ppo.minibatches=1"), "ppo.kl.where=loss"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "recompute"),  # as shipped: several optimizer steps from stale rows
        (("staleness=0",), "recompute"),  # pi moves away from pi_prox within the update
        ((*ONE_STEP,), "recompute"),  # the penalty in the rewards is pi_prox's
        ((*ONE_STEP, "staleness=0"), "recompute"),
        ((*ONE_STEP, IN_LOSS), "loglinear"),  # nothing but the loss reads pi_prox, which is pi there
        ((*ONE_STEP, IN_LOSS, "engine.dtype=bfloat16"), "loglinear"),
        ((*ONE_STEP, IN_LOSS, "ppo.kl.target=1"), "recompute"),  # the controller reads it
        ((*ONE_STEP, IN_LOSS, "ppo.kl.target=1", "staleness=0"), "loglinear"),
        ((*ONE_STEP, IN_LOSS, "ppo.kl.target=1", "staleness=0", "model.dtype=bfloat16"), "recompute"),
        ((*ONE_STEP, IN_LOSS, "ppo.kl.target=1", "staleness=0", "engine.dtype=bfloat16"), "recompute"),
        ((*ONE_STEP, "ppo.kl.coef=0"), "loglinear"),
        (("ppo.epochs=2", "ppo.minibatches=1", IN_LOSS), "recompute"),
        (("ppo.anchor=sampler",), "recompute"),
        (("ppo.anchor=sampler", IN_LOSS), "sampler"),
        ((*ONE_STEP, IN_LOSS, "ppo.proximal=recompute"), "recompute"),  # who asks for it gets it
        (("ppo.proximal=loglinear",), "loglinear"),
    ],
    ids=" ".join,
)
def test_logprob_nodes_are_left_out_where_they_add_nothing(base: Path, changes: tuple[str, ...], expected: str) -> None:
    """The resolved config says so: the run's directory, its workers and its resumption have no `auto`."""
    config = load(base, *changes)
    assert config.ppo.proximal == expected
    assert f"proximal: {expected}" in to_yaml(config)
    assert config.graph().recompute_logprobs == (expected == "recompute")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), [6]),
        (("export.every=2",), [2, 4, 6]),
        (("export.every=4",), [4, 6]),
        (("export.every=6",), [6]),
        (("export.every=9",), [6]),
        (("storage.keep.rollouts=1", "evaluate.every=null"), [6]),
        (("storage.keep.rollouts=1", "evaluate.every=0"), [6]),
        (("storage.keep.rollouts=1", "evaluate.every=4"), [4, 6]),
        (("storage.keep.rollouts=1", "evaluate.every=3", "export.every=4"), [3, 4, 6]),
        (("evaluate.every=3",), [6]),
    ],
)
def test_exported_versions(base: Path, changes: tuple[str, ...], expected: list[int]) -> None:
    """The last version, every n-th, and the evaluated ones if rollouts are deleted. Memory is planned for exports
    during training exactly if there are some."""
    config = load(base, "steps=6", *changes)
    assert [version for version in range(7) if config.exports(version)] == expected
    assert config.exports_in_training == (len(expected) > 1)


def test_a_saved_config_with_settings_of_another_version_is_refused(base: Path) -> None:
    text = to_yaml(load(base)).replace("  critic:\n", "  value:\n")
    with pytest.raises(
        ConfigError,
        match=r"^model\.value\.optimizer: no such key \(in the saved config\); did you mean model\.policy\.",
    ):
        load_yaml(text)


def test_every_problem_is_found(base: Path) -> None:
    """Checks of one section run whatever is the matter with another. For those across sections, what is wrong is left
    out: minibatches that do not divide the rows are found, although the shards are wrong."""
    config = load(base)
    assert list(run_problems(config)) == []
    config.rollout.shards, config.rollout.responses_per_prompt = 0, 3
    config.model.policy.lr = float("nan")
    config.placement.gangs["train"].layout.tensor = 0
    config.ppo.minibatches = 5
    found = {problem.key: problem.need for problem in run_problems(config)}
    assert found == {
        "model.policy.lr": "must be finite, and 0 or more",
        "rollout.shards": "must be 1 or more",
        "placement.gangs.train.layout.tensor": "must be 1 or more",
        "ppo.minibatches": "must divide rollout.rows = 16: one of 1, 2, 4, 8, 16",
    }
    config = load(base)
    config.ppo.minibatches = 5
    assert [problem.key for problem in run_problems(config)] == ["ppo.minibatches"]


def test_files_that_are_no_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_config([tmp_path / "nowhere.yaml"])
    listed = tmp_path / "list.yaml"
    listed.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="mapping of keys to values"):
        load_config([listed])
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [\n")
    with pytest.raises(ConfigError, match="not readable as YAML") as refusal:
        load_config([broken])
    assert refusal.value.key == str(broken)
    with pytest.raises(ConfigError, match="key=value"):
        load_config([], ["staleness"])


def test_two_loads_share_nothing(base: Path) -> None:
    one, two = load(base), load(base)
    one.placement.gangs["train"].workers = 7
    assert two.placement.gangs["train"].workers == 1

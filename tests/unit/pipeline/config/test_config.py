"""Configs: one merge order, a round trip, a digest of what matters, and every refusal with its key path."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.config.loading import config_hash, flatten, load_config, load_yaml, to_yaml
from pipeline.config.preflight import engine_line
from pipeline.config.run import RunConfig, run_problems
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


def test_round_trip(base: Path) -> None:
    config = load(
        base, "model.eos_token_ids=[2, 3]", "evaluate.every=2", "ppo.value_clip=null", "sampling.temperature=0.7"
    )
    again = load_yaml(to_yaml(config))
    assert again == config
    assert to_yaml(again) == to_yaml(config)


def test_an_engines_python_works_in_any_working_directory(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_engine_runs_in_the_environment_that_make_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(ConfigError, match=r"engine\.python: given None.*make engine-vllm"):
        load(base, *vllm)


def test_an_engine_has_less_time_to_start_than_its_worker(base: Path) -> None:
    """Otherwise nobody would hear the reason of a slow start."""
    vllm = ("engine.kind=vllm", "model.path=x", "engine.python=x")
    assert load(base, *vllm).engine_start_s == 240
    assert load(base, *vllm, "cluster.start_timeout_s=1000").engine_start_s == 800
    assert load(base, *vllm, "engine.start_s=299").engine_start_s == 299


def test_what_follows_from_a_config(base: Path) -> None:
    config = load(base, "evaluate.every=2", "evaluate.shards=4", "staleness=3")
    assert config.seq == 8 + 64
    assert (config.rows_per_shard, config.eval_rows_per_shard) == (8, 2)
    assert config.graph().staleness == 3
    assert {gang.name: gang.ordered for gang in config.gangs()} == {"generate": False, "train": True}
    assert config.layouts().evaluate is not None


def test_flatten_gives_key_paths(base: Path) -> None:
    flat = flatten(load(base))
    assert flat["ppo.kl.coef"] == "0.05"
    assert flat["placement.gangs.generate.concurrent_shards"] == "2"
    assert flat["evaluate.temperature"] == "None"


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
        "placement.share_devices=true",
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
    "engine.kind=vllm model.path=x": ("engine.python", "given None", "make engine-vllm"),
    "engine.kind=vllm model.path=x engine.python=''": ("engine.python", "given ''", "make engine-vllm"),
    "engine.python=x": ("engine.python", "given 'x'", "null, or engine.kind=vllm"),
    "engine.kind=vllm engine.python=x model.path=x engine.start_s=300": (
        "engine.start_s",
        "given 300.0",
        "below cluster.start_timeout_s = 300",
        "or null",
    ),
    "engine.kind=vllm engine.python=x model.path=x engine.embedded.speculation.drafter=ngram": (
        "engine.embedded.speculation.drafter",
        "given 'ngram'",
        "only engine.kind=embedded has it",
        "leave it at none",
    ),
    "engine.kind=vllm engine.python=x model.path=x engine.tensorrt_llm.bucket_mb=7": (
        "engine.tensorrt_llm.bucket_mb",
        "given 7",
        "leave it at 1024 with engine.kind=vllm",
    ),
    "engine.vllm.compile=true": ("engine.vllm.compile", "given True", "only engine.kind=vllm has it"),
    "engine.kind=vllm engine.python=x model.path=x engine.update=inflight engine.pipeline_parallel=2": (
        "engine.update",
        "must be drain (or engine.kind=embedded)",
    ),
    "engine.kind=vllm engine.python=x": ("model.path", "given 'random:tiny'", "needs a Hugging Face directory"),
    "engine.kind=vllm engine.python=x model.path=x cluster.migrate_rows_below=4": (
        "cluster.migrate_rows_below",
        "must be 0",
    ),
    "engine.kind=tensorrt_llm model.path=x": ("engine.python", "given None", "make engine-trtllm"),
    "engine.kind=tensorrt_llm engine.python=x model.path=x sampling.temperature=0.7": (
        "sampling.temperature",
        "given 0.7",
        "must be 1 (or engine.kind=embedded or vllm)",
    ),
    "engine.kind=tensorrt_llm engine.python=x model.path=x sampling.min_new_tokens=2": (
        "sampling.min_new_tokens",
        "given 2",
        "must be 0",
    ),
    "engine.kind=tensorrt_llm engine.python=x model.path=x evaluate.every=2 evaluate.temperature=0.5": (
        "evaluate.temperature",
        "given 0.5",
        "must be 0, 1 or null",
    ),
    "engine.kind=tensorrt_llm engine.python=x model.path=x mismatch.stop=true": (
        "mismatch.stop",
        "cannot score given tokens",
        "must be false, or staleness=0",
    ),
    "engine.kind=tensorrt_llm engine.python=x model.path=x engine.update=inflight rollout.versions=latest": (
        "engine.update",
        "must be drain (or engine.kind=embedded or vllm)",
    ),
    "engine.kind=tensorrt_llm engine.python=x": ("model.path", "given 'random:tiny'", "needs a Hugging Face directory"),
    "engine.tensorrt_llm.speculation=ngram": ("engine.tensorrt_llm.speculation", "no such key"),
    "engine.kind=tensorrt": ("engine.kind", "tensorrt", "tensorrt_llm"),
    # unknown keys, with the whole path and what is spelt alike
    "stalenes=1": ("stalenes", "no such key", "did you mean", "staleness"),
    "engine.speculation.drafter=ngram": ("engine.speculation", "did you mean engine.embedded.speculation?"),
    "engine.kernels=torch": ("engine.kernels", "did you mean engine.embedded.kernels?"),
    "engine.pipeline_groups=2": ("engine.pipeline_groups", "did you mean engine.embedded.pipeline_groups?"),
    "placement.gangs.train.roles=x": ("placement.gangs.train.roles", "no such key", "placement.gangs.train.workers"),
    "ppo.kl.coeff=1": ("ppo.kl.coeff", "no such key", "ppo.kl.coef"),
    "placement.gangs.train.worker=2": ("placement.gangs.train.worker", "did you mean placement.gangs.train.workers?"),
    "ppo.center_scores=true": ("ppo.center_scores", "did you mean reward.normalize.mean?"),
    # wrong types
    "steps=many": ("steps", "many", "whole number"),
    "ppo.clip=[1]": ("ppo.clip",),
    "ppo.anchor=past": ("ppo.anchor", "past", "proximal", "sampler"),
    "model=tiny": ("model", "tiny", "path"),
    # ranges
    "checkpoint.every=4 checkpoint.keep_every=6": ("checkpoint.keep_every", "6", "multiple of checkpoint.every = 4"),
    "sampling.temperature=0": ("sampling.temperature", "above 0"),
    "sampling.min_new_tokens=65": ("sampling.min_new_tokens", "65", "64"),
    "ppo.dual_clip=1": ("ppo.dual_clip", "1.0", "1.2 (1 + ppo.clip) or more (3 is usual)", "null"),
    "ppo.dual_clip=inf": ("ppo.dual_clip", "inf", "null"),
    "ppo.value_clip=0": ("ppo.value_clip", "above 0", "null"),
    "ppo.critic_warmup_steps=4": ("ppo.critic_warmup_steps", "4", "below steps = 4"),
    "model.policy.min_lr=0.1": ("model.policy.min_lr", "0.1", "from 0 to model.policy.lr = 1e-05"),
    "model.critic.min_lr=1e-6 model.critic.decay=constant": ("model.critic.min_lr", "1e-06", "linear or cosine"),
    "model.policy.decay=exponential": ("model.policy.decay", "exponential", "cosine"),
    "tracking.register=a/b": ("tracking.register", "a/b", "without / and :", "null"),
    "tracking.register=mine tracking.uri=http://host:5000": ("tracking.register", "mine", "sqlite:///"),
    "tracking.uri=mlruns": ("tracking.uri", "mlruns", "sqlite:///", "http://", "null"),
    "engine.embedded.pipeline_groups=2": (
        "engine.embedded.pipeline_groups",
        "2",
        "from 1 to 1",
        "engine.pipeline_parallel",
    ),
    "engine.embedded.pipeline_groups=17 engine.pipeline_parallel=2": (
        "engine.embedded.pipeline_groups",
        "17",
        "from 1 to 16",
        "max_rows",
    ),
    "name=-rf": ("name", "'-rf'", "begins with none of . and -"),
    "runs_dir=s3://bucket/runs": ("runs_dir", "'s3://bucket/runs'", "URLs are not supported", "mounted"),
    "cluster.kind=attached cluster.host=a cluster.interface=b": ("cluster.host", "'a'", "cluster.interface=b"),
    "cluster.dashboard=foo": ("cluster.dashboard", "'foo'", "must be HOST:PORT, as in 127.0.0.1:8787"),
    "cluster.dashboard=127.0.0.1:70000": ("cluster.dashboard", "'127.0.0.1:70000'", "a port from 0 (any) to 65535"),
    "cluster.kind=remote": ("cluster.kind", "remote", "attached"),
    "cluster.interface=eth0": ("cluster.interface", "'eth0'", "needs cluster.kind=attached"),
    "cluster.host=n1": ("cluster.host", "'n1'", "needs cluster.kind=attached"),
    "cluster.port=8786": ("cluster.port", "8786", "needs cluster.kind=attached"),
    "cluster.scheduler_file=f": ("cluster.scheduler_file", "'f'", "needs cluster.kind=attached"),
    "placement.gangs={a/b: {}}": ("placement.gangs.a/b", "letters, digits and _-"),
    "prompts.opening_tokens=9": ("prompts.opening_tokens", "9", "8"),
    # sizes that do not divide
    "rollout.shards=3": ("rollout.shards", "3", "rollout.rows = 16", "1, 2, 4, 8, 16"),
    "rollout.responses_per_prompt=3": ("rollout.responses_per_prompt", "3", "= 8", "1, 2, 4, 8"),
    "model.critic.reuse_forward=true": ("model.critic.reuse_forward", "needs ppo.minibatches=1 (given 2)"),
    "model.policy.reuse_forward=true ppo.minibatches=1 rollout.shards=1 ppo.proximal=loglinear": (
        "model.policy.reuse_forward",
        "needs ppo.proximal=recompute (given loglinear)",
    ),
    "ppo.minibatches=5": ("ppo.minibatches", "5", "rollout.rows = 16", "1, 2, 4, 8, 16"),
    "evaluate={every: 1, shards: 3}": ("evaluate.shards", "3", "prompts.held_out = 8", "1, 2, 4, 8"),
    "placement.gangs.train.workers=3": ("placement.gangs.train.workers", "3", "rows of a shard (8)"),
    "placement.gangs.train={workers: 3, layout: {tensor: 2}}": ("placement.gangs.train.workers", "multiple", "= 2"),
    # rows that move
    "cluster.migrate_rows_below=2": ("cluster.migrate_rows_below", "2", "0 (rows stay", "3 or more"),
    "cluster.migrate_rows_below=8": (
        "cluster.migrate_rows_below",
        "8",
        "workers of 2 or more (given 1)",
        "set it to 0",
    ),
    # placement
    "placement.device_sharing=[[generate]]": ("placement.device_sharing.0", "two or more gangs"),
    "placement.device_sharing=[[generate,trian]]": (
        "placement.device_sharing.0",
        "'trian'",
        "no such gang",
        "generate, train",
    ),
    "placement.device_sharing=[[generate,train],[train,generate]]": ("placement.device_sharing.1", "is named twice"),
    "placement={device_sharing: [[train, scores]], gangs: {scores: {}}, roles: {score: scores}}": (
        "placement.device_sharing.0",
        "'scores'",
        "no device",
    ),
    "placement.roles.policy=tran": ("placement.roles.policy", "tran", "generate, train"),
    "placement.roles.judge=train": ("placement.roles.judge", "no such role", "reference"),
    "placement.roles.value=train": (
        "placement.roles.value",
        "no such role",
        "generate, score, reference, policy, critic",
    ),
    "model.value={lr: 1}": ("model.value", "no such key", "model.critic"),
    "placement.gangs.idle={}": ("placement.gangs.idle", "no role is placed on it"),
    "placement.gangs.train.weights_dir=weights": ("placement.gangs.train.weights_dir", "'weights'", "an absolute path"),
    "placement.gangs.score.weights_dir=/dev/shm/a placement.roles.score=score": (
        "placement.gangs.score.weights_dir",
        "/dev/shm/a",
        "read or publish weights (generate, policy): leave it null",
    ),
    "placement.gangs.train.concurrent_shards=2": ("placement.gangs.train.concurrent_shards", "2", "only a pool"),
    "placement.gangs.train.layout={recompute: selective, recompute_modules: [mlp, layernorm, moe_act]}": (
        "placement.gangs.train.layout.recompute_modules",
        "layernorm, moe_act cannot be recomputed alone",
        "core_attn, mlp",
    ),
    "placement.gangs.train.layout.recompute_modules=[mlp]": (
        "placement.gangs.train.layout.recompute_modules",
        "needs placement.gangs.train.layout.recompute=selective (given none)",
    ),
    "placement.gangs.generate.offload=gradients": (
        "placement.gangs.generate.offload",
        "gradients",
        "trains no model: none",
    ),
    "placement.gangs.generate.offload=idle": (
        "placement.gangs.generate.offload",
        "two or more of policy, critic, reference",
    ),
    "placement.gangs.train.offload=all": ("placement.gangs.train.offload", "'all'", "none, gradients, idle"),
    "model.dtype=float8": ("model.dtype", "'float8'", "float16"),
    "model.dtype=float16 model.kernels=native": ("model.kernels", "native", "has no float16: auto, torch or portable"),
    "model.dtype=float16 model.products=onednn": ("model.products", "onednn", "auto for model.dtype float16"),
    "model.loss_scale.initial=256": (
        "model.loss_scale.initial",
        "given 256.0; scales the loss under model.dtype=float16 alone (given float32): leave it at 65536",
    ),
    "model.loss_scale.minimum=.inf model.dtype=float16": ("model.loss_scale.minimum", "inf", "finite"),
    # numbers that are none, and what would be neither an error nor of use
    "model.policy.betas=[0.9,.nan]": ("model.policy.betas", "nan", "must be two numbers"),
    "model.lora.alpha=8": ("model.lora.alpha", "8.0", "give model.lora.rank (16, say), or leave it at 32.0"),
    "model.lora.targets=[qkv]": ("model.lora.targets", "['qkv']", "give model.lora.rank"),
    "ppo.kl.target=5 ppo.kl.coef=0": ("ppo.kl.target", "5.0", "ppo.kl.coef above 0, or null"),
    "ppo.dual_clip=1.1": ("ppo.dual_clip", "1.1", "1.2 (1 + ppo.clip) or more (3 is usual), or null"),
    "ppo.anchor=sampler ppo.correction=mask": ("ppo.correction", "ppo.anchor=sampler", "ppo.correction=none"),
    "placement.gangs.generate.layout.tensor=2": (
        "placement.gangs.generate.layout.tensor",
        "given 2; that gang has none of critic, policy, reference",
        "leave it at 1 (engine.tensor_parallel",
    ),
    "placement.gangs.generate.layout={recompute: full}": ("placement.gangs.generate.layout.recompute", "'full'"),
    "placement.gangs.train.layout={recompute: selective, recompute_modules: [mlp, mlp]}": (
        "placement.gangs.train.layout.recompute_modules",
        "['mlp', 'mlp']",
        "each module once",
    ),
    "model.dtype=float16 model.loss_scale.initial=0.5": (
        "model.loss_scale.initial",
        "0.5",
        "no less than model.loss_scale.minimum = 1",
    ),
    "placement.gangs.train.layout.sequence_parallel=true": (
        "placement.gangs.train.layout.sequence_parallel",
        "layout.tensor of 2",
    ),
    # things that exclude one another
    "evaluate.every=1 prompts.held_out=1": ("prompts.held_out", "1", "2 or more"),
    "engine.update=inflight": (
        "engine.update",
        "'inflight'",
        "rollout.versions=exact",
        "rollout.versions=latest, or drain",
    ),
    "rollout.versions=latest alarms.staleness_steps=9 staleness=0": (
        "alarms.staleness_steps",
        "staleness of 1 or more",
    ),
    "alarms.staleness_steps=9": ("alarms.staleness_steps", "needs rollout.versions=latest"),
    "mismatch.rows=0 mismatch.stop=true": ("mismatch.stop", "True", "mismatch.rows=0"),
    "ppo.proximal=sampler ppo.correction=mask": ("ppo.correction", "mask", "ppo.correction=none"),
    "placement.roles.generate=train placement.roles.score=generate placement.gangs.train.workers=2": (
        "placement.roles.generate",
        "train",
        "gang of its own",
    ),
    # estimators of advantages, each by itself in GRPO's or RLOO's usual form otherwise
    "ppo.advantage=grpo": ("ppo.advantage", "grpo"),
    "ppo.advantage=group ppo.kl.where=loss": (
        "rollout.responses_per_prompt",
        "given 1",
        "ppo.advantage=group compares the responses to a prompt: 2 or more",
        "ppo.advantage=reinforce_pp",
    ),
    "ppo.advantage=rloo": ("rollout.responses_per_prompt", "given 1", "ppo.advantage=rloo", "2 or more"),
    "ppo.advantage=group rollout.responses_per_prompt=4": (
        "ppo.kl.where",
        "given 'reward'",
        "ppo.kl.where=loss (as GRPO has it), ppo.group_scale=none or ppo.kl.coef=0",
    ),
    "ppo.advantage=rloo rollout.responses_per_prompt=4 ppo.gamma=0.9": ("ppo.gamma", "0.9", "as one: 1"),
    "ppo.advantage=reinforce_pp ppo.whiten_rewards=true": ("ppo.whiten_rewards", "grows with the length: false"),
    "ppo.advantage=reinforce_pp ppo.truncated=bootstrap": ("ppo.truncated", "no critic", "terminate"),
    "ppo.advantage=reinforce_pp ppo.critic_warmup_steps=1": ("ppo.critic_warmup_steps", "trains no critic: 0"),
    "ppo.advantage=reinforce_pp ppo.skip_equal_groups=true": ("ppo.skip_equal_groups", "ppo.advantage=group or rloo"),
    "ppo.skip_equal_groups=true": ("ppo.skip_equal_groups", "ppo.advantage=gae compares no groups: false"),
    "ppo.advantage=reinforce_pp placement.roles.critic=nobody": ("placement.roles.critic", "no such gang"),
    # rewards, and which version is the best
    "reward.kind=null": ("reward.args", "characters", "without reward.kind", "reward.parts.NAME.args"),
    "reward={parts: {a: {kind: vader}}}": ("reward.kind", "short form of a single part"),
    "reward={kind: null, parts: [vader]}": ("reward.parts", "given ['vader']", "a mapping of names to settings"),
    "reward.args=[a]": ("reward.args", "given ['a']", "a mapping of names to settings"),
    "reward={kind: null, parts: {a: {weight: 2}}}": ("reward.parts.a.kind", "has no value"),
    "reward.normalize.clip=0": ("reward.normalize.clip", "above 0", "null"),
    "reward.kind=reasoning_gym": ("reward.kind", "needs prompts.url=reasoning-gym:TASK", "prompts.jsonl"),
    "evaluate.every=0 evaluate.reward.kind=vader": ("evaluate.reward", "nothing is evaluated"),
    "evaluate.every=0 evaluate.select.max_kl=5": ("evaluate.select.max_kl", "nothing is evaluated"),
    "evaluate.every=2 evaluate.select.max_kl=5 evaluate.temperature=0.5": (
        "evaluate.temperature",
        "sampling.temperature (1)",
        "evaluate.select.max_kl",
    ),
    "evaluate={every: 2, reward: {parts: {a: {kind: vader, weight: 0}}}}": (
        "evaluate.reward.parts",
        "every weight is 0",
    ),
    "placement.roles.advantage=nowhere": ("placement.roles.advantage", "no such gang"),
    # not overrides at all
    "=1": ("=1", "key=value"),
}


@pytest.mark.parametrize("changes", REFUSED)
def test_what_cannot_work_is_refused_by_its_key(base: Path, monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    monkeypatch.chdir(base.parent)  # where no engine's environment is
    key, *parts = REFUSED[changes]
    overrides = [changes] if "{" in changes or "[" in changes or changes.startswith("=") else changes.split(" ")
    with pytest.raises(ConfigError) as refusal:
        load(base, *overrides)
    assert refusal.value.key == key
    message = str(refusal.value)
    assert message.startswith(f"{key}: ")
    for part in parts:
        assert part in message
    keys = [line.partition(": ")[0] for line in message.splitlines()]
    assert len(keys) == len({*keys}), "a key is said once, and a message is one line"


def test_an_engine_that_does_not_sleep_takes_no_turns(base: Path) -> None:
    vllm = ("engine.kind=vllm", "engine.python=x", "model.path=x")
    with pytest.raises(ConfigError, match=r"placement\.device_sharing: .*gives no memory back.*engine\.kind=embedded"):
        load(base, *vllm, "placement.device_sharing=[[generate,train]]")


REINFORCE = "ppo.advantage=reinforce_pp"


@pytest.mark.parametrize("changes", [
    (REINFORCE,), ("ppo.advantage=rloo", "rollout.responses_per_prompt=2"),
    ("ppo.advantage=group", "rollout.responses_per_prompt=8", "ppo.kl.where=loss", "ppo.kl.estimator=k3"),
    ("ppo.advantage=group", "rollout.responses_per_prompt=8", "ppo.group_scale=none", "ppo.skip_equal_groups=true"),
    ("ppo.advantage=group", "rollout.responses_per_prompt=8", "ppo.kl.coef=0", "ppo.whiten_advantages=true"),
])  # fmt: skip
def test_without_a_critic_nothing_of_one_is_in_the_run(base: Path, changes: tuple[str, ...]) -> None:
    """The config may keep the settings of a critic, so that one key compares an algorithm with `gae`; they are not
    read."""
    own = ("placement.gangs.critic={workers: 2}", "placement.roles.critic=critic", "model.critic.reuse_forward=true")
    config = load(base, *changes, *own, "model.critic_path=nowhere", "ppo.critic_lam=1", "model.policy.decay=constant")
    assert not config.graph().critic
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
    with pytest.raises(ConfigError, match=f"placement.roles.{role}: .*placed nowhere.*all") as refusal:
        load(path)
    assert refusal.value.key == f"placement.roles.{role}"


@pytest.mark.parametrize(
    ("key", "line"),
    {
        "name": "name: base",
        "model.path": 'path: "random:tiny"',
        "prompts.url": "url: prompts.jsonl, ",
    }.items(),
)
def test_a_missing_value_is_refused(tmp_path: Path, key: str, line: str) -> None:
    assert line in BASE
    path = tmp_path / "c.yaml"
    path.write_text(BASE.replace(line, ""))
    with pytest.raises(ConfigError, match=f"^{key}: has no value; set it .*{key}=") as refusal:
        load(path)
    assert refusal.value.key == key


def test_a_run_needs_a_reward(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE.replace("reward: {kind: characters, args: {characters: aeiou}}\n", ""))
    with pytest.raises(ConfigError, match=r"^reward\.parts: given {}; a run needs a reward: reward\.kind=NAME"):
        load(path)


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


def test_a_saved_config_with_settings_of_another_version_is_refused(base: Path) -> None:
    text = to_yaml(load(base)).replace("  critic:\n", "  value:\n")
    with pytest.raises(ConfigError, match=r"^model\.value: no such key \(in the saved config\); .*model\.critic\?"):
        load_yaml(text)


def test_every_problem_is_found(base: Path) -> None:
    """Checks of one section run whatever is the matter with another; those across sections need sound ones."""
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


def test_a_config_is_a_value(base: Path) -> None:
    """Two loads share nothing that one of them could change."""
    one, two = load(base), load(base)
    one.placement.gangs["train"].workers = 7
    assert two.placement.gangs["train"].workers == 1
    assert dataclasses.replace(two, seed=3) != two

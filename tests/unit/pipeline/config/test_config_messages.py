"""Messages about a config: all problems at once, in the words of the settings, with suggestions; and the defaults
that a first config relies on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.answers import config_from_sources
from pipeline.cli.main import main
from pipeline.config.loading import config_hash, load_config, load_yaml, to_yaml
from pipeline.config.placement import DEFAULT_PLACEMENT
from pipeline.config.preflight import check_run, check_run_directory, preflight
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, join_errors, run_checks
from storage.prompts import held_out_by_default
from tests.support.paths import ROOT

BASE = """
name: base
model: {path: "random:tiny"}
prompts: {max_tokens: 8}
rollout: {rows: 8}
sampling: {max_new_tokens: 8}
reward: {kind: characters, args: {characters: aeiou}}
tracking: {uri: null}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def write_prompts(folder: Path, number: int) -> str:
    path = folder / "prompts.csv"
    path.write_text("prompt,answer\n" + "".join(f"word {i},{i}\n" for i in range(number)))
    return f"prompts.url={path}"


def load(base: Path, *overrides: str) -> RunConfig:
    return load_config([base], ["prompts.url=x.csv", *overrides])


# ---- everything at once ----------------------------------------------------------------------------------------------


def test_unknown_keys_and_wrong_types_of_all_sources_are_said_at_once(base: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("stepz: 3\nstaleness: many\nplacement: {gangs: {train: {worker: 2}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([base, second], ["model.dtype=int8", "seed=1"])
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "stepz", "placement.gangs.train.worker", "staleness", "model.dtype", "prompts.url",
    ]  # fmt: skip
    assert caught.value.key == "stepz"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("steps=0", "staleness=-1", "ppo.clip=2"), ["steps", "staleness", "ppo.clip"]),
        (("steps=ten", "staleness=-1", "rollout.rows=0"), ["steps", "staleness", "rollout.rows"]),
        # it is not the default of shards that does not divide
        (("rollout.shards=two", "rollout.rows=3", "ppo.minibatches=1"), ["rollout.shards"]),
        (("rollout.rows=15", "ppo.minibatches=7"), ["rollout.shards", "ppo.minibatches"]),
        (("reward.parts.a.timeout_s=5",), ["reward.parts.a.kind", "reward.kind"]),
        (("rollout=5", "ppo.minibatches=7", "ppo.clip=2"), ["rollout", "ppo.clip"]),
        (("data.a=1", "data.b=2", "steps=0"), ["data.a", "data.b", "steps"]),
        (("rollout.rows=-3",), ["rollout.rows"]),
        (("seed=${nope}", "steps=x"), ["steps", "seed"]),
    ],
)
def test_values_are_looked_at_beside_what_is_refused(base: Path, overrides: tuple[str, ...], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(base, *overrides)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == keys
    assert [error.key for error in caught.value.errors] == keys


MISTAKES = {
    # the names and values of TRL, verl and OpenRLHF
    "model_name_or_path=gpt2": "model_name_or_path",
    "learning_rate=1e-6": "learning_rate",
    "num_generations=8": "num_generations",
    "max_prompt_length=512": "max_prompt_length",
    "max_completion_length=256": "max_completion_length",
    "beta=0.04": "beta",
    "num_train_epochs=1": "num_train_epochs",
    "gradient_accumulation_steps=4": "gradient_accumulation_steps",
    "per_device_train_batch_size=8": "per_device_train_batch_size",
    "report_to=wandb": "report_to",
    "output_dir=out": "output_dir",
    "use_vllm=true": "use_vllm",
    "lora_r=16": "lora_r",
    "reward_funcs=my_rewards.f": "reward_funcs",
    "algorithm.adv_estimator=grpo": "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.n=5": "actor_rollout_ref.rollout.n",
    "trainer.total_epochs=15": "trainer.total_epochs",
    "sampling.top_p=0.9": "sampling.top_p",
    "sampling.stop=[User]": "sampling.stop",
    "ppo.advantage=grpo": "ppo.advantage",
    "ppo.aggregation=token-mean": "ppo.aggregation",
    "ppo.kl=0.05": "ppo.kl",
    "model.dtype=bf16": "model.dtype",
    "model.lora.targets=[all-linear]": "model.lora.targets",
    "prompts.too_long=truncate": "prompts.too_long",
    "prompts.format=conversational": "prompts.format",
    "tracking.also=[mlflow]": "tracking.also",
    # misspelt
    "prompts.feild=text": "prompts.feild",
    "engine.kind=embeded": "engine.kind",
    "reward.kind=vadr": "reward.kind",
    "placement.gangs.generate.wrokers=3": "placement.gangs.generate.wrokers",
    "placement.roles.policy=tran": "placement.roles.policy",
    "alarms.stop=[reward]": "alarms.stop",
    # not there
    "model.path=nowhere": "model.path",
    "prompts.url=missing.jsonl": "prompts.url",
    # types
    "model.policy.lr=fast": "model.policy.lr",
    "storage.fsync=maybe": "storage.fsync",
    "slurm.time_limit=tomorrow": "slurm.time_limit",
    "seed=-1": "seed",
    # ranges
    "name=a/b": "name",
    "staleness=-1": "staleness",
    "sampling.temperature=0": "sampling.temperature",
    "engine.max_rows=0": "engine.max_rows",
    "export.every=-1": "export.every",
    "ppo.clip=2": "ppo.clip",
    "ppo.epochs=0": "ppo.epochs",
    "ppo.gamma=1.5": "ppo.gamma",
    "tracking.uri=mlruns": "tracking.uri",
    # settings that do not go together
    "rollout.shards=3": "rollout.shards",
    "rollout.responses_per_prompt=3": "rollout.responses_per_prompt",
    "ppo.minibatches=7": "ppo.minibatches",
    "checkpoint={every: 10, keep_every: 15}": "checkpoint.keep_every",
    "cluster={kind: attached, address: ':99999'}": "cluster.address",
    "evaluate={every: 0, select: {max_kl: 3}}": "evaluate.select.max_kl",
    "mismatch={rows: 0, alarm_nats: 0.1}": "mismatch.alarm_nats",
}
"""Mistake -> the key that its refusal names."""
REFUSED_KEYS = """
import json, sys
sys.modules |= dict.fromkeys(("torch", "megatron", "transformers", "dask", "distributed"))
from pipeline.cli.answers import config_from_sources
from pipeline.errors import ConfigError
try:
    config_from_sources(sys.argv[1:])
except ConfigError as error:
    json.dump([one.key for one in error.errors], sys.stdout)
"""
"""Prints the keys that are refused. Without torch no model can be loaded, and without Dask no worker can start."""


def test_fifty_mistakes_are_refused_in_one_round_and_before_a_model_is_loaded(base: Path) -> None:
    """Names of other systems, misspelt names, types, choices, ranges, missing files, rules across settings."""
    assert len(MISTAKES) >= 50
    said = subprocess.run(
        [sys.executable, "-c", REFUSED_KEYS, str(base), *MISTAKES],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert sorted(json.loads(said)) == sorted(MISTAKES.values())


def test_settings_without_a_value_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^model.path: has no value.*\nname: has no value.*\nprompts.url: has no"):
        load_config([])


def test_what_the_disk_refuses_is_said_at_once(base: Path, tmp_path: Path) -> None:
    tokens = ("sampling.suppress_token_ids=[999]", "model.eos_token_ids=[999]")
    config = load(base, write_prompts(tmp_path, 3), "prompts.field=question", "reward.args.limit=1", *tokens)
    with pytest.raises(ConfigError) as caught:
        preflight(config)
    assert {error.key for error in caught.value.errors} >= {
        "sampling.suppress_token_ids", "model.eos_token_ids", "reward.args.limit",
    }  # fmt: skip
    assert "prompts.field" in str(caught.value)


def test_a_model_that_is_not_there_hides_nothing_else(base: Path, tmp_path: Path) -> None:
    """Nor does a name that is taken; and what follows from either is not said."""
    changes = (f"runs_dir={tmp_path}", "name=a", "model.path=/nope", "prompts.url=nope", "reward.kind=nope")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/events.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        check_run(load(base, *changes, "evaluate.reward.kind=nope"), resume=False)
    assert {error.key for error in caught.value.errors} == {
        "name", "model.path", "prompts.url", "reward.kind", "evaluate.reward.kind",
    }  # fmt: skip


def test_every_model_is_looked_at(base: Path, tmp_path: Path) -> None:
    others = ("model.reference_path=/nope", "model.critic_path=/nope2")
    for changes, keys in {
        others: ["model.reference_path", "model.critic_path"],
        ("model.path=/nope3", *others): ["model.path", "model.reference_path", "model.critic_path"],
        ("model.frozen_blocks=100", "model.critic_blocks=99"): ["model.frozen_blocks", "model.critic_blocks"],
    }.items():
        with pytest.raises(ConfigError) as caught:
            preflight(load(base, write_prompts(tmp_path, 40), *changes))
        assert caught.value.keys == keys


def test_all_unknown_names_of_a_list_are_said(base: Path) -> None:
    said = r"tracking.also: given \['tensorbord', 'x'\]; no such tracker; did you mean tensorboard\? There are tensorb"
    with pytest.raises(ConfigError, match=said):
        load(base, "tracking.uri=sqlite:///x.db", "tracking.also=[tensorbord, wandb, x]")


def test_one_error_stays_as_it_is_and_of_each_key_one_thing_is_said() -> None:
    one, other = ConfigError("a", "x"), ConfigError("b", "y")
    assert str(join_errors([one])) == "a: x"
    assert str(join_errors([one, other, ConfigError("a", "z")])) == "a: x\nb: y"

    def refuse() -> Any:
        raise other

    assert run_checks(lambda: 1, lambda: 2) == [1, 2]
    with pytest.raises(ConfigError, match=r"^b: y$"):
        run_checks(lambda: 1, refuse)


# ---- in the words of the settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=ten", "steps: given 'ten' (in {}); must be a whole number"),
        ("name=", "name: no value given (in {}); must be a text"),
        ("storage.fsync=perhaps", "storage.fsync: given 'perhaps' (in {}); must be true or false"),
        ("model.dtype=int8", "model.dtype: given 'int8' (in {}); must be one of float32, bfloat16, float16"),
        (
            "ppo.kl.estimator=low_var_kl",
            "ppo.kl.estimator: given 'low_var_kl' (in {}); must be one of k1, k2, k3 (low_var_kl is called k3 here)",
        ),
        ("prompts.held_out=x", "prompts.held_out: given 'x' (in {}); must be a whole number, or null"),
        (
            "model.eos_token_ids=[a]",
            "model.eos_token_ids: given ['a'] (in {}); must be a list ([a, b]), each element a whole number",
        ),
        (
            "reward.kind=mine:",
            "reward.kind: given {{mine: null}} (in {}); must be a text, or null; YAML takes a text that ends in : "
            "for a mapping",
        ),
        ("reward.args=3", "reward.args: given 3 (in {}); must be a mapping of names to settings"),
        ("ppo.kl=0.1", "ppo.kl: given 0.1 (in {}); did you mean ppo.kl.coef=0.1?"),
        ("reward=mine:f", "reward: given 'mine:f' (in {}); did you mean reward.kind=mine:f?"),
        ("name=off", "name: given false (in {}); must be a text: put it in quotes"),
        ("name=007", "name: given 7 (in {}); must be a text: put it in quotes"),
        ("prompts.field=on", "prompts.field: given true (in {}); must be a text: put it in quotes"),
        ("runs_dir=${oc.env:NOT_SET}", "runs_dir: Environment variable 'NOT_SET' not found"),
    ],
)
def test_wrong_types_are_said_in_words(base: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(base, override)
    assert str(caught.value) == said.format(override)


def test_a_number_may_be_a_text_if_it_is_spelled_so(base: Path) -> None:
    assert load(base, "name=7").name == "7"
    assert load(base, "prompts.field=0").prompts.field == "0"
    base.write_text(BASE.replace("name: base", "name: 7"))
    with pytest.raises(ConfigError, match=r"name: given 7 .* put it in quotes"):
        load(base)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("staleness", "2"), "staleness: is a setting, and no file of that name is there; did you mean staleness=2?"),
        (("placement.gangs.train.workers", "2"), "did you mean placement.gangs.train.workers=2?"),
        (("nowhere.yaml",), "nowhere.yaml: no such config file"),
    ],
)
def test_a_setting_without_its_equals_sign_is_recognised(base: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_sources([str(base), *words])
    assert said in str(caught.value)


def test_a_file_that_is_called_like_a_setting_is_a_file(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps").write_text("steps: 7\n")
    assert config_from_sources([str(base), "steps", "prompts.url=x.csv"]).steps == 7


# ---- settings that would do nothing ----------------------------------------------------------------------------------


def test_nothing_ends_a_reward_that_ships_with_stageline(base: Path) -> None:
    base.write_text(BASE.replace("{kind: characters, args: {characters: aeiou}}", "{parts: {a: {kind: vader}}}"))
    with pytest.raises(ConfigError, match=r"reward.parts.a.timeout_s: given 5; vader has no time-out for a batch"):
        load(base, "reward.parts.a.timeout_s=5")
    load(base, "reward.parts.a.timeout_s=60")
    base.write_text(BASE.replace("{kind: characters, args: {characters: aeiou}}", "{parts: {a: {kind: 'mine:score'}}}"))
    load(base, "reward.parts.a.timeout_s=5")


def test_the_same_where_it_does_something(base: Path) -> None:
    grouped = ("ppo.advantage=group", "rollout.responses_per_prompt=4", "ppo.kl.where=loss")
    load(base, *grouped, "ppo.advantage=group_mean", "reward.normalize.scale=true")
    load(base, *grouped, "reward.normalize={mean: true, scale: true, clip: 2}")
    load(base, "reward.normalize.mean=true")


def test_check_notes_what_is_too_large_for_the_number_of_steps(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [write_prompts(tmp_path, 12), f"runs_dir={tmp_path}/runs", "steps=4"]
    assert main(["check", str(base), *changes, "model.policy.warmup_steps=100", "staleness=100"]) == 0
    said = capsys.readouterr().out
    assert "model.policy.warmup_steps=100 is more than steps=4: the learning rate ends at 4% of model.policy.lr" in said
    assert "staleness=100 has the effect of staleness=3, because steps=4" in said
    assert main(["check", str(base), *changes, "model.policy.warmup_steps=4", "staleness=3"]) == 0
    assert "note:" not in capsys.readouterr().out


# ---- defaults --------------------------------------------------------------------------------------------------------


def test_a_config_without_a_placement_has_the_default(base: Path) -> None:
    config = load(base)
    assert config.placement.roles == dict(DEFAULT_PLACEMENT["roles"])
    assert {name: gang.concurrent_shards for name, gang in config.placement.gangs.items()} == {
        "generate": 2,
        "score": 1,
        "train": 1,
    }
    assert load_yaml(to_yaml(config)) == config
    written = "placement={gangs: {generate: {concurrent_shards: 2}, score: {}, train: {}}, "
    written += "roles: {generate: generate, score: score, reference: train, policy: train, critic: train}}"
    assert config_hash(load(base, written)) == config_hash(config), "said or not, it is the same run"


def test_its_gangs_may_be_changed_one_by_one(base: Path) -> None:
    config = load(base, "placement.gangs.generate.workers=2", "placement.gangs.train.threads=3")
    gangs = config.placement.gangs
    assert (gangs["generate"].workers, gangs["generate"].concurrent_shards, gangs["train"].threads) == (2, 2, 3)
    collected = load(base, "placement={gangs: {collect: {}}, roles: {advantage: collect}}")
    assert collected.placement.roles["advantage"] == "collect"
    assert {"collect", "generate", "score", "train"} == collected.placement.gangs.keys()


def test_a_single_role_may_be_placed_elsewhere(base: Path) -> None:
    config = load(base, "placement.roles.critic=critic", "placement.gangs.critic={}")
    assert config.placement.roles == {**DEFAULT_PLACEMENT["roles"], "critic": "critic"}
    assert {"critic", "generate", "score", "train"} == config.placement.gangs.keys()
    with pytest.raises(ConfigError, match=r"placement.roles.critic: given 'nowhere'; no such gang"):
        load(base, "placement.roles.critic=nowhere")
    with pytest.raises(ConfigError, match=r"placement.roles.policy: given \[1\]; no such gang"):
        load(base, "placement={gangs: {all: {}}, roles: {policy: [1]}}")


def test_whoever_places_roles_places_all(base: Path) -> None:
    one = "placement={gangs: {all: {}}, roles: {generate: all, score: all, reference: all, policy: all, critic: all}}"
    assert [*load(base, one).placement.gangs] == ["all"]
    with pytest.raises(ConfigError, match=r"placement.roles.score: given null; placed nowhere"):
        load(base, "placement={gangs: {all: {}}, roles: {generate: all, policy: all, reference: all, critic: all}}")


@pytest.mark.parametrize(
    ("prompts", "shards", "held_out"), [(1000, 1, 64), (640, 1, 64), (80, 1, 8), (40, 3, 3), (5, 1, 2), (1000, 3, 63)]
)
def test_a_tenth_of_the_prompts_is_held_out(prompts: int, shards: int, held_out: int) -> None:
    assert held_out_by_default(prompts, shards) == held_out


def test_preflight_settles_how_many_are_held_out(base: Path, tmp_path: Path) -> None:
    config = load(base, write_prompts(tmp_path, 40))
    assert config.prompts.held_out is None
    checked = preflight(config)
    assert config.prompts.held_out == len(checked.prompts.held_out) == 4
    assert config.layouts().evaluate is not None
    assert len(checked.prompts.train) == 36
    directory = tmp_path / "runs/base"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(to_yaml(config))
    (directory / "events.jsonl").write_text("")
    again = load(base, f"prompts.url={tmp_path}/prompts.csv", f"runs_dir={tmp_path}/runs")
    with pytest.raises(ConfigError, match="holds this run already"):
        check_run_directory(again, resume=False)


def test_first_and_last_are_evaluated_unless_nothing_is(base: Path) -> None:
    assert load(base, "steps=7").graph().eval_every == 7
    assert load(base, "steps=7", "evaluate.every=0").graph().eval_every == 0


def test_check_says_when_a_step_has_more_rows_than_there_are_prompts(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [write_prompts(tmp_path, 12), f"runs_dir={tmp_path}/runs"]
    assert main(["check", str(base), *changes, "rollout.rows=32"]) == 0
    assert "note: a step has 32 prompts (rollout.rows=32), but there are 10 to train on" in capsys.readouterr().out
    assert main(["check", str(base), *changes]) == 0
    assert "note:" not in capsys.readouterr().out

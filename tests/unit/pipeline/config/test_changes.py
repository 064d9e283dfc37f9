"""Settings that may change when a run is continued, and the message for the others."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from pipeline.config.identity import CHANGEABLE_KEYS, change_problems, config_changes, config_sections, flatten_sections
from pipeline.config.loading import config_hash, flatten, load_config, read_run_config, to_yaml, variant_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from tests.support.paths import ROOT, TINY

CONSTANT = ("model.policy.decay=constant", "model.critic.decay=constant")


def load(*overrides: str) -> RunConfig:
    return load_config([TINY], overrides)


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "reward.args={characters: xyz}",
        "evaluate.temperature=0.5",
        "placement.gangs.train.layout.recompute=full",
    ],
)
def test_what_may_not_is_named_with_both_values(change: str) -> None:
    key = change.partition("=")[0]
    before, after = load(), load(change)
    (problem,) = change_problems(config_sections(before), after)
    assert problem.key == (key if not key.endswith("args") else "reward.args.characters")
    (changed,) = config_changes(config_sections(before), config_sections(after))
    assert problem.given == changed.after
    before_text = "null" if changed.before is None else repr(changed.before)
    assert f"the run has {before_text}" in problem.need


def documented() -> list[str]:
    """The keys that may change, as the table that users read has them, as patterns."""
    text = (ROOT / "docs/running.md").read_text("utf8")
    table = text.partition("### What may change on resume")[2].partition("Everything else")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
    named = re.findall(r"`([^`]+)`", " ".join(cells))
    short = {"weights_dir", "offload", "workers", "concurrent_shards"}
    of_parts = {"timeout_s", "network", "environment", "writes"}
    return [
        f"placement.gangs.*.{key}" if key in short else f"*.parts.*.{key}" if key in of_parts else key for key in named
    ]


def other(value: object) -> object:
    """Another value, of the same type where there is one: what the run had before."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value - 1
    return ["another"] if isinstance(value, list) else "another"


def test_every_key_may_change_or_is_named_as_the_docs_say() -> None:
    """All of them at once, each refused by itself; the docs have the list that a user looks at."""
    config = load(*CONSTANT)
    stated = config_sections(config)
    keys = sorted(flatten_sections(stated))
    for key in keys:
        *above, last = key.split(".")
        section = stated
        for name in above:
            section = section[name]
        section[last] = other(section[last])
    may = {key for key in keys for pattern in documented() if fnmatchcase(key, pattern)} | {"name", "runs_dir"}
    may -= {"placement.gangs.train.workers", "placement.gangs.train.concurrent_shards"}  # not of a pool
    assert [problem.key for problem in change_problems(stated, config)] == [key for key in keys if key not in may]


def test_the_ranks_of_a_gang_stay_as_many_as_they_are() -> None:
    (problem,) = change_problems(config_sections(load()), load("placement.gangs.train.workers=2"))
    assert problem.key == "placement.gangs.train.workers"
    assert "its ranks act together" in problem.need


def test_a_run_may_become_longer_where_no_learning_rate_depends_on_its_end() -> None:
    before = config_sections(load(*CONSTANT, "steps=4"))
    assert list(change_problems(before, load(*CONSTANT, "steps=9"))) == []
    (shorter,) = change_problems(before, load(*CONSTANT, "steps=3"))
    assert (shorter.key, shorter.given) == ("steps", 3)
    assert "the run has 4: a run may become longer, not shorter" in shorter.need
    (decaying,) = change_problems(config_sections(load("steps=4")), load("steps=9"))
    assert "the learning rates depend on it" in decaying.need
    assert "/tiny/config.yaml name=tiny-9 steps=9`" in decaying.need, "random weights: a new run of nine steps"


def test_the_command_that_begins_with_the_last_version_is_a_run(tmp_path: Path) -> None:
    """Nine steps in all. The other settings stay, and the reference too. The run must have ended."""
    other = ("model.path=assets/some-model", "model.frozen_blocks=1", f"runs_dir={tmp_path}", "steps=4")
    before, after = load(*other), load(*other, "steps=9")
    before.run_dir.mkdir()
    (before.run_dir / "config.yaml").write_text(to_yaml(before))
    (unfinished,) = change_problems(config_sections(before), after)
    assert f"Finish the run first (`stageline resume {before.run_dir}`)" in unfinished.need
    RunPaths(before.run_dir).weights(4).mkdir(parents=True)
    (problem,) = change_problems(config_sections(before), after)
    command = re.search("`stageline run ([^`]+)`", problem.need)
    assert command is not None
    file, *changes_of_it = command[1].split()
    new = load_config([file], changes_of_it)
    assert (new.steps, new.model.path) == (5, f"{before.run_dir}/weights/v000004")
    assert new.model.reference_path == "assets/some-model"
    assert new.run_dir.parent == before.run_dir.parent
    assert not new.run_dir.exists()


def test_every_key_that_may_change_is_one() -> None:
    assert CHANGEABLE_KEYS.keys() <= flatten(load()).keys()


def test_a_saved_config_comes_back_with_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load()))
    assert config_hash(read_run_config(path)) == config_hash(load())
    assert config_sections(read_run_config(path)) == config_sections(load())
    assert read_run_config(path, ["evaluate.every=3"]).evaluate.every == 3


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: text.index("\nstaleness") + 5], "not readable as YAML"),
        (lambda text: text.partition("\nplacement:")[0], "it has no placement.gangs, placement."),
        (lambda text: "", "it has no name, runs_dir, "),
        (lambda text: "- 3", "it has no name"),
    ],
)
def test_a_damaged_config_is_refused_by_its_path(tmp_path: Path, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.yaml"
    path.write_text(damage(to_yaml(load())))
    with pytest.raises(ConfigError) as refused:
        read_run_config(path)
    assert said in str(refused.value)
    assert "or remove the file" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_config_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "change",
    [
        "ppo.kl.coef=0.1",
        "model.policy.lr=0.5",
        "model.critic.betas=[0.8,0.9]",
        "tracking.experiment=others",
    ],
)
def test_what_a_variant_may_differ_in(change: str) -> None:
    variant, changed = variant_config(load_config([TINY]), [change, "name=other"])
    assert variant.name == "other"
    assert [found.key for found in changed] == [change.split("=")[0]]


def test_what_its_rollouts_depend_on_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.rows: given 32; the run's rollouts were recorded with 16 and"):
        variant_config(load_config([TINY]), ["name=other", "rollout.rows=32"])


def test_auto_is_resolved_anew() -> None:
    """The parent's config says what its `auto` came to, which its own number of optimizer steps decided."""
    parent = load_config([TINY], ["ppo.minibatches=1", "ppo.kl.where=loss"])
    assert parent.ppo.proximal == "loglinear"
    variant, _ = variant_config(parent, ["name=other", "ppo.epochs=2", "ppo.proximal=auto"])
    assert variant.ppo.proximal == "recompute"


def test_a_critic_is_placed_where_the_parent_has_none() -> None:
    parent = load_config([TINY], ["ppo.advantage=reinforce_pp"])
    del parent.placement.roles["critic"]
    with pytest.raises(ConfigError, match=r"placement\.roles\.critic: .*placed nowhere"):
        variant_config(parent, ["name=other", "ppo.advantage=gae"])
    variant, changed = variant_config(parent, ["name=other", "ppo.advantage=gae", "placement.roles.critic=train"])
    assert variant.has_critic
    assert [found.key for found in changed] == ["placement.roles.critic", "ppo.advantage"]

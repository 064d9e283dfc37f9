"""The runs of a sweep: which settings differ, and what the runs are called."""

from __future__ import annotations

import pytest

from pipeline.config.errors import ConfigError
from pipeline.launch.sweep import axes_of, points


def test_settings_with_several_values_are_axes() -> None:
    changes = ["ppo.kl.coef=0.02,0.05,0.1", "steps=3", "model.policy.betas=[0.8, 0.9]", "seed=0,1"]
    fixed, axes = axes_of(changes)
    assert fixed == ["steps=3", "model.policy.betas=[0.8, 0.9]"]
    assert axes == {"ppo.kl.coef": ["0.02", "0.05", "0.1"], "seed": ["0", "1"]}


def test_commas_in_brackets_and_quotes_part_nothing() -> None:
    changes = ["model.policy.betas=[0.8, 0.9],[0.9, 0.95]", "reward.args='{a: \"x,y\"}'"]
    fixed, axes = axes_of(changes)
    assert fixed == [changes[1]]
    assert axes == {"model.policy.betas": ["[0.8, 0.9]", "[0.9, 0.95]"]}


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    found = points({"ppo.kl.coef": ["0.02", "0.1"], "seed": ["0", "1"]}, "tiny")
    assert [point.suffix for point in found] == ["coef0.02-seed0", "coef0.02-seed1", "coef0.1-seed0", "coef0.1-seed1"]
    assert found[1].changes() == ["ppo.kl.coef=0.02", "seed=1"]


def test_keys_with_the_same_end_are_told_apart() -> None:
    found = points({"model.policy.lr": ["1", "2"], "model.critic.lr": ["3"]}, "tiny")
    assert [point.suffix for point in found] == ["policy.lr1-critic.lr3", "policy.lr2-critic.lr3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=1", "steps=2"], "sweep: nothing differs"),
        (["reward.args.api_key=one,two"], "reward.args.api_key: a run of a sweep is named after what it differs in"),
        (["seed=0,1", "seed=2,3"], "seed: is given twice"),
        (["seed=3", "seed=0,1"], "seed: is given twice"),
        (["seed=0,00"], "seed: given '0,00'; the values of a sweep differ"),
        (["seed=0,1", "name=a,b"], "name: given 'a,b'; the runs of a sweep are in one directory"),
        (["seed=0,1", "runs_dir=x,y"], "runs_dir: given 'x,y'"),
        (["seed=0,1", "tracking.experiment=a,b"], "tracking.experiment: given 'a,b'"),
        (["seed=0,0"], "seed: given '0,0'; the values of a sweep differ"),
        (["seed=0,"], "seed: given '0,'; the values of a sweep differ"),
    ],
)
def test_what_makes_no_sweep_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        axes_of(changes)


def test_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sweep: values that differ in marks alone"):
        points({"a.b": ["[1]", "{1}"]}, "tiny")
    with pytest.raises(ConfigError, match=r"^name: given 'x+'; a run of the sweep would be called .*: at most 100"):
        points({"seed": ["0", "1"]}, "x" * 97)

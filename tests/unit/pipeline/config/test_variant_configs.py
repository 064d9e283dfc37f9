"""Settings in which a variant may differ."""

from __future__ import annotations

import pytest

from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_config, variant_of
from tests.support.paths import TINY


@pytest.mark.parametrize(
    "change",
    [
        "ppo.kl.coef=0.1",
        "ppo.clip=0.1",
        "ppo.proximal=sampler",
        "ppo.epochs=2",
        "model.policy.lr=0.5",
        "model.critic.betas=[0.8,0.9]",
        "tracking.experiment=others",
    ],
)
def test_what_a_variant_may_differ_in(change: str) -> None:
    variant, changed = variant_of(load_config([TINY]), [change, "name=other"])
    assert variant.name == "other"
    assert [found.key for found in changed] == [change.split("=")[0]]


def test_what_its_rollouts_depend_on_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.rows: given 32; the run's rollouts were recorded with 16 and"):
        variant_of(load_config([TINY]), ["name=other", "rollout.rows=32"])


def test_auto_is_resolved_anew() -> None:
    """The parent's config says what its `auto` came to, which its own number of optimizer steps decided."""
    parent = load_config([TINY], ["ppo.minibatches=1", "ppo.kl.where=loss"])
    assert parent.ppo.proximal == "loglinear"
    variant, _ = variant_of(parent, ["name=other", "ppo.epochs=2", "ppo.proximal=auto"])
    assert variant.ppo.proximal == "recompute"


def test_a_critic_is_placed_where_the_parent_has_none() -> None:
    parent = load_config([TINY], ["ppo.advantage=reinforce_pp"])
    del parent.placement.roles["critic"]
    with pytest.raises(ConfigError, match=r"placement\.roles\.critic: .*placed nowhere"):
        variant_of(parent, ["name=other", "ppo.advantage=gae"])
    variant, changed = variant_of(parent, ["name=other", "ppo.advantage=gae", "placement.roles.critic=train"])
    assert variant.has_critic
    assert [found.key for found in changed] == ["placement.roles.critic", "ppo.advantage"]

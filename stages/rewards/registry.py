"""Rewards by name. May import stages.rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stages.rewards.protocol import Reward, RewardConfig
from stages.rewards.rules import AnswerReward, CharacterReward, LengthReward
from stages.rewards.vader import VaderReward

REWARDS: Mapping[str, Callable[..., Reward]] = {
    "answer": AnswerReward,
    "characters": CharacterReward,
    "length": LengthReward,
    "vader": VaderReward,
}
"""`reward.kind` -> what makes it from `reward.args`."""


def build_reward(config: RewardConfig) -> Reward:
    """Raises ValueError for an unknown kind (listing the known) and for arguments it does not take."""
    if config.kind not in REWARDS:
        raise ValueError(f"reward.kind is {config.kind!r}; known are {', '.join(sorted(REWARDS))}")
    try:
        return REWARDS[config.kind](**config.args)
    except TypeError as error:
        raise ValueError(f"reward.args {dict(config.args)} do not fit reward.kind {config.kind!r}: {error}") from error

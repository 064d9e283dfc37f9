"""Rewards on texts whose scores are known, and the score stage around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.models.hf_files import ByteTokenizer
from stages.rewards.protocol import RewardConfig, Sample
from stages.rewards.registry import build_reward
from stages.score import score
from storage.records import FinishReason, Rollout


def sample(response: str, prompt: str = "", **extra: object) -> Sample:
    return Sample(prompt, response, True, dict(extra))


def make_rollout(prompts: list[str], responses: list[bytes], finished: list[bool]) -> Rollout:
    num, seq = len(prompts), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = np.zeros((num, seq), np.int32)
    mask = np.zeros((num, seq), np.bool_)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        row = prompt.encode() + response
        tokens[i, : len(row)] = list(row)
        mask[i, len(prompt) : len(row)] = True
    reasons = [FinishReason.STOP if f else FinishReason.LENGTH for f in finished]
    return Rollout(
        row=np.arange(num) + 30,
        prompt_index=np.arange(num),
        tokens=tokens,
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        response_lengths=np.array([len(r) for r in responses], np.int32),
        response_mask=mask,
        sampler_logprobs=np.zeros((num, seq), np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.array(reasons, np.int8),
    )


@dataclass
class Recorder:
    """Keeps its samples and gives out fixed scores."""

    scores: list[float]
    deterministic: bool = True
    seen: Sequence[Sample] = ()

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        self.seen = samples
        return self.scores


def test_vader_scores_the_response_alone() -> None:
    """VADER's own paper gives 0.8316 for the first sentence's plain form; the prompt must not move it."""
    reward = build_reward(RewardConfig("vader"))
    text = "VADER is smart, handsome, and funny."
    scores = reward([sample(text), sample(text, prompt="A horrible, awful bore. "), sample("horrible"), sample("")])
    assert scores[0] == scores[1] == 0.8316
    assert scores[2] == SentimentIntensityAnalyzer().polarity_scores("horrible")["compound"] < -0.5
    assert scores[3] == 0.0


def test_characters() -> None:
    reward = build_reward(RewardConfig("characters", {"characters": "ab"}))
    assert reward([sample("abba"), sample("axbx"), sample("xyz"), sample("")]) == [1.0, 0.5, 0.0, 0.0]


def test_length() -> None:
    reward = build_reward(RewardConfig("length", {"target": 4}))
    assert reward([sample("x" * n) for n in (0, 1, 4, 6, 8, 20)]) == [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]


def test_answer() -> None:
    reward = build_reward(RewardConfig("answer", {"field": "sum"}))
    texts = ["2 + 3 = 5", "it is 6", "so 1,005.0", "none", "-5"]
    wanted = ["5", 5, 1005, 5, "-5"]
    assert reward([sample(t, sum=w) for t, w in zip(texts, wanted, strict=True)]) == [1.0, 0.0, 1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="no field 'sum'"):
        reward([sample("5")])


def test_registry_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"reward\.kind is 'vadr'; known are answer, characters, length, vader"):
        build_reward(RewardConfig("vadr"))
    with pytest.raises(ValueError, match=r"reward\.args .*'letters'"):
        build_reward(RewardConfig("characters", {"letters": "a"}))
    with pytest.raises(ValueError, match=r"reward\.args\.target is 0"):
        build_reward(RewardConfig("length", {"target": 0}))


def test_score_shows_the_reward_each_text_without_special_tokens() -> None:
    reward = Recorder([0.25, -1.5])
    rollout = make_rollout(["ab", "c"], [b"xyz\x02", b"w"], [True, False])
    scores = score(reward, ByteTokenizer(), rollout, [{"id": 1}, {}])
    assert list(reward.seen) == [Sample("ab", "xyz", True, {"id": 1}), Sample("c", "w", False, {})]
    assert scores.scores.dtype == np.float32
    np.testing.assert_array_equal(scores.scores, [0.25, -1.5])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_score_refuses_what_is_not_finite(bad: float) -> None:
    rollout = make_rollout(["ab", "c"], [b"x", b"w"], [True, True])
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="row 31 is"):
        score(Recorder([0.0, bad]), ByteTokenizer(), rollout, [{}, {}])


def test_score_refuses_wrong_counts() -> None:
    rollout = make_rollout(["ab", "c"], [b"x", b"w"], [True, True])
    with pytest.raises(ValueError, match="1 extras were given for 2 rows"):
        score(Recorder([0.0, 0.0]), ByteTokenizer(), rollout, [{}])
    with pytest.raises(ValueError, match=r"3,.* for 2 rows"):
        score(Recorder([0.0, 0.0, 0.0]), ByteTokenizer(), rollout, [{}, {}])

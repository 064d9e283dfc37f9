"""Rewards on texts whose scores are known, and the score stage around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from stages.models.hf_files import ByteTokenizer
from stages.rewards.config import PartConfig, RewardConfig, RewardPartsConfig, reward_problems
from stages.rewards.protocol import Part, Reward, RewardFailed, Sample, Scored
from stages.rewards.registry import UnfitReward, build_parts, build_reward
from stages.score import score, token_batches
from storage.records import FinishReason, Rollout
from tests.support.sampled_rows import rollout_of


def sample(response: str, prompt: str = "", **extra: object) -> Sample:
    return Sample(prompt, response, True, dict(extra))


def make(kind: str, **args: Any) -> Any:
    return build_reward(kind, args, "reward")


def make_rollout(prompts: list[str], responses: list[bytes], finished: list[bool]) -> Rollout:
    num, seq = len(prompts), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    tokens = np.zeros((num, seq), np.int32)
    mask = np.zeros((num, seq), np.bool_)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        row = prompt.encode() + response
        tokens[i, : len(row)] = list(row)
        mask[i, len(prompt) : len(row)] = True
    reasons = [FinishReason.STOP if f else FinishReason.LENGTH for f in finished]
    return rollout_of(tokens, mask, row=np.arange(num) + 30, finish_reason=np.array(reasons, np.int8))


@dataclass
class Recorder(Reward):
    """Keeps its samples and gives out fixed scores."""

    scores: Any
    deterministic: bool = True
    batch_tokens: int | None = None
    calls: list[Sequence[Sample]] = field(default_factory=list)

    def __call__(self, samples: Sequence[Sample]) -> Any:
        self.calls.append(samples)
        return self.scores


def scores_of(given: Any, rollout: Rollout, extras: Sequence[Mapping[str, Any]] | None = None) -> Any:
    extras = [{} for _ in range(rollout.num_rows)] if extras is None else extras
    return score([Part("only", 1.0, Recorder(given))], ByteTokenizer(), rollout, extras)


TWO = make_rollout(["ab", "c"], [b"xyz\x02", b"w"], [True, False])


def test_vader_scores_the_response_alone() -> None:
    """VADER's own paper gives 0.8316 for the first sentence's plain form; the prompt must not move it."""
    reward = make("vader")
    text = "VADER is smart, handsome, and funny."
    scores = reward([sample(text), sample(text, prompt="A horrible, awful bore. "), sample("horrible"), sample("")])
    assert scores[0] == scores[1] == 0.8316
    assert scores[2] == SentimentIntensityAnalyzer().polarity_scores("horrible")["compound"] < -0.5
    assert scores[3] == 0.0


def test_characters() -> None:
    reward = make("characters", characters="ab")
    assert reward([sample("abba"), sample("axbx"), sample("xyz"), sample("")]) == [1.0, 0.5, 0.0, 0.0]


def test_length() -> None:
    reward = make("length", target=4)
    assert reward([sample("x" * n) for n in (0, 1, 4, 6, 8, 20)]) == [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]


def test_answer() -> None:
    reward = make("answer", field="sum")
    texts = ["2 + 3 = 5", "it is 6", "so 1,005.0", "none", "-5"]
    wanted = ["5", 5, 1005, 5, "-5"]
    assert reward([sample(t, sum=w) for t, w in zip(texts, wanted, strict=True)]) == [1.0, 0.0, 1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="no field 'sum'"):
        reward([sample("5")])


def test_an_answer_to_check_against_is_a_number_also_one_with_commas() -> None:
    assert make("answer")([sample("1000", answer="1,000")]) == [1]
    said = r"row 0: field .answer. of its prompt is no number: .#### 72. \(prompt .six.\)"
    with pytest.raises(RewardFailed, match=said):
        make("answer")([sample("72", "six", answer="#### 72")])


@pytest.mark.parametrize(
    ("kind", "args", "key"),
    [
        ("characters", {"characters": 5}, "args.characters"),
        ("repetition", {"n": 2.5}, "args.n"),
        ("length", {"target": "5"}, "args.target"),
        ("ensemble", {"members": ["vader", "vader"]}, "args.members"),
        ("ensemble", {"members": {"a": {"kind": "vader"}, "b": "vader"}}, "args.members.b"),
        ("ensemble", {"members": {"a": {"kind": "vader", "args": None}, "b": {"kind": "vader"}}}, "args.members.a"),
    ],
)
def test_an_argument_of_another_type_is_refused(kind: str, args: dict[str, Any], key: str) -> None:
    with pytest.raises(UnfitReward) as refused:
        make(kind, **args)
    assert refused.value.problem.key == f"reward.{key}"
    assert "must " in refused.value.problem.need


def test_format_is_of_the_whole_response() -> None:
    texts = ["so\n<answer>5</answer>\n", "<answer>5</answer> or so", "<answer></answer>", "5", ""]
    with closing(make("format")) as tags, closing(make("format", pattern=r"[a-z]+\.")) as words:
        assert tags([sample(text) for text in texts]).parts == {"": [1.0, 0.0, 0.0, 0.0, 0.0]}
        assert words([sample("yes."), sample("yes. No")]).parts == {"": [1.0, 0.0]}


def test_a_pattern_that_runs_away_is_stopped_and_the_next_text_is_matched() -> None:
    with closing(make("format", pattern="(a+)+b", timeout_s=0.5)) as reward:
        found = reward([sample("ab"), sample("a" * 60), sample("aab")])
    assert found == Scored({"": [1.0, 0.0, 1.0]}, None, {"stopped": [0.0, 1.0, 0.0]})


def test_overlong_falls_between_two_lengths() -> None:
    """DAPO's equation 13 with L_max = 8 and a cache of 4 tokens."""
    samples = [Sample("", "", response_ids=tuple(range(tokens))) for tokens in (0, 4, 5, 6, 8, 12)]
    assert make("overlong", free=4, most=8)(samples) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_repetition_counts_n_grams_of_tokens() -> None:
    """1 2 1 2 1 has the bigrams 12 21 12 21: 2 of 4 are distinct. 1 1 1 1 has one of three."""
    ids = [(1, 2, 1, 2, 1), (1, 1, 1, 1), (1, 2, 3), (1,), ()]
    found = make("repetition", n=2)([Sample("", "", response_ids=one) for one in ids])
    assert found == pytest.approx([-0.5, -2 / 3, 0.0, 0.0, 0.0])


def test_a_missing_eos_is_a_cut_response() -> None:
    assert make("missing_eos")([Sample("", "x", finished=True), Sample("", "x", finished=False)]) == [0.0, -1.0]


def test_parts_have_names_weights_and_settings_of_their_own() -> None:
    config = RewardPartsConfig(
        parts={"kind": PartConfig("vader"), "brief": PartConfig("length", weight=0.5, args={"target": 4})}
    )
    assert [(part.name, part.weight) for part in build_parts(config, "reward")] == [("kind", 1.0), ("brief", 0.5)]
    (only,) = build_parts(RewardPartsConfig(kind="length", args={"target": 4}), "reward")
    assert (only.name, only.weight) == ("length", 1.0)
    config.parts["brief"].args = {"aim": 4}
    with pytest.raises(UnfitReward, match=r"reward\.parts\.brief\.args\.aim: given 4; no such argument; length takes"):
        build_parts(config, "reward")


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (RewardConfig(), "reward.parts", "needs a reward"),
        (RewardConfig(args={"a": 1}), "reward.args", "need reward.kind"),
        (RewardConfig(kind="vader", parts={"a": PartConfig("vader")}), "reward.kind", "short form"),
        (RewardConfig(parts={"a": PartConfig("vader", weight=0.0)}), "reward.parts", "all weights are 0"),
        (RewardConfig(parts={"a.b": PartConfig("vader")}), "reward.parts.a.b", "letters, digits"),
    ],
)
def test_impossible_settings_are_found_without_building_anything(config: RewardConfig, key: str, said: str) -> None:
    (problem,) = reward_problems(config)
    assert problem.key == key
    assert said in problem.need


def test_score_shows_the_reward_all_of_a_row() -> None:
    recorder = Recorder([0.25, -1.5])
    asked = [[{"role": "user", "content": "ab"}], None]
    scores = score([Part("only", 1.0, recorder)], ByteTokenizer(), TWO, [{"id": 1}, {}], asked)
    said = {"role": "assistant", "content": "xyz"}
    assert list(recorder.calls[0]) == [
        Sample("ab", "xyz", True, {"id": 1}, 30, (97, 98), (120, 121, 122, 2), (asked[0][0], said)),  # type: ignore[index]
        Sample("c", "w", False, {}, 31, (99,), (119,), ()),
    ]
    assert scores.scores.dtype == np.float32
    np.testing.assert_array_equal(scores.scores, [0.25, -1.5])
    np.testing.assert_array_equal(scores.parts["only"], [0.25, -1.5])


def test_the_score_is_the_weighted_sum_of_the_parts() -> None:
    """Parts of weight 0 are stored and count for nothing; a reward with several names its own; spread is kept apart."""
    parts = [
        Part("a", 2.0, Recorder([1.0, 2.0])),
        Part("b", -0.5, Recorder(Scored({"x": [4.0, 0.0], "y": [2.0, 2.0]}, [0.1, 0.2]))),
        Part("c", 0.0, Recorder([3e38, -3e38])),
    ]
    found = score(parts, ByteTokenizer(), TWO, [{}, {}])
    np.testing.assert_array_equal(found.scores, [2.0 - 3.0, 4.0 - 1.0])
    assert {name: array.tolist() for name, array in found.parts.items() if name != "c"} == {
        "a": [1.0, 2.0], "b.x": [4.0, 0.0], "b.y": [2.0, 2.0],
    }  # fmt: skip
    np.testing.assert_array_equal(found.disagreement["b"], np.array([0.1, 0.2], np.float32))
    names = ["scores", "scores.a", "scores.b.x", "scores.b.y", "scores.c", "disagreement.b"]
    assert list(found.arrays()) == names


def test_what_is_only_measured_is_kept_and_counts_for_nothing() -> None:
    found = score(
        [Part("a", 2.0, Recorder(Scored({"": [1.0, 2.0]}, None, {"odd": [9.0, 8.0]})))], ByteTokenizer(), TWO, [{}, {}]
    )
    assert found.scores.tolist() == [2.0, 4.0]
    assert {name: array.tolist() for name, array in found.parts.items()} == {"a": [1.0, 2.0], "a.odd": [9.0, 8.0]}


def test_batches_are_full_and_within_the_budget() -> None:
    assert list(token_batches([3, 1, 9, 2, 3], None)) == [[0, 1, 2, 3, 4]]
    assert list(token_batches([3, 1, 9, 2, 3], 6)) == [[2], [0, 4], [3, 1]]
    assert list(token_batches([], 6)) == []


def test_a_reward_that_takes_so_many_tokens_is_called_with_no_more() -> None:
    """Rows of 6 and 2 tokens under a budget of 7: one after the other, and each score in its row."""
    recorder = Recorder([1.0], batch_tokens=7)
    score([Part("only", 1.0, recorder)], ByteTokenizer(), TWO, [{}, {}])
    assert [[s.row for s in call] for call in recorder.calls] == [[30], [31]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_score_refuses_what_is_not_finite(bad: float) -> None:
    with pytest.raises(RewardFailed, match=r"reward 'only' of row 31 is .*, not a finite float32 \(prompt 'c'; 1 such"):
        scores_of([0.0, bad], TWO)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0.0] * 3, "reward 'only' gave 3 scores for 2 rows (30 to 31)"),
        ([[1.0], [2.0]], "gave an array (2, 1) for 2 rows"),
        (["a", "b"], "gave ['a', 'b']: not one number per row"),
        (None, "gave None: not one number per row"),
        (Scored({}), "gave no part"),
        (
            Scored({"x": [1.0, 2.0]}, None, {"x": [1.0, 2.0]}),
            "gave the same name to a part and to what is only measured",
        ),
        (Scored({"x": [1.0, 2.0]}, None, {"": [1.0, 2.0]}), "gave a part named ''"),
        (Scored({"": [1.0, 2.0]}, None, {"y": [1.0]}), "part 'y' gave 1 scores for 2 rows"),
        (Scored({"x": [1.0]}), "part 'x' gave 1 scores for 2 rows"),
        (Scored({"a/b": [1.0, 1.0]}), "gave a part named 'a/b'"),
        (Scored({"": [1.0, 1.0]}, [0.0, float("nan")]), "of row 31 is nan"),
    ],
)
def test_score_refuses_what_is_not_one_number_per_row(given: Any, said: str) -> None:
    with pytest.raises(RewardFailed) as failure:
        scores_of(given, TWO)
    assert said in str(failure.value)


def test_score_refuses_wrong_counts_of_extras() -> None:
    with pytest.raises(ValueError, match="1 extras were given for 2 rows"):
        scores_of([0.0, 0.0], TWO, [{}])


def test_an_ensemble_scores_a_row_alone_as_among_others() -> None:
    """numpy adds nine numbers along an axis in another order if the array has one column."""
    members = {f"m{i}": {"kind": "length", "args": {"target": 3 + 7 * i}} for i in range(9)}
    reward, rows = make("ensemble", members=members), [sample("a" * n) for n in (1, 5, 11, 40)]
    together, alone = reward(rows), [reward([row]) for row in rows]
    assert together.parts[""] == [one.parts[""][0] for one in alone]
    assert together.disagreement == [one.disagreement[0] for one in alone]

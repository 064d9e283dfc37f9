"""One suite for every reward that a config can name, and for users' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from stages.models.hf_files import ByteTokenizer
from stages.prompts import tokenise
from stages.rewards.protocol import Part, Sample, Scored
from stages.rewards.reasoning import load_problems
from stages.rewards.registry import REWARDS, UnfitReward, build_reward
from stages.score import samples_of, score
from storage.config import PromptsConfig
from storage.records import FinishReason, Rollout, Scores
from tests.support.judge_server import asked_text, completion, serving
from tests.support.reward_models import export_reward_model
from tests.support.sampled_rows import rollout_of

OWN = "tests.support.own_rewards"
PROBLEMS = PromptsConfig(url="reasoning-gym:chain_sum?size=6&seed=3", max_tokens=200, held_out=1)
RESPONSES = ["", "a nice day", "no, awful!!! 12", "<answer>5</answer>", "aaaa aaaa aaaa", "é 日本 \x00"]


@dataclass(frozen=True)
class Case:
    """A kind with arguments that suit it, and others that do not: (argument, value, what is said)."""

    kind: str
    args: dict[str, Any] = field(default_factory=dict)
    unfit: tuple[tuple[str, Any, str], ...] = ()


CASES = [
    Case("answer", {"field": "answer"}),
    Case("characters", {"characters": "aeiou"}, (("characters", "", "characters is empty"),)),
    Case(
        "judge",
        {"url": "to be served", "model": "m", "on_unparsed": 0.5, "rubric": "{response}", "read": "text"},
        (("concurrency", 0, "concurrency"), ("rubric", "{first}", "lacks {response}")),
    ),
    Case(
        "local_judge",
        {"path": "random:tiny", "on_unparsed": 0.5, "rubric": "{response}", "answers": {"a": 1, "e": 0}}
        | {"delimit": False},  # its context has 256 tokens
        (("path", "gone", "instruction-tuned"), ("answers", {"a": 1}, "two or more"), ("dtype", "int8", "bfloat16")),
    ),
    Case("length", {"target": 5}, (("target", 0, "target is 0"),)),
    Case("format", {"pattern": ".*day"}, (("pattern", "(", "not a regular expression"),)),
    Case("overlong", {"free": 4, "most": 12}, (("most", 4, "free is 4, most is 4"), ("free", -1, "free is -1"))),
    Case("repetition", {"n": 2}, (("n", 0, "n is 0"),)),
    Case("missing_eos"),
    Case("model", {"path": "to be written"}, (("dtype", "int8", "float32 or bfloat16"), ("path", "gone", "no model"))),
    Case("vader"),
    Case("reasoning_gym", {"extract": "last_number"}, (("extract", "first", "tags, last_number, all"),)),
    Case(
        "ensemble",
        {"members": {"a": {"kind": "vader"}, "b": {"kind": f"{OWN}:vowels", "args": {"gain": 0.5}}}},
        (("members", {"a": {"kind": "vader"}}, "2 members"), ("members", {"a": {}, "b": {}}, "must have a kind")),
    ),
    Case(f"{OWN}:vowels", {"gain": 2.0}),
    Case(f"{OWN}:two_parts"),
    Case(f"{OWN}:Prefix", {"text": "a"}, (("text", "", "text is empty"),)),
]


def rollout() -> Rollout:
    """Six problems of reasoning-gym with the responses, the last of which is cut."""
    table = tokenise(load_problems(PROBLEMS), ByteTokenizer(), PROBLEMS, seed=0)
    encoded = [ByteTokenizer().encode(text) for text in RESPONSES]
    encoded = [[*ids, 2] for ids in encoded[:-1]] + encoded[-1:]
    seq = table.tokens.shape[1] + max(map(len, encoded))
    tokens, mask = np.zeros((6, seq), np.int32), np.zeros((6, seq), np.bool_)
    for row, ids in enumerate(encoded):
        start = table.lengths[row]
        tokens[row, :start] = table.tokens[row, :start]
        tokens[row, start : start + len(ids)] = ids
        mask[row, start : start + len(ids)] = True
    reasons = [FinishReason.STOP] * 5 + [FinishReason.LENGTH]
    return rollout_of(tokens, mask, finish_reason=np.array(reasons, np.int8))


def extras() -> list[dict[str, Any]]:
    return [json.loads(json.dumps(item.extra)) for item in load_problems(PROBLEMS)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.kind)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    found: Case = request.param
    if found.kind == "judge":
        with serving(lambda body: completion(str(1 + len(asked_text(body)) % 5))) as served:
            yield replace(found, args=found.args | {"url": served.url})
        return
    if found.kind == "model":
        found = replace(found, args={"path": export_reward_model(tmp_path_factory.mktemp("reward") / "model")})
    yield found


@pytest.fixture(scope="module")
def part(case: Case) -> Iterator[Part]:
    reward = build_reward(case.kind, case.args, "reward", timeout_s=60)
    yield Part("part", 1.0, reward)
    reward.close()
    reward.close()  # twice is harmless


def scored(part: Part, rows: np.ndarray | slice = slice(None)) -> Scores:
    chosen = rollout().rows(rows)
    return score([part], ByteTokenizer(), chosen, [extras()[i] for i in chosen.prompt_index])


def test_the_suite_has_every_kind() -> None:
    assert REWARDS.keys() <= {case.kind for case in CASES}


def test_every_row_gets_a_finite_number_and_the_parts_sum_up(part: Part) -> None:
    found = scored(part)
    assert all(array.dtype == np.float32 and array.shape == (6,) for array in found.arrays().values())
    assert np.isfinite(np.stack([*found.arrays().values()])).all()
    counted = [
        array for name, array in found.parts.items() if name not in ("part.unparsed", "part.stopped")
    ]  # only measured
    np.testing.assert_allclose(sum(counted), found.scores, rtol=1e-6)
    assert all(name == "part" or name.startswith("part.") for name in found.parts)
    assert found.disagreement.keys() <= {"part"}
    assert all((spread >= 0).all() for spread in found.disagreement.values())


def test_a_row_has_the_same_score_whatever_is_beside_it(part: Part) -> None:
    """So shards and batches may be cut in any way."""
    if part.reward.deterministic:
        together, order = scored(part), np.array([5, 0, 3, 1, 4, 2])
        for name, array in scored(part, order).arrays().items():
            np.testing.assert_array_equal(array, together.arrays()[name][order], err_msg=name)
        alone = [float(scored(part, slice(row, row + 1)).scores[0]) for row in range(6)]
        assert alone == together.scores.tolist()


def test_it_changes_nothing_of_a_sample(part: Part) -> None:
    samples, before = (samples_of(ByteTokenizer(), rollout(), extras()) for _ in range(2))
    part.reward(samples)
    assert samples == before


def test_an_argument_that_there_is_not_is_refused_by_name(case: Case) -> None:
    with pytest.raises(UnfitReward, match="takes") as refusal:
        build_reward(case.kind, {**case.args, "colour": 1}, "reward.parts.x")
    assert refusal.value.problem.key.startswith("reward.parts.x.args")
    assert "colour" in str(refusal.value)
    for name in case.args:
        assert name in refusal.value.problem.need


def test_an_argument_that_cannot_work_is_refused(case: Case) -> None:
    for name, value, said in case.unfit:
        with pytest.raises(UnfitReward, match=r"reward\.parts\.x\.args") as refusal:
            build_reward(case.kind, {**case.args, name: value}, "reward.parts.x")
        assert said in str(refusal.value)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UnfitReward, match=r"reward\.kind: given 'vadr'; known are answer, characters, .* vader, and"):
        build_reward("vadr", {}, "reward")
    with pytest.raises(UnfitReward, match=r"reward\.args\.target: given null; must be given; length takes target"):
        build_reward("length", {}, "reward")


def test_what_is_wrong_with_a_member_is_said_of_the_member() -> None:
    members = {"a": {"kind": "vader"}, "b": {"kind": "length", "args": {"target": 0}}}
    with pytest.raises(UnfitReward, match=r"reward\.args\.members\.b\.args: given .*target is 0"):
        build_reward("ensemble", {"members": members}, "reward")


def test_an_ensemble_is_the_mean_of_its_members_and_their_spread() -> None:
    members = {"a": {"kind": "length", "args": {"target": 2}}, "b": {"kind": "length", "args": {"target": 4}}}
    given = build_reward("ensemble", {"members": members}, "reward")([Sample("", "xx"), Sample("", "xxxx")])
    assert given == Scored({"": [0.75, 0.5]}, [0.25, 0.5])

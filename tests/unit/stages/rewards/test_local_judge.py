"""The judge in this process: its verdicts are those of the judge behind an endpoint that serves the same model (by
transformers, over HTTP)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from stages.models.hf_files import ByteTokenizer, read_tokenizer
from stages.models.hf_weights import write_model
from stages.rewards.judges.rewards import JudgeReward, LocalJudgeReward
from stages.rewards.learned import ModelReward
from stages.rewards.protocol import RewardFailed, Sample, Scored
from stages.rewards.registry import UnfitReward, build_reward
from tests.support.judge_server import language_model, serving
from tests.support.paths import ROOT
from tests.support.reward_models import export_reward_model

SMOLLM2 = ROOT / "assets" / "smollm2-135m-instruct"
GRADED: dict[str, Any] = {
    "rubric": "{prompt}: {response}? ",
    "answers": {"a": 0.0, "e": 1.0, "t": 4.0},
    "likeliest": 256,
    "delimit": False,  # the context has 256 tokens
}
MOST_OF_20: dict[str, Any] = GRADED | {"answers": {chr(n): n / 100 for n in range(33, 127)}, "likeliest": 20}
PAIRWISE: dict[str, Any] = {"rubric": "{prompt}: {first} or {second}? ", "against": "group", "likeliest": 256}
PAIRWISE["delimit"] = False
RESPONSES = [("good", "a day"), ("bad", "no"), ("good", "one more, and a longer one"), ("bad", "it's é"), ("good", "a")]


@pytest.fixture
def make() -> Iterator[Callable[..., LocalJudgeReward]]:
    """Judges that end with the test; with the last of them this process is in no gang any more."""
    made: list[LocalJudgeReward] = []

    def one(path: str, **args: Any) -> LocalJudgeReward:
        made.append(LocalJudgeReward(path, **{"on_unparsed": -1.0} | args))
        return made[-1]

    yield one
    for judge in made:
        judge.close()
        judge.close()
    assert not dist.is_initialized()


def samples() -> list[Sample]:
    return [Sample(prompt, response, row=row) for row, (prompt, response) in enumerate(RESPONSES)]


def served_scores(path: Path | str, tokenizer: Any, **args: Any) -> Scored:
    """By a server with transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answer = language_model(model, tokenizer.apply_chat_template, lambda ids: tokenizer.decode(ids, skip_special=False))
    with serving(answer) as served:
        judge = JudgeReward(served.url, "m", **{"on_unparsed": -1.0} | args)
        try:
            return judge(samples())
        finally:
            judge.close()


def assert_same(found: Scored, expected: Scored, atol: float = 2e-5) -> None:
    for one, other in ((found.parts, expected.parts), (found.measured, expected.measured)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=atol)
    if expected.disagreement is not None:
        np.testing.assert_allclose(found.disagreement, expected.disagreement, atol=atol)


@pytest.mark.parametrize("args", [GRADED, PAIRWISE, MOST_OF_20], ids=["graded", "pairwise", "of 20"])
@pytest.mark.parametrize("pass_tokens", [None, 400])
def test_verdicts_are_those_of_the_same_model_behind_an_endpoint(
    tmp_path: Path, make: Callable[..., LocalJudgeReward], args: dict[str, Any], pass_tokens: int | None
) -> None:
    write_model(tmp_path / "model", "random:tiny", {}, "float32")
    expected = served_scores(tmp_path / "model", ByteTokenizer(), **args)
    judge = make("random:tiny", **args, pass_tokens=pass_tokens)
    found = judge(samples())
    assert np.ptp(found.parts[""]) > 0.01
    assert_same(found, expected)
    assert judge.deterministic is (pass_tokens is None and args is not PAIRWISE)


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make assets")
def test_a_real_model_with_its_chat_template_gives_the_same_verdicts(make: Callable[..., LocalJudgeReward]) -> None:
    args: dict[str, Any] = {
        "rubric": "Text: {prompt} {response}\nIs it long? Answer yes or no.",
        "system": "Answer in one word.",
        "answers": {"Yes": 1.0, "No": 0.0, "yes": 1.0, "no": 0.0},
    }
    expected = served_scores(SMOLLM2, read_tokenizer(str(SMOLLM2)), **args)
    found = make(str(SMOLLM2), **args)(samples())
    assert not any(found.measured["unparsed"])
    assert np.ptp(found.parts[""]) > 0.005
    assert_same(found, expected, atol=2e-4)


def test_it_shares_the_process_with_a_reward_model(tmp_path: Path, make: Callable[..., LocalJudgeReward]) -> None:
    learned = ModelReward(export_reward_model(tmp_path / "model"))
    judge = make("random:tiny", **GRADED)
    before = judge(samples())
    assert len(learned([Sample("a", "b", prompt_ids=(97,), response_ids=(98,))])) == 1
    learned.close()
    assert judge(samples()) == before


def test_a_question_that_is_too_long_is_an_error_of_its_row(make: Callable[..., LocalJudgeReward]) -> None:
    judge = make("random:tiny", **GRADED)
    with pytest.raises(
        RewardFailed, match=r"row 1 \(prompt 'p'\): its question has \d+ tokens, the judge's context is"
    ):
        judge([Sample("p", "x"), Sample("p", "x" * 5000, row=1)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pass_tokens": 0}, r"args\.pass_tokens: given 0"),
        ({"likeliest": 0}, r"args\.likeliest: given 0"),
        ({"rubric": "{prompt}"}, r"args\.rubric: "),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnfitReward, match=r"reward\." + said):
        build_reward("local_judge", {"path": "random:tiny", "on_unparsed": 0.0, **GRADED} | given, "reward")


def test_what_answers_no_questions_is_refused(tmp_path: Path) -> None:
    path = export_reward_model(tmp_path / "model")
    with pytest.raises(UnfitReward, match="it is a reward model, which cannot answer questions; use kind: model"):
        LocalJudgeReward(path, 0.0, **GRADED)


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="make assets")
def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    for file in SMOLLM2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnfitReward, match="asked the rubric's questions: the tokenizer has no chat template"):
        LocalJudgeReward(str(tmp_path), 0.0, **GRADED)

"""Tasks of reasoning-gym: the same prompts for the same seed, answers by the library's scorers, refusals by name."""

from __future__ import annotations

import json
import random
from contextlib import closing

import pytest
import reasoning_gym

from stages.prompts import read_source
from stages.rewards.protocol import RewardFailed, Sample, Scored
from stages.rewards.reasoning import ReasoningReward
from storage.config import PromptsConfig
from storage.prompts import PromptItem, PromptsError


def source(url: str, **changes: object) -> list[PromptItem]:
    return read_source(PromptsConfig(url=f"reasoning-gym:{url}", **changes))  # type: ignore[arg-type]


def answered(item: PromptItem, response: str) -> Sample:
    """Return a sample with the prompt's fields as a worker has them: from JSON."""
    return Sample(item.text or "", response, extra=json.loads(json.dumps(item.extra)))


def test_problems_are_the_librarys_for_the_seed() -> None:
    items = source("chain_sum?size=4&seed=7&max_terms=3")
    library = reasoning_gym.create_dataset("chain_sum", size=4, seed=7, max_terms=3)
    assert [(item.text, item.extra["answer"]) for item in items] == [(p["question"], p["answer"]) for p in library]
    assert source("chain_sum?size=4&seed=7&max_terms=3") == items
    assert source("chain_sum?size=4&seed=8&max_terms=3") != items


def test_what_is_said_after_a_question() -> None:
    (plain, *_), (tags, *_) = source("chain_sum?size=2"), source("chain_sum?size=2&instruction=tags")
    (own, *_) = source("chain_sum?size=2&instruction=Only%20the%20number.", format="chat")
    assert tags.text == f"{plain.text}\nGive the final answer between <answer> and </answer>, and nothing after it."
    assert own.messages == [{"role": "user", "content": f"{plain.text}\nOnly the number."}]


@pytest.mark.parametrize("task", ["chain_sum", "fraction_simplification", "leg_counting", "shortest_path", "countdown"])
@pytest.mark.parametrize("extract", ["tags", "all"])
def test_the_right_answer_scores_1_and_none_less(task: str, extract: str) -> None:
    """This includes tasks whose problems JSON cannot hold: they are made again. Countdown's own answer is an
    expression."""
    items = source(f"{task}?size=3&seed=5")
    answers = [item.extra["answer"] for item in items]
    said = [f"I think\n<answer>{a}</answer>" if extract == "tags" else a for a in answers]
    with closing(ReasoningReward(extract)) as reward:
        right = reward([answered(i, s) for i, s in zip(items, said, strict=True)])
        wrong = reward([answered(item, "no idea") for item in items])
    assert right == Scored({"": [1.0] * 3}, None, {"stopped": [0.0] * 3})
    assert max(wrong.parts[""]) < 0.5


def test_the_last_number_counts() -> None:
    (item, *_) = source("chain_sum?size=1&seed=5")
    answer = item.extra["answer"]
    texts = [f"1 and 2 make {answer}", f"{answer} is not 99999", "none"]
    with closing(ReasoningReward("last_number")) as reward:
        assert reward([answered(item, text) for text in texts]).parts == {"": [1.0, 0.0, 0.0]}


def test_scoring_leaves_the_random_state_alone() -> None:
    (item, *_) = source("chain_sum?size=1")
    state = random.getstate()
    with closing(ReasoningReward()) as reward:
        reward([answered(item, "<answer>1</answer>")])
    assert random.getstate() == state


def test_a_row_of_another_source_is_named() -> None:
    said = r"row 3 is no problem of reasoning-gym \(prompts.url=reasoning-gym:TASK\)"
    with closing(ReasoningReward()) as reward, pytest.raises(ValueError, match=said):
        reward([Sample("hi", "5", row=3)])


def test_a_problem_of_another_library_is_an_error_of_the_run() -> None:
    (item, *_) = source("chain_sum?size=1&seed=5")
    other = Sample("p", "5", extra=item.extra | {"answer": "another"}, row=4)
    with closing(ReasoningReward()) as reward, pytest.raises(RewardFailed, match=r"row 4: .*another version"):
        reward([other])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("chain_sums", ("'chain_sums': no such task", "chain_sum")),
        ("chain_sum?terms=3", ("chain_sum has no 'terms'; it has", "min_terms", "and instruction")),
        ("chain_sum?size=0", ("size must be 1 or more",)),
        ("chain_sum?size=many", ("size must be 1 or more",)),
        ("chain_sum?min_terms=9&max_terms=2", ("chain_sum refuses", "min_terms")),
    ],
)
def test_a_source_that_cannot_work_is_refused_with_what_there_is(url: str, said: tuple[str, ...]) -> None:
    with pytest.raises(PromptsError) as refusal:
        source(url)
    assert str(refusal.value).startswith("prompts.url: given 'reasoning-gym:")
    for part in said:
        assert part in str(refusal.value)

"""Judges as rewards of a run: what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.identity import change_problems, config_sections
from pipeline.config.loading import config_hash, load_config
from pipeline.config.memory import planned_run
from pipeline.config.preflight import preflight
from pipeline.config.role_models import role_models
from pipeline.config.run import RunConfig
from pipeline.driver.preparation import new_identity
from pipeline.errors import ConfigError
from stages.models.spec import read_spec
from tests.support.configs import SCORES_APART, arguments, write_config

GRADED: dict[str, Any] = {"url": "http://127.0.0.1:9/v1", "model": "m", "on_unparsed": 0, "rubric": "{response}"}
PAIRWISE = GRADED | {"rubric": "{first} {second}", "against": "group"}
LOCAL = {"path": "random:tiny", "on_unparsed": 0, "rubric": "{prompt} {response}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


def load(folder: Path, kind: str, args: dict[str, Any], *changes: str) -> RunConfig:
    file, *fixed = arguments(folder)
    parts = f"reward.parts={json.dumps({'judged': {'kind': kind, 'args': args}})}"
    own = folder / "judged.yaml"
    own.write_text(Path(file).read_text().replace("reward: {kind: characters, args: {characters: aeiou}}\n", ""))
    return load_config([own], [*fixed, parts, *changes])


def refusal_of(folder: Path, kind: str, args: dict[str, Any], *changes: str) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(load(folder, kind, args, *changes))
    return str(refused.value)


def test_judges_that_can_work_pass_and_none_is_asked(folder: Path) -> None:
    """Nobody listens at that port, so a question would fail."""
    preflight(load(folder, "judge", GRADED, "evaluate.every=1"))
    preflight(load(folder, "judge", PAIRWISE, "rollout.responses_per_prompt=2"))
    preflight(load(folder, "local_judge", LOCAL, *SCORES_APART))


def test_a_comparison_within_the_group_needs_one(folder: Path) -> None:
    said = refusal_of(folder, "judge", PAIRWISE)
    assert said.startswith("reward.parts.judged.args.against: given 'group'; compares the responses to a prompt")
    two = ("rollout.responses_per_prompt=2", "evaluate.every=1")
    assert "evaluate.reward of" in refusal_of(folder, "judge", PAIRWISE, *two)
    preflight(load(folder, "judge", PAIRWISE, *two, "evaluate.reward.kind=vader"))


def test_a_judge_that_sees_no_end_of_a_response_is_said(folder: Path) -> None:
    members = {"members": {"a": {"kind": "judge", "args": GRADED | {"delimit": False}}, "b": {"kind": "vader"}}}
    (note,) = load(folder, "ensemble", members).judge_notes()
    assert note.startswith("reward.parts.judged.args.members.a.args.delimit is false: the judge cannot tell a response")
    assert load(folder, "judge", GRADED).judge_notes() == []


def test_a_budget_may_change_and_nothing_else_of_a_judge(folder: Path) -> None:
    members = {"members": {"a": {"kind": "judge", "args": GRADED}, "b": {"kind": "vader"}}}
    larger = {"members": members["members"] | {"a": {"kind": "judge", "args": GRADED | {"max_requests": 9}}}}
    other = {"members": members["members"] | {"a": {"kind": "judge", "args": GRADED | {"max_tokens": 9}}}}
    before = load(folder, "ensemble", members)
    assert [*change_problems(config_sections(before), load(folder, "ensemble", larger))] == []
    assert config_hash(load(folder, "ensemble", larger)) == config_hash(before)
    (problem,) = change_problems(config_sections(before), load(folder, "ensemble", other))
    assert problem.key == "reward.parts.judged.args.members.a.args.max_tokens"


def test_a_judge_in_an_ensemble_is_looked_at_too(folder: Path) -> None:
    members = {"members": {"a": {"kind": "judge", "args": PAIRWISE}, "b": {"kind": "vader"}}}
    said = refusal_of(folder, "ensemble", members)
    assert said.startswith("reward.parts.judged.args.members.a.args.against: given 'group'")


def test_retries_end_before_the_nodes_deadline(folder: Path) -> None:
    said = refusal_of(folder, "judge", GRADED, "cluster.deadline_s=360")
    assert said.startswith("reward.parts.judged.args.retry_s: given 300; with timeout_s = 60 must be less than clu")
    load(folder, "judge", GRADED | {"retry_s": 200}, "cluster.deadline_s=360")


def test_fields_that_prompts_lack_are_refused(folder: Path) -> None:
    args = GRADED | {"rubric": "{response} {answer}"}
    said = refusal_of(folder, "judge", args)
    assert said == (
        "reward.parts.judged.args: reads the field 'answer' of the prompts, which prompt 0 lacks (it has no other "
        "fields)"
    )
    rows = [{"prompt": f"word {i}", "answer": i} for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preflight(load(folder, "judge", args))
    said = refusal_of(folder, "judge", PAIRWISE | {"against": "ideal"})
    assert "reads the field 'ideal' of the prompts, which prompt 0 lacks (it has answer)" in said


@pytest.mark.parametrize(
    ("kind", "args"),
    [("answer", {}), ("ensemble", {"members": {"a": {"kind": "answer"}, "b": {"kind": "judge", "args": GRADED}}})],
)
def test_fields_are_looked_for_whoever_reads_them(folder: Path, kind: str, args: dict[str, Any]) -> None:
    said = refusal_of(folder, kind, args)
    assert said.startswith("reward.parts.judged.args: reads the field 'answer' of the prompts, which prompt 0 lacks")


def test_a_place_for_answers_that_cannot_be_written_to_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    said = refusal_of(folder, "judge", GRADED | {"cache": str(folder / "file" / "answers")})
    assert said.startswith(f"reward.parts.judged.args.cache: given '{folder}/file/answers'; cannot write to")


def test_a_local_judge_has_a_process_of_its_own_is_counted_and_held_to(folder: Path) -> None:
    said = refusal_of(folder, "local_judge", LOCAL)
    assert said.startswith("placement.roles.score: given 'all'; reward.parts.judged is a model of the scoring worker's")
    config = load(folder, "local_judge", LOCAL, *SCORES_APART)
    spec = read_spec("random:tiny")
    (scorer,) = planned_run(config, role_models(config, spec), on_gpus=False).scorers
    assert scorer.model.spec == spec
    assert "reward.parts.judged.args" in new_identity(config, preflight(config).prompts).identity.models

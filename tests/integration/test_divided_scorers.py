"""Reward models and local judges whose gang divides them over its ranks: the scores of one rank, by processes over gloo
and in a run, which heals if a rank dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from stages.models.config import LayoutConfig
from stages.models.protocol import Rank
from stages.rewards.learned import PROCESS_MODELS
from stages.rewards.protocol import Sample, Scored
from stages.rewards.registry import build_reward
from tests.support.collectives import run_ranks
from tests.support.faulty_runtimes import VICTIM
from tests.support.paths import TINY
from tests.support.reward_models import export_reward_model
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, finish, placement, use_runtime

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tensor": 2}),
    "TP2, sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline": 2}),
    "DP2": (2, {}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
}
QUESTION = {"rubric": "{prompt}: {response}? ", "answers": {"a": 0.0, "e": 1.0, "t": 4.0}, "on_unparsed": 0.0}


def samples() -> list[Sample]:
    drawn = np.random.default_rng(0)
    rows = [drawn.integers(97, 123, size).tolist() for size in (5, 9, 30, 2, 17)]
    return [
        Sample(
            bytes(row[:2]).decode(), bytes(row[2:]).decode(), row=n, prompt_ids=(*row[:2],), response_ids=(*row[2:],)
        )
        for n, row in enumerate(rows)
    ]


def scores_of(model: str, *, leads: bool) -> list[list[float]]:
    """Return the scores of a reward model by rows, of one with a budget of tokens that its longest row exceeds, of a
    local judge, and of an ensemble that has a model and a rule. A rank that does not lead returns nothing."""
    judge = QUESTION | {"path": "random:tiny", "likeliest": 256, "delimit": False}
    rewards = (
        ("model", {"path": model}),
        ("model", {"path": model, "batch_tokens": 24}),
        ("local_judge", judge),
        (
            "ensemble",
            {
                "members": {
                    "a": {"kind": "model", "args": {"path": model}},
                    "b": {"kind": "characters", "args": {"characters": "aeiou"}},
                }
            },
        ),
    )
    found = []
    for kind, args in rewards:
        reward = build_reward(kind, args, "reward")
        try:
            if leads:
                given = reward(samples())
                found.append([*(given.parts[""] if isinstance(given, Scored) else given)])
            else:
                reward.follow(samples())
        finally:
            reward.close()
    return found


def _rank(index: int, folder: str, model: str, size: int, layout: dict[str, Any]) -> None:
    PROCESS_MODELS.join_gang(Rank(index, size, f"file://{folder}/rendezvous", 1), LayoutConfig(**layout))
    try:
        found = scores_of(model, leads=not index)
        if not index:
            (Path(folder) / "scores.json").write_text(json.dumps(found))
    finally:
        PROCESS_MODELS.leave_gang()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_give_the_scores_of_one(tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    model = export_reward_model(tmp_path / "model")
    expected = scores_of(model, leads=True)
    assert all(np.ptp(scores) > 0.01 for scores in expected)
    run_ranks(_rank, size, str(tmp_path), model, size, layout)
    found = json.loads((tmp_path / "scores.json").read_text())
    assert len(found) == len(expected)
    for scores, of_one in zip(found, expected, strict=True):
        np.testing.assert_allclose(scores, of_one, atol=1e-5)


DIVIDED = "{workers: 2, layout: {tensor: 2}}"


def run_of(folder: Path, name: str, score: str, *changes: str) -> RunConfig:
    """Run tiny.yaml with a model as the reward, evaluations included, in a gang with these settings. A rule is
    measured."""
    part = f"{{kind: model, args: {{path: {folder / 'model'}, batch_tokens: 64}}}}"
    rule = "{kind: characters, weight: 0, args: {characters: aeiou}}"
    whole = "reward: {kind: characters, args: {characters: aeiou}}"
    text = TINY.read_text().replace(whole, f"reward: {{parts: {{learned: {part}, vowels: {rule}}}}}")
    (folder / "learned.yaml").write_text(text)
    gangs = placement(f"{{all: {{}}, score: {score}}}", score="score", others="all")
    return finish(
        load_config([folder / "learned.yaml"], [*arguments(folder, name, gangs, "steps=2", *QUIET, *changes)[1:]])
    )


@pytest.mark.full
def test_a_run_scores_as_with_one_rank_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that heals shares the devices of the scoring gang, too."""
    export_reward_model(tmp_path / "model")
    one, divided = run_of(tmp_path, "one", "{}"), run_of(tmp_path, "divided", DIVIDED)
    of_one, of_two = (
        open_history(config).store.read_step("score", 0, config.rollout.shards) for config in (one, divided)
    )
    np.testing.assert_allclose(of_two.scores, of_one.scores, atol=1e-5)
    np.testing.assert_array_equal(of_two.parts["vowels"], of_one.parts["vowels"])
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:DyingScorerRuntime")
    healed = run_of(tmp_path, "healed", DIVIDED, "placement.device_sharing=[[all, score]]")
    assert (healed.run_dir / "died").exists()
    assert outputs(healed) == outputs(divided)
    monkeypatch.undo()
    assert main(["replay", str(healed.run_dir), "--step", "1", "--stage", "score", "--shard", str(VICTIM.shard)]) == 0

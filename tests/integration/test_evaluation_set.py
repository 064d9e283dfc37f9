"""Evaluations on prompts of their own: a whole run, and all that reads it. `stageline evaluate` repeats its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cli.evaluate import evaluate_model, evaluation_config
from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.rows import response_pairs, token_decoder
from stages.prompts import last_questions
from tests.support.runs import ONE_GANG, QUIET, configure, finish

pytestmark = pytest.mark.processes

QUESTIONS = ["who?", "what is it?", "why", "when then?"]


@pytest.fixture(scope="module")
def asked(folder: Path) -> RunConfig:
    """Plain prompts are trained on, and chats are evaluated: greedily, with a reward of their own."""
    rows = [{"messages": [{"role": "user", "content": text}], "n": len(text)} for text in QUESTIONS]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = f"{{url: {folder}/asked.jsonl, format: chat, field: messages}}"
    reward = "{kind: characters, args: {characters: xyz}}"
    evaluate = f"evaluate={{every: 2, shards: 2, temperature: 0, prompts: {own}, reward: {reward}}}"
    changes = ("prompts.held_out=null", "prompts.max_tokens=64", evaluate)
    return finish(configure(folder, "asked", ONE_GANG, *QUIET, *changes))


def repeated(config: RunConfig, version: int) -> list[float]:
    """Scores of an exported version by `stageline evaluate`, by row."""
    paths = RunPaths(config.run_dir)
    path = str(paths.weights(version))
    return evaluate_model(path, evaluation_config(path, None, None, [str(paths.config)])).scores.scores.tolist()


def test_a_run_is_evaluated_on_its_own_prompts(asked: RunConfig) -> None:
    history = open_history(asked)
    decode = token_decoder(asked.stored.root, asked.model.path)
    pairs = response_pairs(history, decode, last_questions(RunPaths(asked.run_dir).prompts))
    assert [pair.prompt for pair in pairs] == QUESTIONS
    rollout, _ = history.read_evaluated_rows(4)
    start, length = rollout.tokens[1], int(rollout.prompt_lengths[1])
    assert decode(start[:length].tolist()) == "user: what is it?\nassistant: "
    trained = {int(i) for step in range(4) for i in history.store.read_step("generate", step, 2).prompt_index}
    assert trained.isdisjoint(rollout.prompt_index.tolist())


def test_what_reads_a_run_takes_its_evaluated_prompts(asked: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(asked.run_dir)
    assert main(["check", run]) == 0
    assert main(["replay", run, "--stage", "evaluate", "--step", "4", "--shard", "1"]) == 0
    assert main(["replay", run, "--stage", "evaluate_score", "--step", "4"]) == 0
    assert main(["inspect", run, "--rows", "1"]) == 0
    capsys.readouterr()


def test_the_figures_of_a_greedy_evaluation_are_repeated(asked: RunConfig) -> None:
    assert repeated(asked, 4) == open_history(asked).read_evaluated_rows(4)[1].scores.tolist()


def test_the_figures_of_a_sampled_evaluation_are_repeated(overlapped: RunConfig) -> None:
    """On prompts that were held out of the training source."""
    assert repeated(overlapped, 4) == open_history(overlapped).read_evaluated_rows(4)[1].scores.tolist()


def test_the_runs_own_figure_is_shown_only_beside_the_same_evaluation(
    overlapped: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(overlapped.run_dir)
    command = ["evaluate", str(paths.weights(4)), str(paths.config)]
    scores = open_history(overlapped).read_evaluated_rows(4)[1].scores
    assert main(command) == 0
    assert f"{scores.mean():.4f} ({len(scores)} of {len(scores)} scores are the same)" in capsys.readouterr().out
    assert main([*command, "evaluate.temperature=0"]) == 0
    assert "in the run" not in capsys.readouterr().out


def test_resume_refuses_another_evaluation_set(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run keeps its prompts. If its copy is lost, the file must still give the same ones."""
    copy = Path(shutil.copytree(asked.run_dir, tmp_path / "asked"))
    assert asked.evaluate.prompts.url is not None
    source = Path(asked.evaluate.prompts.url)
    assert main(["resume", str(copy), f"evaluate.prompts.url={tmp_path}/other.jsonl"]) == 2
    assert "refused evaluate.prompts.url: " in capsys.readouterr().err
    (copy / "prompts.npz").unlink()
    text = source.read_text()
    try:
        source.write_text(text.replace("who?", "whose?"))
        assert main(["resume", str(copy)]) == 2
    finally:
        source.write_text(text)
    assert "refused prompts.url: " in capsys.readouterr().err

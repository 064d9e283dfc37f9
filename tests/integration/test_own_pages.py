"""docs/first-run.md, docs/your-own.md and docs/tutorial.md, done word for word."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.cli.main import main
from tests.support.paths import ROOT
from tests.support.runs import QUIET

pytestmark = pytest.mark.processes

FILES = {
    "make_model.py", "make_questions.py", "make_chats.py", "make_pairs.py", "my_rewards.py", "own.yaml", "chat.yaml",
    "liked.yaml",
}  # fmt: skip
HERE = (*QUIET, "cluster.dashboard=null")
"""Settings that shorten a run for these tests."""


def run_script(path: Path) -> None:
    exec(compile(path.read_text("utf8"), path.name, "exec"), {"__name__": "__main__"})


def write_files(page: str, folder: Path) -> set[str]:
    """Write the files that a page gives, and return their names."""
    text = (ROOT / page).read_text("utf8")
    files = re.findall(r"^New file `([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for name, code in files:
        (folder / name).write_text(code, "utf8")
    return {name for name, _ in files}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text("utf8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory with the files of docs/your-own.md, and what its scripts make."""
    folder = tmp_path_factory.mktemp("own")
    assert write_files("docs/your-own.md", folder) == FILES
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for script in sorted(folder.glob("make_*.py")):
            run_script(script)
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [("own.yaml", "72 prompts to train on, 8 held out"), ("chat.yaml", "36 prompts to train on, 4 held")],
)
def test_every_config_of_the_page_would_run(config: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "reward.args.least=2",
            "reward.args: given {least: 2}; no such argument: least; my_rewards:digits takes most",
        ),
        ("reward.kind=my_rewards:letters", "has no function or class 'letters'; it has digits, Wanted"),
        ("reward.kind=their_rewards:x", "there is no module their_rewards in"),
        ("prompts.field=prompt", "given 'prompt', available: question, answer"),
        ("model.path=large-model", "large-model"),
    ],
)
def test_what_is_wrong_is_said_by_key(change: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "own.yaml", change]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.startswith(f"refused {change.partition('=')[0].removesuffix('.least')}: ")


def test_a_reward_model_of_ones_own_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's commands, plain and chat: the model orders nearly all unseen pairs rightly, and serves in a run."""
    lines = [line for kind, code in blocks_of("docs/your-own.md") if not kind for line in code.splitlines()]
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "stageline"
        assert main([*arguments, *QUIET] if arguments[0] == "reward" else arguments) == 0, line
    assert [" ".join(line.split()[1:3]) for line in lines] == ["reward train", "reward train", "check own.yaml"]
    for name in ("liked", "liked-chat"):
        assert json.loads(Path(f"runs/{name}/summary.json").read_text())["held_out"]["accuracy"] > 0.9
    assert "own.yaml: would run" in capsys.readouterr().out


def test_the_tutorial_ends_in_a_compared_pair(capsys: pytest.CaptureFixture[str]) -> None:
    commands = []
    for kind, code in blocks_of("docs/tutorial.md"):
        if kind == "python":
            names: dict[str, Any] = {}
            exec(compile(code, "docs/tutorial.md", "exec"), names)
            assert {name: len(table) for name, table in names["last"].items()} == {"weak": 8, "strong": 8}
            assert isinstance(names["difference"], pd.Series)
            assert not names["difference"].isna().any()
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line)
            commands.append(" ".join([program, *arguments[:1]]))
            if program == "python":
                run_script(Path(arguments[0]))
                continue
            assert program == "stageline"
            assert main([*arguments, *HERE] if arguments[0] == "run" else arguments) == 0, line
    assert commands == [
        "python make_model.py", "python make_questions.py", "stageline check", "stageline run", "stageline run",
        "stageline inspect", "stageline replay", "stageline check", "stageline report", "stageline export",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "own.yaml: would run (72 prompts to train on, 8 held out)" in out
    assert "identical: difference must be 0" in out
    assert "weak - strong: " in out
    assert Path("pair.html").read_text("utf8").startswith("<!doctype html>")
    assert "model.safetensors" in {path.name for path in Path("weak-model").iterdir()}


@pytest.mark.full
@pytest.mark.smollm2
def test_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its runs end after a step here; docs/benchmarks.md says what they come to."""
    for name in ("conf", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert write_files("docs/first-run.md", tmp_path) == {"make_prompts.py", "my_reward.py", "my.yaml"}
    typed = [line for kind, code in blocks_of("docs/first-run.md") if not kind for line in code.splitlines()]
    assert typed[:2] == ["make install assets", "source .venv/bin/activate"]
    lines = typed[2:]
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "python":
            run_script(Path(arguments[0]))
        else:
            short = [*HERE, "steps=1", "evaluate.every=1"] if arguments[0] == "run" else []
            assert main([*arguments, *short]) == 0, line
    assert [line.split()[1] for line in lines] == [
        "make_prompts.py",
        "check",
        "run",
        "run",
        "inspect",
        "report",
        "export",
    ]
    assert "would run (96 prompts to train on, 24 held out)" in capsys.readouterr().out
    assert Path("my-model/adapter").is_dir()

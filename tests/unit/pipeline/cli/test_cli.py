"""The command line: exit codes, one message on stderr, and nothing started where something is refused."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path

import pytest

import stageline
from pipeline.cli.main import COMMANDS, main
from pipeline.config.loading import load_config, to_yaml
from pipeline.config.preflight import Preflight, preflight
from pipeline.config.run import RunConfig
from storage.errors import DamagedCommit, StoreRefused
from storage.locks import held
from tests.support.configs import arguments, write_config


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    write_config(tmp_path)
    return arguments(tmp_path)


@pytest.mark.parametrize(
    ("change", "key", "part"),
    [
        ("stalenes=1", "stalenes", "did you mean staleness"),
        ("missing.yaml", "missing.yaml", "no such config file"),
        ("model.path=nowhere", "model.path", "nowhere"),
        ("rollout.shards=3", "rollout.shards", "1, 2, 4, 8"),
        ("staleness=-1", "staleness", "0 is synchronous PPO"),
        ("runs_dir=/proc/runs", "runs_dir", "/proc/runs"),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_refusal_is_one_message_and_exit_code_2(
    sources: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    change: str,
    key: str,
    part: str,
) -> None:
    assert main([command, *sources, change]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"refused {key}: ")
    assert part in err
    assert err.count("\n") == 1, "one message, on one line"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.yaml", "prompts.jsonl"]


def test_check_says_what_would_run(sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *sources]) == 0
    out = capsys.readouterr().out
    assert "would run (4 prompts to train on, 2 held out)" in out
    assert "engine embedded on" not in out, "nothing is unproven"
    assert "sandbox of" not in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
@pytest.mark.parametrize("function", ["inverse", "too_few", "texts", "nothing"])
def test_check_tries_the_reward(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    """The command's errors and return values, for either reward. Nothing is written."""
    changes = [f"evaluate.reward.parts={{own: {{kind: 'tests.support.own_rewards:{function}'}}}}"]
    assert main(["check", *sources, *changes]) == 2
    assert capsys.readouterr().err.startswith("refused evaluate.reward.parts.own.kind: ")
    assert main(["check", *sources, *changes, "--no-reward"]) == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.processes
@pytest.mark.parametrize(("change", "function"), [("steps=-1", "undefined"), ("model.critic_path=nowhere", "inverse")])
def test_check_tries_the_reward_of_a_config_with_other_mistakes(
    sources: list[str], capsys: pytest.CaptureFixture[str], change: str, function: str
) -> None:
    """One mistake is found in the settings, or in what they name on disk; the other in what the reward does. What the
    reward raised may name the wrong setting."""
    own = f"reward.kind=tests.support.own_rewards:{function}"
    assert main(["check", *sources, own, change]) == 2
    said = capsys.readouterr().err
    assert change.partition("=")[0] + ": given" in said
    assert f"reward.kind: given 'tests.support.own_rewards:{function}'; it failed on" in said
    assert main(["check", *sources, own, change, "--no-reward"]) == 2
    assert "own_rewards" not in capsys.readouterr().err


def test_every_wrong_part_of_a_reward_is_named(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parts = "reward={kind: null, parts: {a: {kind: nonsense}, b: {kind: vader}, c: {kind: length}}}"
    assert main(["check", *sources, parts]) == 2
    said = capsys.readouterr().err
    named = [line.removeprefix("refused ").partition(":")[0] for line in said.splitlines()]
    assert named == ["reward.parts.a.kind", "reward.parts.c.args.target"]


def test_a_field_that_the_prompts_lack_is_reported_once(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both the check of the prompts and the trial of the reward find it."""
    assert main(["check", *sources, "evaluate.reward.kind=answer"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refused evaluate.reward.args: reads the field 'answer' of the prompts")


@pytest.mark.processes
def test_check_shows_the_scores_of_made_up_responses(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both held-out prompts; an empty response, `42`, and a sentence with 14 characters, 4 of them vowels, cut at 8."""
    own = "evaluate.reward.parts={own: {kind: tests.support.own_rewards:vowels, args: {gain: 10}}}"
    assert main(["check", *sources, own]) == 0
    said = capsys.readouterr().out
    assert "evaluate.reward.parts.own (tests.support.own_rewards:vowels): scores from 0 to 20 on 6 made-up" in said
    assert main(["check", *sources, own.replace("vowels, args: {gain: 10}", "measures")]) == 0
    said = capsys.readouterr().out
    assert "\nnote: evaluate.reward.parts.own (tests.support.own_rewards:measures): the score 1 for each of 6" in said


def test_check_says_what_keeps_code_of_a_reward_confined(
    sources: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.rewards.sandbox.process.USED", ("seccomp",))
    assert main(["check", *sources, "evaluate.reward.kind=format"]) == 0
    said = "sandbox of evaluate.reward: keeps it from network (seccomp); not from files, processes\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["resume"], ["inspect", "--step", "0"], ["replay", "--step", "0", "--stage", "score"], ["export"]],
    ids=lambda arguments: str(arguments[0]),
)
def test_a_directory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    command, *options = arguments
    assert main([command, str(tmp_path), *options]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--from-checkpoint", "a=1", "b=2"], ["a=1", "--from-checkpoint", "b=2"], ["a=1", "b=2", "--from-checkpoint"]],
)
def test_resumes_changes_stand_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["resume", str(tmp_path), *arguments, "--unheard-of"])
    assert "--unheard-of" in capsys.readouterr().err
    assert main(["resume", str(tmp_path), *arguments]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check"], "required: CONFIG|RUN\n"),
        (["export", "x", "--version", "y"], "given 'y'; must be a number, or best"),
    ],
)
def test_wrong_arguments_are_said_plainly(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_brackets_and_long_paths_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    path = "[bold]" + "x" * 200 + ".yaml"
    assert main(["run", path]) == 2
    assert path in capsys.readouterr().err


def test_an_unknown_command_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fly"])
    assert ended.value.code == 2
    assert "fly" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, function = COMMANDS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function or "command"))
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: stageline {name}" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"stageline {stageline.__version__}\n"


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for code in (
        "0 done",
        "2 bad input",
        "3 a stage",
        "4 a worker's driver",
        "75 a job ended early",
        "130 interrupted",
    ):
        assert code in out


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x/events.jsonl"),
        StoreRefused("/runs/x/events.jsonl: No space left on device (ENOSPC). What is committed is whole and stays"),
    ],
    ids=["the driver's own file", "the store"],
)
def test_a_full_disk_is_one_message_and_exit_code_3(
    sources: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pipeline.cli.run.run", run)
    assert main(["run", *sources]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("failed /runs/x/events.jsonl: No space left on device (ENOSPC). What is committed is whole")


@pytest.mark.parametrize(("when", "what", "code"), [("prepare", "refused", 2), ("track_prompts", "failed", 3)])
def test_what_is_stored_wrongly_is_refused_before_a_run_has_started_and_a_failure_afterwards(
    sources: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    what: str,
    code: int,
) -> None:
    def damaged(*_: object, **__: object) -> None:
        raise DamagedCommit("score/step_000000/shard_0000.json: is not what was written")

    monkeypatch.setattr(f"pipeline.driver.run.{when}", damaged)
    assert main(["run", *sources]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{what} score/step_000000/shard_0000.json: is not what was written")


def test_a_run_that_came_and_went_while_this_one_was_checked_is_not_written_over(
    sources: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver, with another config perhaps, had the directory's lock in between."""

    def check(config: RunConfig, saved: Path | None = None) -> Preflight:
        config.run_dir.mkdir(parents=True)
        (config.run_dir / "events.jsonl").write_text("")
        return preflight(config, saved)

    monkeypatch.setattr("pipeline.config.preflight.preflight", check)
    assert main(["run", *sources]) == 2
    assert "holds this run already" in capsys.readouterr().err


@pytest.fixture
def earlier(sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an earlier run with another config and no update, and a driver that only notes its start."""
    config = load_config([sources[0]], [*sources[1:], "seed=5"])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    (config.run_dir / "events.jsonl").write_text("")
    (config.run_dir / "ledger/generate/step_000000").mkdir(parents=True)
    (config.run_dir / "ledger/generate/step_000000/shard_0000.json").write_text("{}")
    monkeypatch.setattr("pipeline.cli.run.run", lambda config, *_, **__: config.run_dir.mkdir())
    return config.run_dir


def commit_update(run_dir: Path) -> None:
    (run_dir / "ledger/update_critic/step_000000").mkdir(parents=True)
    (run_dir / "ledger/update_critic/step_000000/shard_0000.json").write_text("{}")


def test_a_run_without_an_update_makes_way(sources: list[str], earlier: Path) -> None:
    """Each keeps its files, under a name of its own."""
    for number in (1, 2):
        assert main(["run", *sources]) == 0
        aside = earlier.with_name(f"{earlier.name}-replaced-{number}")
        assert (aside / "config.yaml").exists()
        assert list(earlier.iterdir()) == []
        (earlier / "config.yaml").write_text("name: x\n")


def test_a_run_started_from_python_makes_way_too(
    sources: list[str], earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stageline.load_config(*sources)
    with pytest.raises(stageline.ConfigError):  # nothing ran here, so there is no run to open
        stageline.run(config)
    assert (earlier.with_name(f"{earlier.name}-replaced-1") / "config.yaml").exists()
    assert "the earlier run of this name, which committed no update, is in" in capsys.readouterr().out
    (earlier / "config.yaml").write_text("name: x\n")
    commit_update(earlier)
    with pytest.raises(stageline.ConfigError):
        stageline.run(config, overwrite=True, quiet=True)
    assert (earlier.with_name(f"{earlier.name}-replaced-2") / "ledger/update_critic").is_dir()
    assert capsys.readouterr().out == ""


def test_a_run_makes_no_way_for_one_that_cannot_work(sources: list[str], earlier: Path) -> None:
    assert main(["run", *sources, "model.path=nowhere"]) == 2
    assert [one.name for one in earlier.parent.iterdir()] == [earlier.name]


def test_a_run_that_is_running_makes_no_way(sources: list[str], earlier: Path) -> None:
    with held(earlier / "driver.lock"):
        assert main(["run", *sources]) == 2
    assert [one.name for one in earlier.parent.iterdir()] == [earlier.name]


@pytest.mark.parametrize(
    ("options", "answer", "moved"),
    [
        ([], None, False),
        (["--overwrite"], None, False),
        (["--overwrite"], "n", False),
        (["--overwrite"], "y", True),
        (["--overwrite", "--yes"], None, True),
    ],
)
def test_a_run_with_updates_makes_way_only_if_told(
    sources: list[str],
    earlier: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    answer: str | None,
    moved: bool,
) -> None:
    """None: nobody is at a terminal. Without --overwrite the run itself refuses (here it finds the directory)."""
    commit_update(earlier)
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    if options or moved:
        assert main(["run", *sources, *options]) == (0 if moved else 2)
    else:
        with pytest.raises(FileExistsError):
            main(["run", *sources])
    assert (earlier.with_name(f"{earlier.name}-replaced-1")).exists() == moved
    assert (earlier / "ledger").exists() != moved


def test_other_errors_of_the_system_are_not_hidden(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    monkeypatch.setattr("pipeline.cli.run.run", run)
    with pytest.raises(IsADirectoryError):
        main(["run", *sources])


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (StoreRefused("no"), 3)])
def test_a_reader_that_is_gone_does_not_change_how_a_run_ends(
    sources: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """A pipe here; a terminal in tests/integration/test_endings.py."""

    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pipeline.cli.run.run", run)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["run", *sources]) == code

"""submit, job, status, logs, cancel and sweep on a machine without Slurm; `tests/slurm` has one."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.answers import config_from_sources
from pipeline.cli.main import main
from pipeline.config.loading import load_reward_model_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.launch.commands import JobRecord, write_record
from tests.support.configs import arguments, write_config
from tests.support.fake_slurm import FakeSlurm
from tests.support.paths import ROOT

REWARD = ROOT / "conf/reward/tiny.yaml"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sources of a run on a host without Slurm's commands."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    write_config(tmp_path)
    return arguments(tmp_path)


@pytest.fixture
def submitted(sources: list[str], tmp_path: Path) -> RunPaths:
    """A run whose job is waiting, as far as this machine can tell."""
    paths = RunPaths(tmp_path / "runs/small")
    paths.job.mkdir(parents=True)
    (paths.job / "config.yaml").write_text(to_yaml(config_from_sources(sources)))
    write_record(paths.job, JobRecord("12", str(paths.job / "slurm-12.out")))
    (paths.job / "slurm-12.out").write_text("one\ntwo\nthr")
    return paths


def test_a_dry_run_prints_the_script(sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", sources[0], "--dry-run", *sources[1:]]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert f"run={tmp_path}/runs/small\n" in script
    assert not (tmp_path / "runs").exists()


def test_without_sbatch_no_job_is_made(sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *sources]) == 2
    error = capsys.readouterr().err
    assert error.startswith("refused submit: no sbatch on the path: submit on a login node")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["job", "sweep"])
def test_what_a_run_would_be_refused_for_is_refused_before(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    sweep = ["seed=0,1"] * (command == "sweep")
    assert main([command, *sources, "model.path=nowhere", *sweep]) == 2
    assert capsys.readouterr().err.startswith("refused model.path: ")
    assert not (tmp_path / "runs").exists()


def test_status_of_a_run_that_has_not_begun(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["status", str(submitted.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", f"{submitted.root}:", "0", "of", "10", "steps"]
    assert lines[1].split() == ["driver", "none"]
    assert lines[2].split() == ["job", "12", "is", "not", "known", "to", "Slurm", "(any", "more)"]
    assert lines[4] == f"goes on with `stageline submit {submitted.job}/config.yaml`"
    assert main(["status", "--runs-dir", str(submitted.root.parent)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["small", "0/10", "12", "stopped"]


def test_logs_are_the_ends_of_files(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["logs", str(submitted.root), "--lines", "1"]) == 0
    assert capsys.readouterr().out == "two\n", "whole lines alone"
    submitted.logs.mkdir()
    (submitted.logs / "all-0.log").write_text("built\n")
    assert main(["logs", str(submitted.root), "--gang", "all"]) == 0
    assert capsys.readouterr().out == "built\n"


def test_logs_are_followed_until_they_are_interrupted(
    submitted: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line once it is whole; a worker's file once it is there; from the beginning where a file became shorter."""
    output, log = submitted.job / "slurm-12.out", submitted.logs / "all-0.log"
    submitted.logs.mkdir()
    happens = iter(
        [
            lambda: output.write_text("one\ntwo\nthree\nfo"),
            lambda: output.write_text("one\ntwo\nthree\nfour\n"),
            lambda: output.write_text("five\n"),
            None,
            lambda: log.write_text("built\n"),
            None,
        ]
    )

    def next_look(_: float) -> None:
        change = next(happens)
        if change is None:
            raise KeyboardInterrupt
        change()

    monkeypatch.setattr("pipeline.cli.slurm_jobs.time.sleep", next_look)
    capsys.readouterr()
    assert main(["logs", str(submitted.root), "--follow", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "two\nthree\nfour\nfive\n"
    assert main(["logs", str(submitted.root), "--gang", "all", "--follow"]) == 0
    assert capsys.readouterr().out == "built\n"


def test_what_is_written_while_the_end_is_read_is_followed(
    submitted: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = submitted.job / "slurm-12.out"

    class Opened(io.BufferedReader):
        """Another process writes as soon as the end of the file was read."""

        def __next__(self) -> bytes:
            try:
                return super().__next__()
            except StopIteration:
                with io.FileIO(output, "a") as other:
                    other.write(b"three\n" if output.stat().st_size == 8 else b"")
                raise

    original = Path.open

    def opened(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return Opened(io.FileIO(path)) if (path, mode) == (output, "rb") else original(path, mode, *rest, **named)

    looks = iter([True])

    def next_look(_: float) -> None:
        if not next(looks, False):
            raise KeyboardInterrupt

    output.write_text("one\ntwo\n")
    monkeypatch.setattr("pipeline.cli.slurm_jobs.time.sleep", next_look)
    monkeypatch.setattr(Path, "open", opened)
    capsys.readouterr()
    assert main(["logs", str(submitted.root), "--follow"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_logs_of_what_has_not_begun_say_so(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (submitted.job / "slurm-12.out").unlink()
    capsys.readouterr()
    for command, name in (([], "job"), (["--gang", "all"], "all-0")):
        assert main(["logs", str(submitted.root), *command]) == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"{name} has printed nothing yet ({submitted.root}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["logs", "RUN", "--lines", "-1"], "refused --lines: given -1; must be 0 or more"),
        (["logs", "RUN", "--index", "5"], "refused --index: given 5; needs --gang NAME"),
        (["logs", "RUN", "--gang", "non"], "refused --gang: given 'non'; the run has all"),
        (["logs", "RUN", "--gang", "all", "--index", "3"], "refused --index: given 3; all has workers 0 to 0"),
        (["cancel", "RUN"], "refused cancel: no scancel on the path"),
        (["status", "nowhere"], "refused nowhere: holds no run"),
        (["status", "--runs-dir", "nowhere"], "refused --runs-dir: given 'nowhere'; there is no run in it"),
        (["cancel", "nowhere"], "refused nowhere: holds no run"),
    ],
)
def test_missing_things(
    submitted: RunPaths, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    capsys.readouterr()
    assert main([str(submitted.root) if word == "RUN" else word for word in command]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_run_that_was_not_submitted_has_no_job(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    (submitted.job / "job.json").unlink()
    for command in ("cancel", "logs"):
        capsys.readouterr()
        assert main([command, str(submitted.root)]) == 2
        assert "was not submitted as a job" in capsys.readouterr().err


def test_a_job_with_another_programs_files_is_no_run(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged run must not hide the other runs either."""
    runs = submitted.root.parent
    for name, text in {"model": to_yaml(load_reward_model_config([REWARD])), "torn": "steps: 3\n"}.items():
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(text)
    capsys.readouterr()
    assert main(["status", "--runs-dir", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["small", "0/10", "12", "stopped"]
    assert lines[2].startswith("torn ")
    assert "damaged: " in lines[2]
    assert not any("model" in line.split()[:1] for line in lines)


def test_silent_slurm_gets_no_advice(
    submitted: RunPaths, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.answer_nothing()
    for command in (["status", str(submitted.root)], ["status", "--runs-dir", str(submitted.root.parent)]):
        capsys.readouterr()
        assert main(command) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "12 Slurm does not answer: Unable to contact slurm" in out
        assert "goes on" not in out
    assert main(["cancel", str(submitted.root)]) == 2
    assert "Slurm does not answer" in capsys.readouterr().err


def test_silent_slurm_is_asked_once(
    submitted: RunPaths, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each time might be waited for a minute."""
    other = submitted.root.with_name("other")
    shutil.copytree(submitted.root, other)
    fake_slurm.answer_nothing()
    capsys.readouterr()
    assert main(["status", "--runs-dir", str(submitted.root.parent)]) == 0
    assert capsys.readouterr().out.count("Slurm does not answer") == 2
    assert len(fake_slurm.asked()) == 1


def test_a_run_without_a_job_is_submitted_not_resumed(submitted: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted sbatch leaves a run like this."""
    (submitted.job / "job.json").unlink()
    capsys.readouterr()
    assert main(["status", str(submitted.root)]) == 0
    assert f"goes on with `stageline submit {submitted.job}/config.yaml`" in capsys.readouterr().out


def test_refused_is_no_run(
    sources: list[str], tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_slurm.refuse("sbatch: error: no")
    assert main(["submit", *sources]) == 2
    assert capsys.readouterr().err.startswith("refused slurm: Slurm refuses the job: no; asked for: a node with ")
    assert main(["status", str(tmp_path / "runs/small")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_sweep_can_be_looked_at_before(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *sources, "--dry-run", "ppo.kl.coef=0.02,0.1", "seed=0,1"]) == 0
    runs = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert runs == [
        "small-coef0.02-seed0: ppo.kl.coef=0.02 seed=0",
        "small-coef0.02-seed1: ppo.kl.coef=0.02 seed=1",
        "small-coef0.1-seed0: ppo.kl.coef=0.1 seed=0",
        "small-coef0.1-seed1: ppo.kl.coef=0.1 seed=1",
    ]

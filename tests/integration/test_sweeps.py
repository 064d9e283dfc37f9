"""A sweep without Slurm: its runs one after the other, one MLflow experiment, a parent run, and a table."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from pipeline.cli.main import main
from pipeline.observe.tracking import WRITER_ENV
from tests.support.runs import ONE_GANG, QUIET, arguments


def test_runs_share_a_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in WRITER_ENV.items():
        monkeypatch.setenv(name, value)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    file, *changes = arguments(tmp_path, "swept", ONE_GANG, "steps=1", "evaluate.every=1", "tracking.report=false")
    sweep = ["sweep", file, "--here", *changes, f"tracking.uri={uri}", "ppo.kl.coef=0.02,0.1"]
    assert main(sweep) == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split() == ["ppo.kl.coef", "reward", "held-out"]
    assert [row.split()[0] for row in table[1:]] == ["0.02", "0.1"]
    assert main(sweep) == 0, "what is done is done again at once"
    capsys.readouterr()
    done = tmp_path / "runs/swept-coef0.1"
    assert main(["submit", f"{done}/config.yaml"]) == 0
    assert capsys.readouterr().out == f"nothing to submit: {done} is done, 1 of 1 steps\n"

    client = MlflowClient(uri)
    (experiment,) = (e for e in client.search_experiments() if e.name == "stageline")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"swept-sweep", "swept-coef0.02", "swept-coef0.1"}
    parent = runs.pop("swept-sweep")
    assert parent.data.params == {"ppo.kl.coef": "0.02, 0.1"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert runs["swept-coef0.1"].data.params["ppo.kl.coef"] == "0.1"
    assert {run.info.status for run in runs.values()} == {"FINISHED"}


def test_a_failed_run_of_a_sweep_goes_on_after_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag = tmp_path / "broken"
    flag.touch()
    reward = ("reward.kind=tests.support.own_rewards:broken", f"reward.args.while_there={flag}")
    file, *changes = arguments(tmp_path, "swept", ONE_GANG, "steps=1", *reward, *QUIET)
    sweep = ["sweep", file, "--here", *changes, "reward.args.gain=1,2,3"]
    assert main(sweep) == 3
    said = capsys.readouterr()
    assert "no gain of 2 today" in said.out + said.err
    ends = [row.split()[1:] for row in said.out.splitlines()[-3:]]
    assert [len(end) for end in ends] == [2, 5, 2]
    assert ends[1] == ["-", "-", "exit", "code", "3"]
    flag.unlink()
    assert main(sweep) == 0
    assert [len(row.split()) for row in capsys.readouterr().out.splitlines()[-3:]] == [3, 3, 3]

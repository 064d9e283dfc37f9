"""An alarm of a whole run is told and counted, and ends the run if the config says so. `resume` continues the run."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.observe.journal import EventKind, read_events
from tests.support.runs import arguments

ALWAYS = ("alarms.entropy_below=100", "steps=6")


def test_an_alarm_ends_a_run_that_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = tmp_path / "mlflow.db"
    command = arguments(
        tmp_path, "stopped", *ALWAYS, "alarms.stop=[entropy]", f"tracking.uri=sqlite:///{database}",
        "tracking.report=false", "tracking.also=[tensorboard]",
    )  # fmt: skip
    assert main(["run", *command]) == 3
    paths = RunPaths(tmp_path / "runs/stopped")
    captured = capsys.readouterr()
    assert "That ends the run (alarms.stop)" in captured.err
    assert f"stageline resume {paths.root}\n" in captured.err
    alarms = [event for event in read_events(paths.events) if event.kind is EventKind.ALARM]
    assert [(event.rule, event.step) for event in alarms] == [("entropy", 2)], "after three steps in a row"
    assert main(["resume", str(paths.root), "alarms.stop=[]"]) == 0
    assert re.search(r"alarms\W+2\W+entropy", capsys.readouterr().out)
    summary = json.loads(paths.summary.read_text())
    assert summary["steps"] == 6
    assert summary["alarms_by_rule"] == {"entropy": 2}, "counted anew from the resume on"
    assert summary["alarms"] == 2
    with sqlite3.connect(database) as tracked:
        tags = dict(tracked.execute("select key, value from tags").fetchall())
    assert list(paths.root.glob("tensorboard/events.out.tfevents.*"))
    assert tags["alarm.entropy"].endswith("below 100 (alarms.entropy_below), 3 steps in a row")

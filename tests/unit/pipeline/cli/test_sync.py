"""`stageline sync`: what it refuses before it starts anything, and what it says when there is something left."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from pipeline.cli import sync as command
from pipeline.cli.answers import STAGE_FAILED, SUCCESS
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.observe.tracking import Delivery
from tests.support.runs import configure


@pytest.fixture
def tracked(tmp_path: Path) -> RunConfig:
    config = configure(tmp_path, "run", f"tracking.uri=sqlite:///{tmp_path}/m.db")
    config.run_dir.mkdir(parents=True)
    RunPaths(config.run_dir).mlflow_spool.touch()
    return config


def test_what_cannot_be_delivered_is_refused(tmp_path: Path, tracked: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"mlflow_spool\.jsonl is not there; none holds no spool"):
        command.sync(configure(tmp_path, "none"), None)
    with pytest.raises(ConfigError, match=r"--to: given 'file:///x'; must begin with sqlite:/// .* or http"):
        command.sync(tracked, "file:///x")
    tracked.tracking.uri = None
    with pytest.raises(ConfigError, match=r"--to: not given, and tracking\.uri is null"):
        command.sync(tracked, None)


def test_a_misspelt_path_becomes_no_database(tmp_path: Path, tracked: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"--to: given 'sqlite:.*no/m\.db'; there is no directory .*no \(from /"):
        command.sync(tracked, f"sqlite:///{tmp_path}/no/m.db")
    tracked.tracking.uri = f"sqlite:///{tmp_path}/gone/m.db"
    with pytest.raises(ConfigError, match=r"tracking\.uri: .*gone \(from .*\); --to sqlite:///\.\.\. names another"):
        command.sync(tracked, None)
    assert not {"no", "gone"} & {path.name for path in tmp_path.iterdir()}


def test_a_run_that_goes_on_delivers_by_itself(tracked: RunConfig) -> None:
    with RunPaths(tracked.run_dir).lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="is running"):
            command.sync(tracked, None)


def test_what_it_says(tracked: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[str] = []
    left = 3

    def deliver(spool: Path, uri: str, timeout_s: float) -> Delivery:
        given.append(uri)
        return Delivery("r", left)

    monkeypatch.setattr(command, "deliver", deliver)
    assert command.sync(tracked, None) == STAGE_FAILED
    assert "3 items not delivered; they stay in the spool" in capsys.readouterr().err
    left = 0
    assert command.sync(tracked, "http://host:5000") == SUCCESS
    assert "all delivered; http://host:5000" in capsys.readouterr().out
    assert given == [tracked.tracking.uri, "http://host:5000"]

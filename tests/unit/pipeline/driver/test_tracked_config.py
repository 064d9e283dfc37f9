"""The part of a config that tracking gets (the settings that the run reads), and metrics without meaning under it."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.config.loading import flatten, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.driver import results
from pipeline.driver.errors import StageFailed
from pipeline.driver.tracked import off_metrics, tracked_params
from pipeline.observe.journal import AppendFailed, EventKind, Journal
from pipeline.observe.live import Screen
from pipeline.observe.tracking import Dataset, NullTracker, RunStatus
from storage.redaction import redacted
from tests.support.runs import configure, placement

THREE = placement(
    "{generate: {concurrent_shards: 2}, score: {}, train: {}}", generate="generate", score="score", others="train"
)
LATEST = ("rollout.versions=latest", "staleness=2", "ppo.kl.target=6", "ppo.entropy_coef=0.01")


def test_metrics_that_say_nothing(tmp_path: Path) -> None:
    exact = off_metrics(configure(tmp_path, "a"))
    assert {"kl/coef", "policy/surrogate", "critic/peak_memory_bytes", "mismatch/mean_abs"} <= exact
    assert {"staleness/fraction_0", "staleness/fraction_1"} <= exact
    assert "staleness/max" not in exact
    assert off_metrics(configure(tmp_path, "b", *LATEST)) == {"critic/peak_memory_bytes"}
    synchronous = off_metrics(configure(tmp_path, "c", "staleness=0"))
    assert {"staleness/max", "mismatch/mean_abs_all"} <= synchronous
    assert "mismatch/mean_abs" not in synchronous


class _KeepingTracker(NullTracker):
    """A tracker that keeps everything it is given."""

    def __init__(self, **given: Any) -> None:
        self.given: list[Any] = [given]
        self.artifacts: list[Path] = []

    def dataset(self, dataset: Dataset) -> None:
        self.given.append(dataset)

    def artifact(self, local_path: Path, artifact_dir: str) -> None:
        self.artifacts.append(local_path)


def test_no_password_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "https://me:secret@host"
    config = configure(tmp_path, "a", f"tracking.uri={secret}/mlflow", f"prompts.url={secret}/prompts.jsonl")
    monkeypatch.setattr(sys, "argv", ["stageline", "run", "c.yaml", f"prompts.url={secret}/prompts.jsonl"])
    monkeypatch.setattr(results, "MlflowTracker", _KeepingTracker)
    paths = RunPaths(config.run_dir)
    paths.root.mkdir(parents=True)
    paths.config.write_text(to_yaml(config), "utf8")
    tracker = results.open_tracker(config)
    assert isinstance(tracker, _KeepingTracker)
    results.track_prompts(config, tracker, "digest", 3, 2)
    opened, *datasets = tracker.given
    assert opened.pop("uri") == config.tracking.uri  # where it goes, and is not shown
    assert "secret" not in f"{redacted(opened)}"  # as the tracker writes them
    assert {data.source for data in datasets} == {"https://***@host/prompts.jsonl"}
    assert [path.name for path in tracker.artifacts] == ["config.yaml"]
    assert "secret" not in tracker.artifacts[0].read_text("utf8")
    assert opened["tags"]["mlflow.source.name"] == "stageline run c.yaml"
    assert "| weights |" not in opened["tags"]["mlflow.note.content"], "nothing is exported yet"
    assert opened["if_abandoned"]["stageline.ended"].startswith("killed")
    assert "stageline.ended" not in opened["tags"]


def test_a_resumed_run_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, "a", "tracking.uri=http://host")
    monkeypatch.setattr(results, "MlflowTracker", _KeepingTracker)
    paths = RunPaths(config.run_dir)
    paths.root.mkdir(parents=True)
    paths.config.write_text(to_yaml(config), "utf8")
    with Journal(paths.events) as journal:
        journal.now(EventKind.RUN_STARTED)
    tracker = results.open_tracker(config)
    assert isinstance(tracker, _KeepingTracker)
    (opened,) = tracker.given
    assert (opened["tags"]["stageline.ended"], opened["tags"]["stageline.resumes"]) == ("not yet", "1")
    assert "**Result:** running, resumed for the 1. time" in opened["tags"]["mlflow.note.content"]
    assert "**Result:** killed" in opened["if_abandoned"]["mlflow.note.content"]


def test_parameters_that_the_run_reads(tmp_path: Path) -> None:
    config = configure(tmp_path, "a", THREE)
    every, kept = flatten(config), tracked_params(config)
    assert kept.items() <= every.items()
    assert kept["placement.gangs.train.layout.tensor"] == "1"
    assert kept["placement.gangs.generate.concurrent_shards"] == "2"
    left_out = every.keys() - kept.keys()
    assert {
        "placement.gangs.generate.layout.tensor",
        "placement.gangs.train.concurrent_shards",
        "cluster.port",
    } <= left_out
    assert {"model.lora.alpha", "model.loss_scale.initial", "slurm.partition"} <= left_out
    assert not {key for key in left_out if key.startswith(("ppo.", "model.policy.", "sampling.", "reward."))}


class _FailingTracker(NullTracker):
    def close(self, status: RunStatus) -> None:
        raise AppendFailed("cannot write to mlflow_spool.jsonl: No space left on device")


def test_what_fails_after_an_error_is_a_note_of_it(tmp_path: Path) -> None:
    """The run's own error is what is raised, whatever becomes of the summary and the tracking."""
    config, printed = configure(tmp_path, "a"), io.StringIO()
    paths = RunPaths(config.run_dir)
    paths.summary.mkdir(parents=True)  # so that it cannot be written
    screen, error = Screen(Console(file=printed, width=1000)), StageFailed("score of step 1")
    history = results.open_history(config)
    results.conclude_despite_error(config, history, _FailingTracker(), str, screen, error)
    summary, tracking = error.__notes__
    assert summary.startswith("no summary could be made of what there is: IsADirectoryError: ")
    assert tracking.startswith("the tracking could not be closed: AppendFailed: cannot write to mlflow_spool.jsonl")
    assert printed.getvalue().splitlines() == error.__notes__

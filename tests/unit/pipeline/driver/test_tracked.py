"""The part of a config that tracking gets (the settings that the run reads), and metrics without meaning under it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.config.loading import flatten, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.driver import results
from pipeline.driver.tracked import SystemMetrics, gang_metrics, meaningless_metrics, trace_previews, tracked_params
from pipeline.errors import StageFailed
from pipeline.graph.graph import Node, step_nodes
from pipeline.observe.history import History
from pipeline.observe.journal import AppendFailed, EventKind, Journal
from pipeline.observe.live import Screen
from pipeline.observe.tracking import Dataset, RunStatus, Tracker
from pipeline.workers.messages import Outcome
from storage.redaction import redacted
from tests.support.report_runs import WrittenRun, write_run
from tests.support.runs import configure, placement

THREE = placement(
    "{generate: {concurrent_shards: 2}, score: {}, train: {}}", generate="generate", score="score", others="train"
)
LATEST = ("rollout.versions=latest", "staleness=2", "ppo.kl.target=6", "ppo.entropy_coef=0.01")


def test_metrics_that_say_nothing(tmp_path: Path) -> None:
    exact = meaningless_metrics(configure(tmp_path, "a"))
    assert {"kl/coef", "policy/surrogate", "critic/peak_memory_bytes", "mismatch/mean_abs"} <= exact
    assert {"staleness/fraction_0", "staleness/fraction_1"} <= exact
    assert "staleness/max" not in exact
    assert meaningless_metrics(configure(tmp_path, "b", *LATEST)) == {"critic/peak_memory_bytes"}
    synchronous = meaningless_metrics(configure(tmp_path, "c", "staleness=0"))
    assert {"staleness/max", "mismatch/mean_abs_all"} <= synchronous
    assert "mismatch/mean_abs" not in synchronous


class _KeepingTracker(Tracker):
    """A tracker that keeps everything it is given."""

    def __init__(self, **given: Any) -> None:
        self.given: list[Any] = [given]
        self.artifacts: list[Path] = []

    def log_dataset(self, dataset: Dataset) -> None:
        self.given.append(dataset)

    def log_artifact(self, local_path: Path, artifact_dir: str) -> None:
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
    assert opened["tags_if_abandoned"]["stageline.ended"].startswith("killed")
    assert "stageline.ended" not in opened["tags"]


def test_a_resumed_run_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, "a", "tracking.uri=http://host")
    monkeypatch.setattr(results, "MlflowTracker", _KeepingTracker)
    paths = RunPaths(config.run_dir)
    paths.root.mkdir(parents=True)
    paths.config.write_text(to_yaml(config), "utf8")
    with Journal(paths.events) as journal:
        journal.append_now(EventKind.RUN_STARTED)
    tracker = results.open_tracker(config)
    assert isinstance(tracker, _KeepingTracker)
    (opened,) = tracker.given
    assert (opened["tags"]["stageline.ended"], opened["tags"]["stageline.resumes"]) == ("not yet", "1")
    assert "**Result:** running, resumed for the 1. time" in opened["tags"]["mlflow.note.content"]
    assert "**Result:** killed" in opened["tags_if_abandoned"]["mlflow.note.content"]


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
        "cluster.address",
    } <= left_out
    assert {"model.lora.alpha", "slurm.partition"} <= left_out
    assert not {key for key in left_out if key.startswith(("ppo.", "model.policy.", "sampling.", "reward."))}


class _FailingTracker(Tracker):
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


def test_sums_by_gang() -> None:
    gpu = {"utilization": 50, "memory-used": 10}
    workers: list[tuple[str, dict[str, Any]]] = [
        ("train", {"cpu": 90.0, "memory": 100, "gpu": gpu}),
        ("train", {"cpu": 110.0, "memory": 50, "gpu": {"utilization": None, "memory-used": 5}}),
        ("score", {"cpu": 1.0, "memory": 7}),
        ("late", {}),
    ]
    assert gang_metrics(workers) == {
        "system/late/cpu_percent": 0.0,
        "system/late/memory_bytes": 0.0,
        "system/score/cpu_percent": 1.0,
        "system/score/memory_bytes": 7.0,
        "system/train/cpu_percent": 200.0,
        "system/train/memory_bytes": 150.0,
        "system/train/gpu_percent": 25.0,
        "system/train/gpu_memory_bytes": 15.0,
    }


class Samples(Tracker):
    """Owns what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Any]] = []

    def log_metrics(self, step: int, values: Any) -> None:
        self.given.append((step, values))


def test_every_ten_seconds_from_the_runs_beginning() -> None:
    times = iter((100.0, 105.0, 110.0, 119.0, 121.0))
    worker = SimpleNamespace(name="own-gang-1", metrics={"cpu": 5.0, "memory": 3})
    scheduler: Any = SimpleNamespace(workers={"tcp://x": worker})
    tracker = Samples()
    system = SystemMetrics(scheduler, tracker, began=40.0, now=lambda: next(times))
    for _ in range(4):
        system.sample_if_due()
    assert [step for step, _ in tracker.given] == [70, 81]
    assert tracker.given[0][1]["system/own-gang/memory_bytes"] == 3.0
    assert tracker.given[0][1]["system/driver/memory_bytes"] > 0


def ran(history: History, step: int, stages: set[str]) -> list[tuple[Node, Outcome]]:
    """Return nodes of a step with their outcomes, as the driver has them."""
    found = []
    for node in step_nodes(history.spec, step):
        commit = history.ledger.find(node.address)
        if node.stage in stages and commit is not None:
            found.append((node, Outcome(node.address, "a0", commit.ref(), "w-0", 0, 1.0, 2.0, 0.0)))
    return found


@pytest.mark.parametrize(
    "stages",
    [{"update_policy"}, {"advantage", "update_policy"}, {"generate", "advantage", "update_policy"}],
    ids=["after a resume, the updates alone", "the rows are an earlier driver's", "all is this driver's"],
)
def test_a_step_is_shown_whole_whoever_ran_it(tmp_path: Path, stages: set[str]) -> None:
    history = write_run(tmp_path, WrittenRun("demo", steps=3)).history
    asked, answered = trace_previews("demo", 2, ran(history, 2, stages), history)
    assert (asked, answered) == ("demo · step 2 · v1", "reward 0.235 KL 0.5")


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    history = write_run(tmp_path, WrittenRun("demo", steps=3, done=1)).history
    assert trace_previews("demo", 2, [], history) == ("demo · step 2", "")

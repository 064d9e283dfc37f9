"""When a job is requeued no more: histories by hand, and progress in the ledger. `tests/slurm` runs the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.launch.requeues import JobEnd, count_committed, record_end, requeue_refusal
from storage.errors import StoreError
from storage.ledger import SPAN, Ledger
from tests.support.commits import commit_nothing
from tests.support.configs import arguments, write_config

IDLE = "committed nothing new (at most 3)"
LOST = "lost their driver, workers or batch node (at most 2)"


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("0 limit", None),
        ("0 limit, 0 limit, 0 limit", None),
        ("0 limit, 0 limit, 0 limit, 0 limit", f"3 requeues in a row {IDLE}"),
        ("0 limit, 0 limit, 0 limit, 7 limit", None),
        ("5 limit, 7 limit, 7 limit, 7 lost, 7 limit", f"3 requeues in a row {IDLE}"),
        (", ".join(f"{committed} limit" for committed in range(100)), None),
        ("1 limit, 2 limit, 3 limit, 4 lost", None),
        ("1 lost, 2 limit, 3 lost", None),
        ("1 lost, 2 limit, 3 lost, 4 lost", f"3 starts {LOST}"),
        ("0 limit, none, none, 0 lost", f"3 requeues in a row {IDLE}"),
    ],
)
def test_a_job_ends_by_what_its_attempts_committed_and_how_they_ended(history: str, expected: str | None) -> None:
    """Each start: what was committed at its end, and how it ended; `none`: nobody noted it."""
    ends = []
    for restart, text in enumerate(history.split(", ")):
        if text != "none":
            committed, how = text.split()
            ends.append(JobEnd(restart, (0, int(committed)), how, lost=how == "lost"))
    assert requeue_refusal(ends, restarts=2, requeues_without_progress=3) == expected


def test_progress_is_a_new_commit_and_not_its_way_into_a_segment(tmp_path: Path) -> None:
    seen = [count_committed(Ledger(str(tmp_path / "ledger")))]
    for step in (0, SPAN):
        ledger = commit_nothing(tmp_path, step)
        seen.append(count_committed(ledger))
    assert seen == [(0, 0), (0, 1), (0, 2)]
    first, _ = ledger.addresses()
    ledger.close(0, [first])
    assert count_committed(ledger) == (SPAN, 1)
    commit_nothing(tmp_path, SPAN + 1)
    assert count_committed(ledger) == (SPAN, 2)


def test_the_end_that_was_noted_first_counts_and_another_job_begins_anew(tmp_path: Path) -> None:
    """A node of the job says why; then the next start's script asks, which does not know."""
    said, unknown = JobEnd(0, (0, 4), "n1 failed", lost=True), JobEnd(0, (0, 4), "?", lost=False)
    later = JobEnd(1, (16, 9), "time limit", lost=False)
    assert record_end(tmp_path, "12_3", said) == [said]
    assert record_end(tmp_path, "12_3", unknown) == [said]
    assert record_end(tmp_path, "12_3", later) == [said, later]
    assert record_end(tmp_path, "13", unknown) == [unknown]
    (tmp_path / "attempts.json").write_text("[]")
    with pytest.raises(StoreError, match="is not what was written"):
        record_end(tmp_path, "13", later)


def test_the_script_is_answered_before_any_driver_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunPaths(tmp_path).job.mkdir()
    write_config(tmp_path)
    file, *changes = arguments(tmp_path)
    (RunPaths(tmp_path).job / "config.yaml").write_text(to_yaml(load_config([file], changes)))
    limits = ("--restarts", "20", "--without-progress", "1")
    codes = [
        main(["may-requeue", str(tmp_path), "--job", "7", "--restart", str(n), "--because", f"killed {n}", *limits])
        for n in range(2)
    ]
    assert codes == [0, 75]
    said = capsys.readouterr().out
    assert said.startswith("not requeued: 1 requeue in a row committed nothing new (at most 1)")
    assert "The last start (restart 1) ended: killed 1." in said
    assert f"`stageline submit {tmp_path}/job/config.yaml` continues" in said

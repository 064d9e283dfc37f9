"""All tests of `stageline doctor` on this machine, and its job for Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.main import main
from tests.support.paths import TINY


@pytest.mark.full
def test_this_machine_has_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--out", str(tmp_path / "out"), "--runs-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    (report,) = (tmp_path / "out").glob("doctor-*.json")
    document = json.loads(report.read_text())
    statuses = {result["name"]: result["status"] for result in document["results"]}
    assert {name for name, status in statuses.items() if status == "fault"} == set()
    computed = ("float32", "bfloat16", "layouts", "publication", "memory", "embedded", "ranks")
    assert {statuses[name] for name in computed} == {"ok"}
    assert "float32" in report.with_suffix(".txt").read_text()


def test_a_job_tests_the_nodes_that_a_config_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--submit", str(TINY), f"runs_dir={tmp_path}", "--out", str(tmp_path), "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in script
    assert "doctor --out" in script


@pytest.mark.parametrize(
    "option",
    [
        "--until=no_such_test",
        "--engine=vllm",
        "--threads=-3",
        "--deadline=0",
        "--model=nowhere",
        "seed=1",
        "--out=/proc/no_such_folder",
    ],
)
def test_an_option_that_means_nothing_is_refused(tmp_path: Path, option: str) -> None:
    assert main(["doctor", "--out", str(tmp_path), "--runs-dir", str(tmp_path), option]) == 2
    assert not [*tmp_path.glob("doctor-*")]

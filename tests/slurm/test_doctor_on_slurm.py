"""`stageline doctor --submit` on a real Slurm: every node of the job is tested, and the network between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.main import main
from tests.support.paths import TINY
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_runs import OVER, eventually

pytestmark = pytest.mark.processes


def test_every_node_is_tested(slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["placement.gangs.train.workers=2", "slurm.gangs={train: {nodes: 2}}", "slurm.gres=null"]
    options = ["--out", str(tmp_path), "--until", "nodes", "--submit", str(TINY)]
    assert main(["doctor", *options, f"runs_dir={tmp_path}", "name=nodes", *changes]) == 0
    job = capsys.readouterr().out.split("submitted job ")[1].split(":")[0]
    eventually(lambda: slurm.state(job) in OVER, f"job {job} is over")
    folder = tmp_path / "doctor-nodes"
    assert slurm.state(job) == "COMPLETED", [file.read_text() for file in folder.glob("*.out")]
    reports = {file.stem: json.loads(file.read_text())["results"] for file in folder.glob("doctor-*.json")}
    nodes = {name: next(result for result in results if result["name"] == "nodes") for name, results in reports.items()}
    assert len(nodes) >= 2
    assert {result["status"] for result in nodes.values()} == {"ok"}
    assert any(result["facts"].get("bytes_per_s", 0) > 0 for result in nodes.values())

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


PLAIN = ("placement.gangs.train.workers=2", "slurm.gangs={train: {nodes: 2}}")
HETEROGENEOUS = (
    "placement.gangs.train.workers=2",
    "slurm.gangs={train: {nodes: 2}, generate: {nodes: 1}, score: {beside: generate}}",
    "slurm.job=heterogeneous",
)


@pytest.mark.full
@pytest.mark.parametrize(("changes", "count"), [(PLAIN, 3), (HETEROGENEOUS, 3)], ids=["plain", "heterogeneous"])
def test_every_node_is_tested(
    slurm: SlurmCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: tuple[str, ...],
    count: int,
) -> None:
    """In a heterogeneous job the nodes of all components, which have jobs of their own, add up one tensor."""
    options = ["--out", str(tmp_path), "--until", "nodes", "--submit", str(TINY)]
    assert main(["doctor", *options, f"runs_dir={tmp_path}", "name=nodes", "slurm.gres=null", *changes]) == 0
    job = capsys.readouterr().out.split("submitted job ")[1].split(":")[0]
    eventually(lambda: slurm.state(job) in OVER, f"job {job} is over")
    folder = tmp_path / "doctor-nodes"
    assert slurm.state(job) == "COMPLETED", [file.read_text() for file in folder.glob("*.out")]
    reports = {file.stem: json.loads(file.read_text())["results"] for file in folder.glob("doctor-*.json")}
    nodes = {name: next(result for result in results if result["name"] == "nodes") for name, results in reports.items()}
    assert len(nodes) == count
    assert {result["status"] for result in nodes.values()} == {"ok"}
    (measured,) = (result for result in nodes.values() if "bytes_per_s" in result["facts"])
    assert f"{count} nodes add up" in measured["text"]

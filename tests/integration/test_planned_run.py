"""A plan for this machine's cores, run as it was written."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from tests.support.paths import TINY, TINY_PROMPTS
from tests.support.runs import QUIET, finish


def test_a_written_plan_runs_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    changes = [f"prompts.url={TINY_PROMPTS}", f"runs_dir={tmp_path}/runs", "name=planned", "cluster.dashboard=null"]
    assert main(["plan", str(TINY), *changes, *QUIET, "--devices", "2xcpu", "--write", str(file)]) == 0
    config = finish(load_config([str(file)], []))
    assert open_history(config).finished_steps() == [0, 1, 2, 3]
    summary = json.loads(RunPaths(config.run_dir).summary.read_text("utf8"))
    predictions = summary["predictions"]
    assert predictions["step"] == [config.predicted_s["step"], summary["wall_s"] / 4]
    assert predictions["generate"] == [config.predicted_s["generate"], summary["stage_s"]["generate"] / 4]
    assert predictions.keys() == config.predicted_s.keys()

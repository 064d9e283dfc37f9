"""A run that a judge behind an endpoint scores: it vanishes, the run stops and goes on, and asks only what is missing;
the key is written nowhere; replay asks nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.driver.results import open_history
from tests.support.judge_server import Reply, asked_text, completion, serving
from tests.support.paths import TINY
from tests.support.runs import arguments

pytestmark = pytest.mark.processes

KEY = "sk-not-to-be-written"
STEPS = 2
ANSWERED = 20
"""Questions before the judge vanishes: in the second shard of the first step."""


def grade_of(text: str) -> int:
    return 1 + sum(map(ord, text)) % 5


def test_a_judge_that_vanishes_stops_the_run_which_goes_on_where_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    left, lock, gone = ANSWERED, threading.Lock(), True

    def judge(body: Mapping[str, Any]) -> Reply:
        nonlocal left
        with lock:
            left -= 1
            vanished = gone and left < 0
        return Reply("", cut=True) if vanished else completion(f"Grade: {grade_of(asked_text(body))}")

    with serving(judge) as served:
        args = (
            f"{{url: '{served.url}', model: m, read: text, on_unparsed: 0, key_env: TEST_JUDGE_KEY, concurrency: 4, "
            "timeout_s: 5, patience_s: 5, rubric: '{prompt}|{response}'}"
        )
        text = re.sub(r"^reward: .*\n", f"reward: {{kind: judge, args: {args}}}\n", TINY.read_text(), flags=re.M)
        (folder / "judged.yaml").write_text(text)
        sources = [str(folder / "judged.yaml"), *arguments(folder, "judged")[1:], f"steps={STEPS}", "evaluate.every=0"]
        mlflow = f"tracking.uri=sqlite:///{folder}/judged.db"
        assert main(["run", *sources, mlflow, "tracking.plots=false"]) == 3
        shown = "".join(capsys.readouterr())
        assert "has answered nothing for" in shown
        assert "patience_s = 5" in shown
        run = folder / "runs" / "judged"
        assert kept(run) == ANSWERED
        gone = False
        before = len(served.asked)
        assert main(["resume", str(run)]) == 0
        config = load_config([folder / "judged.yaml"], [*sources[1:], mlflow, "tracking.plots=false"])
        distinct = {row["key"] for row in answers(run)}
        assert len(served.asked) - before == len(distinct) - ANSWERED
        assert served.headers[0]["Authorization"] == f"Bearer {KEY}"

        history = open_history(config)
        for step in range(STEPS):
            found = history.store.read_step("score", step, config.rollout.shards)
            assert list(found.parts) == ["judge", "judge.unparsed"]
            np.testing.assert_array_equal(found.scores, found.parts["judge"])
            assert not found.parts["judge.unparsed"].any()
            assert set(found.scores.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0}
            assert history.step_metrics(step)["reward/judge.unparsed/mean"] == 0
        assert verify_run(config).faults == []
        asked = len(served.asked)
        capsys.readouterr()
        assert main(["replay", str(run), "--step", "1", "--stage", "score"]) == 0
        assert len(served.asked) == asked, "all of it is kept"

    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (run / "judge").glob("answers-*.jsonl") for line in file.open()]


def kept(run: Path) -> int:
    return len(answers(run))

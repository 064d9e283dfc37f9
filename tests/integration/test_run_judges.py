"""A run that a judge behind an endpoint scores. The judge vanishes, or the process that asks it is killed. The run
continues, asks only what is missing, and ends like an undisturbed run. The key is written nowhere. `replay` asks
nothing."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.journal import EventKind, read_events
from tests.support.judge_server import Reply, asked_text, completion, serving
from tests.support.paths import TINY
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET, arguments, finish

pytestmark = pytest.mark.processes

KEY = "sk-not-to-be-written"
STEPS = 2
ANSWERED = 20
"""Questions before the judge vanishes: in the second shard of the first step."""


AT_ONCE = 4
CHANGES = (f"steps={STEPS}", "evaluate.every=0")


def graded(body: Mapping[str, Any]) -> Reply:
    return completion(f"Grade: {1 + sum(map(ord, asked_text(body))) % 5}")


def judged_by(folder: Path, name: str, url: str, silence_s: int = 120) -> Path:
    """The tiny run with a judge for its reward, as a config file. A judge silent for `silence_s` is given up."""
    args = (
        f"{{url: '{url}', model: m, read: text, on_unparsed: 0, key_env: TEST_JUDGE_KEY, concurrency: {AT_ONCE}, "
        f"timeout_s: {silence_s}, retry_s: {silence_s}, delimit: false, "
        "rubric: '{prompt}|{response}'}"
    )
    text = re.sub(r"^reward: .*\n", f"reward: {{kind: judge, args: {args}}}\n", TINY.read_text(), flags=re.M)
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module", autouse=True)
def _key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_JUDGE_KEY", KEY)
        yield


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    """By another judge that answers alike."""
    with serving(graded) as served:
        file = judged_by(folder, "calmly-judged", served.url)
        return finish(load_config([file], [*arguments(folder, "calmly-judged")[1:], *CHANGES, *QUIET]))


def test_a_judge_that_vanishes_stops_the_run_which_goes_on_where_it_was(
    folder: Path, undisturbed: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    left, lock, gone = ANSWERED, threading.Lock(), True

    def judge(body: Mapping[str, Any]) -> Reply:
        nonlocal left
        with lock:
            left -= 1
            vanished = gone and left < 0
        return Reply("", cut=True) if vanished else graded(body)

    with serving(judge) as served:
        file = str(judged_by(folder, "judged", served.url, silence_s=20))
        sources = [file, *arguments(folder, "judged")[1:], *CHANGES]
        mlflow = f"tracking.uri=sqlite:///{folder}/judged.db"
        assert main(["run", *sources, mlflow, "tracking.report=false"]) == 3
        shown = "".join(capsys.readouterr())
        assert "has answered nothing for" in shown
        assert "retry_s = 20" in shown
        run = folder / "runs" / "judged"
        assert kept(run) == ANSWERED
        gone = False
        before = len(served.asked)
        assert main(["resume", str(run)]) == 0
        config = load_config([file], [*sources[1:], mlflow, "tracking.report=false"])
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
            assert history.read_step_metrics(step)["reward/judge.unparsed/mean"] == 0
        assert verify_run(config).faults == []
        assert outputs(config) == outputs(undisturbed)
        asked = len(served.asked)
        capsys.readouterr()
        assert main(["replay", str(run), "--step", "1", "--stage", "score"]) == 0
        assert len(served.asked) == asked, "all of it is kept"

    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def test_a_budget_ends_the_run_which_goes_on_with_a_larger_one(
    folder: Path, undisturbed: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends as by `alarms.stop`, and says why and how to continue. Requests that were sent before the end count after
    it."""
    with serving(graded) as served:
        file = str(judged_by(folder, "budgeted", served.url))
        sources = [file, *arguments(folder, "budgeted")[1:], *CHANGES, *QUIET]
        run = folder / "runs" / "budgeted"
        assert main(["run", *sources, f"reward.args.max_requests={ANSWERED}"]) == 3
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"max_requests = {ANSWERED} is used up" in said
        assert f"stageline resume {run}" in said
        assert kept(run) == len(served.asked) == ANSWERED
        assert main(["resume", str(run)]) == 3
        assert len(served.asked) == ANSWERED
        assert main(["resume", str(run), "reward.args.max_requests=1000"]) == 0
        config = load_config([file], sources[1:])
        assert outputs(config) == outputs(undisturbed)
        assert len(served.asked) == kept(run)
        last = open_history(config).read_step_metrics(STEPS - 1)
        assert last["judge/judge/requests"] == len(served.asked)


def test_who_asks_is_killed_and_what_was_answered_is_not_asked_again(folder: Path, undisturbed: RunConfig) -> None:
    """In the middle of the second shard's questions, some of which are under way."""
    lock, killed, before = threading.Lock(), threading.Event(), set[str]()

    def judge(body: Mapping[str, Any]) -> Reply:
        with lock:
            if not killed.is_set() and kept(config.run_dir) >= ANSWERED:
                killed.set()
                scorer = psutil.Process(process_id(config, "score-0"))
                scorer.kill()
                psutil.wait_procs([scorer], timeout=60)
                before.update(record["messages"][-1]["content"] for record in answers(config.run_dir))
        return graded(body)

    with serving(judge) as served:
        file = judged_by(folder, "struck-judged", served.url)
        config = load_config([file], [*arguments(folder, "struck-judged")[1:], *CHANGES, *QUIET])
        finish(config)
    assert outputs(config) == outputs(undisturbed)
    assert verify_run(config).faults == []
    lost = [event.gang for event in read_events(RunPaths(config.run_dir).events) if event.kind is EventKind.GANG_LOST]
    assert lost == ["score"]
    held = [record["messages"][-1]["content"] for record in answers(config.run_dir)]
    asked = Counter(map(asked_text, served.asked))
    assert len(before) >= ANSWERED
    assert {asked[text] for text in before} == {1}
    assert asked.keys() == set(held)
    assert len(held) == len(asked), "none came twice to where they are kept"
    assert len(served.asked) - len(asked) <= AT_ONCE, "what was under way, and no more"


def answers(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (run / "judge").glob("answers-*.jsonl") for line in file.open()]


def kept(run: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in (run / "judge").glob("answers-*.jsonl"))

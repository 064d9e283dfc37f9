"""MLflow's pages of a finished tiny run beside another one, as an ML engineer opens them: the list, a run, its metrics
and tables, two runs compared, a trace. What is asserted is text that a person reads, not where it stands."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from playwright.sync_api import Browser, BrowserContext, Page, expect

from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.tracking import MlflowTracker, delivered_run_id, read_state
from tests.support.browser import empty_page, missing, wide_context
from tests.support.mlflow_server import mlflow_server
from tests.support.runs import arguments, configure, finish_in
from tests.support.waiting import until

TIMEOUT_MS = 30_000


@dataclass(frozen=True)
class Pages:
    """Where MLflow shows two runs of one experiment."""

    experiment: str
    """Address of its pages."""
    printed: str
    """The address that the run printed, with this server's port in place of MLflow's usual one."""
    run_id: str
    other_id: str

    def run(self, tab: str = "", run_id: str | None = None) -> str:
        return f"{self.experiment}/runs/{run_id or self.run_id}{tab}?workflowType=machine_learning"


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    """By the finished run."""
    return io.StringIO()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, printed: io.StringIO) -> RunConfig:
    absent = missing()
    if absent is not None:
        pytest.skip(absent)
    folder = tmp_path_factory.mktemp("pages")
    changes = ("steps=2", "evaluate.every=1", "checkpoint.every=1", "tracking.report=false", "cluster.dashboard=null")
    return finish_in(folder, "first-run", f"tracking.uri=sqlite:///{folder}/mlflow.db", *changes, printed=printed)


@pytest.fixture(scope="module")
def killed(finished: RunConfig) -> RunConfig:
    """Its driver was killed when MLflow had its first numbers."""
    folder, uri = Path(finished.run_dir).parents[1], str(finished.tracking.uri)
    changes = ("steps=5000", f"tracking.uri={uri}", "tracking.experiment=killed")
    changes += (f"cluster.weights_dir={folder}/boards",)
    config = configure(folder, "killed-run", *changes)
    spool = RunPaths(config.run_dir).mlflow_spool
    with (folder / "killed.log").open("wb") as log:
        command = [sys.executable, "-m", "pipeline.cli", "run", *arguments(folder, "killed-run", *changes)]
        driver = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: read_state(spool).get("metrics"), "MLflow has its metrics", every_s=0.1)
    finally:
        driver.kill()
        driver.wait()
    until(lambda: not read_state(spool)["open"], "its writer ends it", every_s=0.1)
    return config


@pytest.fixture(scope="module")
def pages(finished: RunConfig, printed: io.StringIO) -> Iterator[Pages]:
    uri, folder = str(finished.tracking.uri), Path(finished.run_dir).parent
    (folder / "other").mkdir()
    spool = folder / "other/mlflow_spool.jsonl"
    with MlflowTracker(uri, "stageline", "second-run", {"seed": "7"}, {}, spool) as other:
        for step in range(2):
            other.log_metrics(step, {"reward/mean": 0.125 * step, "kl/ref": 0.5})
    with mlflow_server(uri, folder) as here:
        run_id, other_id = (delivered_run_id(folder / name / spool.name, uri) for name in ("first-run", "other"))
        assert run_id is not None
        assert other_id is not None
        address = re.search(r"then http://127\.0\.0\.1:5000(/#/\S+)", printed.getvalue())
        yield Pages(f"{here}/#/experiments/1", f"{here}{address[1]}", run_id, other_id)


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """One for all pages here, so that MLflow's scripts, of megabytes, are loaded once."""
    with wide_context(browser) as opened:
        yield opened


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    with empty_page(context) as opened:
        yield opened


def _shows(page: Page, *texts: str) -> None:
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible(timeout=TIMEOUT_MS)


def test_the_printed_address_leads_to_training_runs(page: Page, pages: Pages) -> None:
    page.goto(pages.printed)
    _shows(page, "first-run", "second-run", "2 matching runs")
    assert "Evaluation runs" not in page.inner_text("body"), "that is the page of GenAI"


def test_a_runs_page_says_what_it_is_and_what_it_came_to(page: Page, pages: Pages, finished: RunConfig) -> None:
    page.goto(pages.run())
    _shows(page, "staleness 1, 2 steps", "finished after 2 steps", "tiny_prompts.jsonl", "Finished")
    assert "eval/gain" in page.inner_text("body")


def test_a_killed_runs_page_says_so(page: Page, pages: Pages, killed: RunConfig) -> None:
    spool = RunPaths(killed.run_dir).mlflow_spool
    run_id, experiment = delivered_run_id(spool, str(killed.tracking.uri)), read_state(spool)["experiment_id"]
    server = pages.experiment.partition("#")[0]
    page.goto(f"{server}#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning")
    _shows(page, "its driver ended without closing it", f"stageline resume {killed.run_dir}", "Killed")
    text = page.inner_text("body")
    assert "running" not in text.partition("Result:")[2].partition("\n")[0]
    assert "weights/v" not in text, "it has exported none"
    assert "stageline run tiny.yaml" in text, "the source, by its short name"
    tags = MlflowClient(killed.tracking.uri).get_run(str(run_id)).data.tags
    assert tags["stageline.ended"].startswith("killed")


def test_metrics_open_on_the_overview(page: Page, pages: Pages) -> None:
    page.goto(pages.run("/model-metrics"))
    _shows(page, "held_out_reward", "kl_to_reference")
    text = page.inner_text("body")
    assert text.index("Overview\n") < text.index("advantage\n")


def test_responses_are_a_table(page: Page, pages: Pages) -> None:
    page.goto(pages.run("/artifacts/samples.json"))
    _shows(page, "samples.json", "before_score", "after_kl")


def test_two_runs_compare(page: Page, pages: Pages) -> None:
    runs = f'["{pages.run_id}","{pages.other_id}"]'
    page.goto(f'{pages.experiment.partition("#")[0]}#/compare-runs?runs={runs}&experiments=["1"]')
    _shows(page, "Comparing 2 Runs", "first-run", "second-run", "Overview/reward")


def test_a_run_gives_first_what_is_to_be_compared_first(finished: RunConfig) -> None:
    """MLflow's page that compares runs draws the metric that they gave first."""
    lines = (Path(finished.run_dir) / "mlflow_spool.jsonl").read_text().splitlines()
    given = [name for item in map(json.loads, lines) if item["kind"] == "metrics" for name in item["values"]]
    of_models = [name for name in given if not name.startswith("system/")]  # those have a tab of their own
    assert of_models[0] in ("Overview/held_out_reward", "Overview/reward")
    assert "mismatch/canary_mean_abs" in of_models


def test_a_trace_is_a_step(page: Page, pages: Pages) -> None:
    page.goto(pages.run("/traces"))
    _shows(page, "first-run · step 1 · v0")

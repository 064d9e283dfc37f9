"""The pages of a whole tiny run with real processes, while the run is driven and after its end."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Scheduler

import pipeline.driver.run
from pipeline.cli.dashboard import CachedRunView, open_server
from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import LocalWorkers
from pipeline.driver.graph_markers import marker_key, marker_stage
from pipeline.driver.session import hold_driver_lock, start_cluster
from pipeline.errors import ConfigError
from storage.address import Address
from tests.support.ports import free_ports
from tests.support.runs import QUIET, configure, finish
from tests.support.waiting import until

pytestmark = pytest.mark.processes

PAGES = ("stageline", "stageline/view", "graph", "groups", "status", "tasks", "individual-graph", "individual-groups")


def get(url: str) -> tuple[int, str]:
    """Status and text of an answer; 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def edges(scheduler: Scheduler) -> set[tuple[object, object]]:
    """(marker, marker that waits for it) in the scheduler's own state."""
    tasks = list(scheduler.tasks.values())
    return {(parent.key, task.key) for task in tasks for parent in list(task.dependencies) if marker_stage(task.key)}


@pytest.fixture(scope="module")
def folder_of_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


class Seen:
    """A visitor's view of a run while it went on."""

    def __init__(self) -> None:
        self.answers: dict[str, int] = {}
        self.while_stopped: dict[str, int] = {}
        self.page = self.task = self.log = ""
        self.edges: set[tuple[object, object]] = set()
        self.mixed: list[object] = []
        self.sizes: list[tuple[int, int]] = []


def visit(config: RunConfig, workers: LocalWorkers, stop: threading.Event) -> Seen:
    """Opens every page of a run, and once more while its engine is stopped."""
    root, scheduler, seen = workers.dashboard.removesuffix("/status"), workers.scheduler, Seen()
    wanted = (marker_key(Address("publish", 2)), marker_key(Address("generate", 3)))

    def staleness_edge_is_there() -> bool:
        seen.edges |= edges(scheduler)
        return wanted in seen.edges

    until(lambda: get(f"{root}/stageline")[0] == 200, "a page", stop=stop)
    until(staleness_edge_is_there, "an edge from publish to generate", stop=stop)
    [nanny] = [w for name, w in workers._cluster.workers.items() if name == "generate-0"]
    os.kill(nanny.pid, signal.SIGSTOP)
    try:
        seen.while_stopped = {name: get(f"{root}/{name}")[0] for name in PAGES}
    finally:
        os.kill(nanny.pid, signal.SIGCONT)
    seen.answers = {name: get(f"{root}/{name}")[0] for name in PAGES}
    seen.page = get(f"{root}/stageline")[1]
    seen.log = get(f"{root}/stageline/logs/generate-0.log")[1]
    seen.answers["../config.yaml"] = get(f"{root}/stageline/logs/..%2Fconfig.yaml")[0]
    key = next(key for key in list(scheduler.tasks) if marker_stage(key) == "generate")
    seen.answers["marker"] = get(f"{root}/info/task/{urllib.parse.quote(str(key))}.html")[0]
    for task in list(scheduler.tasks.values()):
        if any(bool(marker_stage(parent.key)) != bool(marker_stage(task.key)) for parent in list(task.dependencies)):
            seen.mixed.append(task.key)
    until(lambda: seen.sizes.append((len(scheduler.tasks), len(scheduler.task_groups))) or stop.wait(0.05), "the end")
    return seen


@contextmanager
def visited(patch: pytest.MonkeyPatch, config: RunConfig) -> Iterator[list[Seen]]:
    """Around a run of this process: a visitor beside it, and what it has seen afterwards."""
    stop, came = threading.Event(), []

    @contextmanager
    def processes(of: RunConfig) -> Iterator[LocalWorkers]:
        with start_cluster(of) as workers:
            came.append(thread.submit(visit, config, workers, stop))
            yield workers

    patch.setattr(pipeline.driver.run, "start_cluster", processes)
    found: list[Seen] = []
    with ThreadPoolExecutor(1) as thread:
        try:
            yield found
        finally:
            stop.set()
        found += [one.result() for one in came]


@pytest.fixture(scope="module")
def live(folder_of_pages: Path) -> tuple[RunConfig, Seen]:
    changes = ("steps=12", f"cluster.dashboard=127.0.0.1:{free_ports(1)[0]}", "staleness=1", *QUIET)
    config = configure(folder_of_pages, "live", *changes)
    with pytest.MonkeyPatch.context() as patch, visited(patch, config) as found:
        finish(config)
    return config, found[0]


def test_every_page_answers_also_while_a_worker_is_stopped(live: tuple[RunConfig, Seen]) -> None:
    _, seen = live
    assert seen.while_stopped == dict.fromkeys(PAGES, 200)
    assert {name: seen.answers[name] for name in PAGES} == dict.fromkeys(PAGES, 200)
    assert seen.answers["marker"] == 200, "Dask's page of a marker"


def test_the_staleness_bound_is_an_edge_in_the_scheduler(live: tuple[RunConfig, Seen]) -> None:
    _, seen = live
    assert (marker_key(Address("publish", 2)), marker_key(Address("generate", 3, 1))) in seen.edges
    assert (marker_key(Address("publish", 3)), marker_key(Address("generate", 3))) not in seen.edges
    assert seen.mixed == [], "no task that computes depends on a marker, nor the other way round"


def test_the_scheduler_keeps_a_window(live: tuple[RunConfig, Seen]) -> None:
    """Markers, and today's tasks: of 12 steps with 14 nodes each, those of the window and a few before."""
    _, seen = live
    assert max(tasks for tasks, _ in seen.sizes) < 200
    assert max(groups for _, groups in seen.sizes) < 160


def test_the_live_page_shows_the_run(live: tuple[RunConfig, Seen]) -> None:
    _, seen = live
    for part in ("live - Stageline", "update_policy", "Gangs", "Weights in memory", "generate-0.log"):
        assert part in seen.page
    assert "incarnation 0" in seen.log
    assert seen.answers["../config.yaml"] == 404


def test_the_same_page_of_a_run_that_has_ended(live: tuple[RunConfig, Seen]) -> None:
    config, _ = live
    with open_server(config, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_port}"
            status, page = get(f"{root}/")
            assert (status, get(f"{root}/stageline/view")[0]) == (200, 200)
            assert "step 12 of 12, finished" in page
            assert 'data-from="publish 11.0" data-to="generate 11.0"' not in page
            assert 'data-from="publish 10.0" data-to="generate 11.0"' in page
            found = re.search(r'data-curves="([^"]*)"', page)
            assert found is not None
            (drawn,) = json.loads(html.unescape(found[1]))["runs"]
            assert len(drawn["curves"]["metrics"]["reward/mean"]) == 12
            assert get(f"{root}/stageline/logs/train-0.log")[0] == 200
            assert get(f"{root}/stageline/logs/..%2Fconfig.yaml")[0] == 404
            assert get(f"{root}/config.yaml")[0] == 404
        finally:
            server.shutdown()
            thread.join()


def test_the_page_knows_of_a_driver_elsewhere(live: tuple[RunConfig, Seen]) -> None:
    """The journal has not grown since the last look, so that the record is the same."""
    config, _ = live
    look = CachedRunView(config)
    assert not look().is_driven
    with hold_driver_lock(RunPaths(config.run_dir)):
        assert look().is_driven
    assert not look().is_driven


def test_dashboard_refuses_what_is_no_run_and_a_port_that_is_taken(
    live: tuple[RunConfig, Seen], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = live
    assert main(["dashboard", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["dashboard", str(config.run_dir), "--port", "70000"]) == 2
    assert "--port: given 70000; a port is 0 (any that is free) to 65535" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: given {port}; Address already in use"):
            open_server(config, port)


def test_a_run_that_never_began_has_no_page(folder_of_pages: Path) -> None:
    config = configure(folder_of_pages, "never")
    with pytest.raises(ConfigError, match="holds no journal"):
        open_server(config, 0)

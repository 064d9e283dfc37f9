"""A run that is given a secret in every place that takes one, on a real MLflow server. Each secret reaches its
receiver, and nobody else can see it. The test looks at every argument of every process while the run is driven, every
page that its dashboard links to, and every file that the run, its commands and the server leave, except for the files
in `PRIVATE`, which only this user may read."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urldefrag, urljoin

import psutil
import pytest
import yaml
from mlflow.tracking import MlflowClient

from pipeline.cli.main import main
from pipeline.config.identity import change_problems, config_sections
from pipeline.config.loading import config_hash, load_config
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from tests.support.judge_server import Reply, asked_text, completion, serving
from tests.support.mlflow_server import mlflow_server
from tests.support.paths import ROOT, TINY, TINY_PROMPTS
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.processes

CANARY = "c4n4ry"
PASSWORD = f"{CANARY}-p@ss/word"  # as a URL should not have it
JUDGE_KEY = f"{CANARY}-judge"
OWN_KEY = f"{CANARY}-own"
PRIVATE = {"config.yaml", "job/config.yaml", "job/run.sbatch"}
"""Files of a run's directory that may hold secrets."""
LINK = re.compile(r"""(?:href|src)=["']([^"']+)["']|window\.location\.href\s*=\s*["']([^"']+)["']""")
PAGES = ("stageline", "status", "graph", "groups", "info/main/workers.html", "info/main/logs.html", "json/index.html",
         "metrics", "info/logs.html", "info/call-stacks.html")  # fmt: skip


def settings(folder: Path, tracking: str, judge: str, prompts: str) -> dict[str, Any]:
    own = {"api_key": OWN_KEY, "headers": {"X-Anything": OWN_KEY}, "expected": OWN_KEY[::-1]}
    body = {"api_key": JUDGE_KEY, "metadata": [{"Authorization": JUDGE_KEY}]}
    asks = {"url": judge, "model": "m", "read": "text", "on_unparsed": 0, "rubric": "{prompt}|{response}",
            "timeout_s": 200, "retry_s": 200, "body": body}  # fmt: skip
    tiny: dict[str, Any] = yaml.safe_load(TINY.read_text())
    for trained in ("policy", "critic"):  # so that the run may become longer
        tiny["model"][trained]["decay"] = "constant"
    return tiny | {
        "name": "secret",
        "steps": 2,
        "runs_dir": str(folder / "runs"),
        "prompts": tiny["prompts"] | {"url": prompts},
        "tracking": {"uri": tracking},
        "cluster": {"dashboard": "127.0.0.1:0"},
        "slurm": {
            "environment": [f"export OWN_KEY={CANARY}-environment"],
            "sbatch": [f"--export=ALL,MY_TOKEN={CANARY}-sbatch"],
            "command": f"apptainer exec --env API_KEY={CANARY}-container image.sif stageline",
        },
        "reward": {
            "parts": {
                "own": {"kind": "tests.support.keyed_rewards:keyed", "args": own},
                "judge": {"kind": "judge", "args": asks},
            }
        },
    }


class Sampled:
    """Owns a thread that looks at the arguments of all processes below one, as often as it can."""

    def __init__(self, process: int) -> None:
        self.arguments: set[str] = set()
        self._top = psutil.Process(process)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            try:
                processes = [self._top, *self._top.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    self.arguments.add(" ".join(process.cmdline()))
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue


def crawled(root: str, most: int = 150) -> dict[str, str]:
    """Return the text of every page of a dashboard that is linked from one of `PAGES`, by its address."""
    seen: dict[str, str] = {}
    left = [f"{root}/{page}" for page in PAGES]
    while left and len(seen) < most:
        address = left.pop(0)
        if address in seen or "/static" in address:
            continue
        try:
            with urllib.request.urlopen(quote(address, safe=":/?=&%"), timeout=60) as answer:
                seen[address] = answer.read().decode("utf8", "replace")
        except HTTPError as error:
            seen[address] = error.read().decode("utf8", "replace")
        links = (urldefrag(urljoin(address, one or other))[0] for one, other in LINK.findall(seen[address]))
        left += [link for link in links if link.startswith(root)]
    return seen


def names_logs(root: str) -> bool:
    """Return True if the run's page is there, and links to logs of workers."""
    [page] = crawled(root, most=1).values()
    return "/logs/" in page


def files_with(folder: Path, text: str) -> set[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path for path in files if text.encode() in path.read_bytes()}


def command(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip


class _Prompts(BaseHTTPRequestHandler):
    """Serves the prompts to whoever asks."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(TINY_PROMPTS.stat().st_size))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(TINY_PROMPTS.read_bytes())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def prompts() -> Iterator[str]:
    """Their address, with a password and a token."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Prompts) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever)
        host = f"user:{CANARY}-prompts@127.0.0.1:{server.server_port}"
        yield f"http://{host}/prompts?token={CANARY}-query&as=rows.jsonl"
        server.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server").mkdir()
    with mlflow_server(f"sqlite:///{tmp_path}/server/mlflow.db", tmp_path / "server") as address:
        yield address


def test_no_secret_is_seen_and_all_are_used(
    tmp_path: Path, server: str, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    looked_at = threading.Event()

    def judge(body: Mapping[str, Any]) -> Reply:
        looked_at.wait(TIMEOUT_S)  # the run goes on once its pages were read
        return completion(f"Grade: {1 + sum(map(ord, asked_text(body))) % 5}")

    tracking = server.replace("http://", f"http://user:{PASSWORD}@")
    log = tmp_path / "run.log"
    with serving(judge) as served, ThreadPoolExecutor(1) as thread:
        given = tmp_path / "given"
        given.mkdir()
        file = given / "config.yaml"
        file.write_text(yaml.safe_dump(settings(tmp_path, tracking, served.url, prompts)))
        run = command("run", str(file), log=log)
        try:
            with Sampled(run.pid) as sampled:
                until(lambda: "/status" in log.read_text() or run.poll() is not None, "a line with its dashboard")
                link = re.search(r"http://127\.0\.0\.1:\d+(?=/status)", log.read_text())
                assert link is not None, log.read_text()
                until(lambda: names_logs(link[0]) or run.poll() is not None, "a page that names logs", every_s=0.5)
                pages = thread.submit(crawled, link[0]).result()
                looked_at.set()
                assert run.wait(TIMEOUT_S) == 0, log.read_text()
        finally:
            looked_at.set()
            run.kill()
            run.wait()
        config = load_config([file])
        paths = RunPaths(config.run_dir)

        # Given to whom they are for; and again by a resume, from the file that holds them.
        assert {asked["api_key"] for asked in served.asked} == {JUDGE_KEY}
        served.asked.clear()
        assert main(["resume", str(paths.root), "steps=3"]) == 0
        assert {asked["api_key"] for asked in served.asked} == {JUDGE_KEY}
        found = open_history(config).store.read_step("score", 2, config.rollout.shards)
        assert max(found.parts["own"]) > 0, "the user's reward had another key"
        rescored = ["replay", str(paths.root), "--step", "1", "--stage", "score", "--shard", "0"]
        assert main(rescored) == 0
        variant = ["name=variant", "ppo.epochs=2"]
        assert main(["replay", str(paths.root), "--updates", "0:1", *variant]) == 0

    # A tracking server prints what it likes; nothing was taken for a report of the writer, and all has arrived.
    shown = log.read_text() + "".join(capsys.readouterr())
    assert "not delivered" not in shown
    assert "ended early" not in shown
    client = MlflowClient(server)
    run_id = (paths.root / "mlflow_run_id").read_text().strip()
    tracked = client.get_run(run_id)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["reward.parts.own.args.api_key"] == "***"
    assert {"config.yaml", "summary.json"} <= {item.path for item in client.list_artifacts(run_id)}
    for arguments in (["sync"], ["sync", "--to", tracking], ["status"], ["check"], ["report"]):
        assert main([arguments[0], str(paths.root), *arguments[1:]]) == 0
    assert main(["submit", "--dry-run", str(file)]) == 0
    shown += "".join(capsys.readouterr())
    assert "all delivered" in shown

    # Seen by nobody else.
    assert len(pages) > len(PAGES)
    assert any("/stageline/logs/" in address for address in pages)
    assert [address for address, page in pages.items() if CANARY in page] == []
    assert any("mlflow_writer" in one for one in sampled.arguments)
    assert [one for one in sampled.arguments if CANARY in one] == []
    assert CANARY not in shown
    private = files_with(tmp_path, CANARY) - {file}
    assert private == {paths.config, config.run_dir.with_name("variant") / "config.yaml"}
    assert {path.relative_to(paths.root.parent / path.parts[-2]).as_posix() for path in private} <= PRIVATE
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}

    # Without the file that holds them the run can be looked at; to go on it asks for them.
    paths.config.unlink()
    assert main(["status", str(paths.root)]) == 0
    assert main(["resume", str(paths.root), "steps=4"]) == 2
    assert "it is a secret, and config.yaml, which had it, is gone" in capsys.readouterr().err


def test_an_exchanged_key_is_no_other_run(tmp_path: Path) -> None:
    """Stated and hashed settings have no secrets. With another key, the run and its digest are the same."""
    one, two = (
        load_config([TINY], [f"runs_dir={tmp_path}", f"reward.args={{characters: aeiou, api_key: {key}}}"])
        for key in ("one", "two")
    )
    assert one.reward != two.reward
    assert config_hash(one) == config_hash(two)
    assert list(change_problems(config_sections(one), two)) == []

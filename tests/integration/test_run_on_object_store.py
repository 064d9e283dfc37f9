"""Whole runs whose data is in an object store (`storage.url`), on moto's S3 server. Their results are those of a run in
a directory, even if the server fails, or if the driver is killed and another one continues the run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import stageline
from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import EventKind, read_events
from storage import files
from tests.support.paths import ROOT
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, configure, finish
from tests.support.s3_server import Faults
from tests.support.waiting import until

pytest_plugins = ("tests.support.s3_server",)  # the fixtures `bucket` and `faults`
pytestmark = pytest.mark.processes

CHANGES = (*QUIET, "steps=6", "export.every=2")
STORED = ("ledger", "rollouts.zarr", "attempts")
"""Folders that a run's directory has only without `storage.url`."""
FETCHED = ("checkpoints", "weights")
"""Folders that it holds copies of the store's data in."""


@pytest.fixture(scope="module")
def local(folder: Path) -> RunConfig:
    return finish(configure(folder, "local", *CHANGES))


@pytest.fixture(scope="module")
def remote(folder: Path, bucket: str, faults: Faults) -> Iterator[RunConfig]:
    """A run during which one request in 23 fails: 503, an answer that is lost, 500 for what was done."""
    config = configure(folder, "remote", *CHANGES, f"storage.url={bucket}/stageline/${{name}}")
    faults.every = 23
    try:
        yield finish(config)
    finally:
        faults.every = 0


def test_a_run_on_a_failing_store_comes_to_what_a_local_one_does(remote: RunConfig, local: RunConfig) -> None:
    assert outputs(remote) == outputs(local)
    assert [name for name in STORED if (remote.run_dir / name).exists()] == []
    assert weights(remote) == weights(local)
    assert verify_run(remote).faults == []


def test_commands_read_the_run_where_it_is(
    remote: RunConfig, local: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*command: str) -> str:
        assert main([*command]) == 0
        return capsys.readouterr().out

    run, twin = str(remote.run_dir), str(local.run_dir)
    assert "6 of 6 steps" in said("status", run)
    assert "sound" in said("check", run)
    assert "step 3 of remote" in said("inspect", run, "--step", "3")
    assert "identical" in said("replay", run, "--updates", "0:2")
    said("report", run, "--out", str(tmp_path / "report.html"))
    said("export", run, "--rollouts", str(tmp_path / "rows.parquet"))
    said("export", run, "--version", "3", "--to", str(tmp_path / "v3"))
    assert stageline.open_run(run).tokens().equals(stageline.open_run(twin).tokens())


@pytest.mark.parametrize("lost", [False, True], ids=["all is there", "a lost upload"])
def test_a_killed_run_goes_on_in_another_directory(
    folder: Path, bucket: str, local: RunConfig, lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its directory is copied without checkpoints and exports, and gone. If the newest checkpoint of the policy lacks
    an object, the one before it is used, and the updates since then run again."""
    changes = (*CHANGES, "checkpoint.every=1", f"storage.url={bucket}/moved-{lost}")
    config, moved = configure(folder, f"killed-{lost}", *changes), configure(folder, f"elsewhere-{lost}", *changes)
    kill_after_upload(config, 2, arguments(folder, config.name, *changes))
    shutil.copytree(config.run_dir, moved.run_dir, ignore=shutil.ignore_patterns(*FETCHED))
    shutil.rmtree(config.run_dir)
    newest = moved.stored.checkpoints().versions("policy")[-1]
    if lost:
        root = moved.stored.root.below(f"checkpoints/policy/v{newest:06d}")
        files.remove(root, next(key for key in files.keys(root) if key.endswith(".distcp")))
    assert main(["resume", str(moved.run_dir)]) == 0, capsys.readouterr().err
    assert outputs(moved) == outputs(local)
    assert weights(moved) == weights(local)
    assert (f"checkpoint v{newest} of the policy CANNOT BE USED" in warnings(moved)) == lost
    assert verify_run(moved).faults == []


def weights(config: RunConfig) -> dict[str, str]:
    """The digests of all exported files of weights."""
    exports = config.stored.exports()
    found = {version: exports.fetch(version) for version in exports.versions()}
    return {
        f"{version}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for version, directory in found.items()
        for file in sorted((directory or Path()).glob("*.safetensors"))
    }


def warnings(config: RunConfig) -> str:
    events = read_events(RunPaths(config.run_dir).events)
    return "\n".join(str(event.detail) for event in events if event.kind is EventKind.WARNED)


def kill_after_upload(config: RunConfig, version: int, arguments: list[str]) -> None:
    """Start a run, and kill its driver and workers when a version's checkpoints are in the store."""
    command = "import sys; from pipeline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    driver = subprocess.Popen(
        [sys.executable, "-c", command, "run", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    saved = config.stored.checkpoints()

    def uploaded() -> bool:
        return all(version in saved.versions(role) for role in ("policy", "critic")) or driver.poll() is not None

    try:
        until(uploaded, f"the upload of v{version}", every_s=0.1)
        assert driver.poll() is None, "the run ended before it was killed"
    finally:
        processes = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        driver.wait()
        psutil.wait_procs(processes)
        shutil.rmtree(RunPaths(config.run_dir).board(None), ignore_errors=True)


def test_check_refuses_what_cannot_be_a_store(folder: Path, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(url: str) -> str:
        file, *changes = arguments(folder, "refused", *CHANGES, f"storage.url={url}")
        assert main(["check", file, *changes]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "storage.url: given 'sftp://host/runs'; must be s3://BUCKET/PREFIX or gs://BUCKET/PREFIX" in refused(
        "sftp://host/runs"
    )
    secret = refused("s3://key:hidden@runs/x")
    assert "without credentials" in secret
    assert "hidden" not in secret
    assert "storage.url: given 's3://absent/x'; cannot be used" in refused("s3://absent/x")
    assert "storage.url" in refused("s3://")

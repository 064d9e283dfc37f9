"""Checkpoints of whole runs that cannot be used: one with a flipped bit, of another run, or with code in it is reported
and passed over, and the run ends as if it had been whole. Nothing that somebody else wrote into a run's directory runs
in the process that reads it."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from dataclasses import asdict
from enum import Enum
from pathlib import Path

import pytest
import torch
from rich.console import Console

import pipeline.driver.run
from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import TRUSTED, RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.journal import EventKind, read_events
from stages.models.checkpoint_metadata import pickle_fault
from storage import codec
from storage.checkpoints import Checkpoints, sum_file
from tests.support.runs import ONE_GANG, QUIET, configure, finish, placement

pytestmark = pytest.mark.processes

CHANGES = (
    *QUIET, "staleness=0", "evaluate.every=0", "checkpoint.every=1", "checkpoint.keep=9", "export.every=1",
    "model.policy.decay=constant", "model.critic.decay=constant",
)  # fmt: skip
TWO_RANKS = placement("{pool: {}, train: {workers: 2}}", generate="pool", score="pool", others="train")


@pytest.fixture(scope="module")
def two_steps(folder: Path) -> RunConfig:
    """Nothing changes it: what is to be damaged or continued is a copy."""
    return finish(configure(folder, "two_steps", *CHANGES, ONE_GANG, "steps=2"))


@pytest.fixture
def copy(two_steps: RunConfig, tmp_path: Path) -> Path:
    """Without exports, for tests that make one."""
    found = Path(shutil.copytree(two_steps.run_dir, tmp_path / "run"))
    shutil.rmtree(RunPaths(found).weights(1).parent)
    return found


def copied(two_steps: RunConfig, folder: Path, name: str) -> RunConfig:
    """Return the config of a copy that has another name."""
    config = configure(folder, name, *CHANGES, ONE_GANG, "steps=2")
    shutil.copytree(two_steps.run_dir, config.run_dir)
    return config


def digests(config: RunConfig) -> list[str | None]:
    """Return the digests of both models after every update."""
    ledger = open_history(config).ledger
    return [commit.digest for stage in ("update_policy", "update_critic") for commit in ledger.list(stage)]


def go_on(config: RunConfig) -> str:
    """Runs to the end, and gives what the terminal showed."""
    shown = io.StringIO()
    pipeline.driver.run.run(config, Console(file=shown, width=1000), resume=True)
    return shown.getvalue()


@pytest.mark.parametrize(
    "placed", [ONE_GANG, pytest.param(TWO_RANKS, marks=pytest.mark.full)], ids=["one rank", "two ranks"]
)
def test_a_run_passes_over_a_checkpoint_with_a_flipped_bit(two_steps: RunConfig, folder: Path, placed: str) -> None:
    """Nothing is trained on it. Journal, terminal and the worker's log report it, and the update after the earlier
    checkpoint runs again. An export that a killed process had begun is finished on the way."""
    name = f"flipped{'_ranks' if placed == TWO_RANKS else ''}"
    whole = finish(configure(folder, f"{name}_whole", *CHANGES, placed, "steps=3"))
    if placed == ONE_GANG:
        config = copied(two_steps, folder, name)
    else:
        config = finish(configure(folder, name, *CHANGES, placed, "steps=2"))
    paths = RunPaths(config.run_dir)
    assert Checkpoints(paths.checkpoints).versions("policy") == [1, 2], "the last one is waited for"
    assert Checkpoints(paths.checkpoints).versions("critic") == [1, 2]
    for file in (paths.checkpoints / "policy" / "v000002").glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    shutil.move(paths.weights(1), paths.weights(1).with_name(".v000001"))

    shown = go_on(configure(folder, name, *CHANGES, placed, "steps=3"))
    longer = configure(folder, name, *CHANGES, placed, "steps=3")
    (warning,) = [e for e in read_events(paths.events) if e.kind is EventKind.WARNED]
    assert warning.detail is not None
    assert "checkpoint v2 of the policy CANNOT BE USED" in warning.detail
    assert "is not what was saved. Back to v1; the updates from there to v2 run again" in warning.detail
    assert f"WARNING: {warning.detail}" in shown
    assert warning.worker is not None
    assert warning.detail in (paths.logs / f"{warning.worker}.log").read_text()
    assert digests(longer) == digests(whole)
    (fault,) = verify_run(longer).faults
    assert fault.startswith("checkpoint v2 of the policy: ")
    assert verify_run(whole).faults == []
    assert sorted(path.name for path in paths.weights(0).parent.iterdir()) == ["v000001", "v000002", "v000003"]
    for version in (1, 2, 3):
        ours, theirs = (RunPaths(run.run_dir).weights(version) / "model.safetensors" for run in (longer, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_run_passes_over_a_checkpoint_of_another_run(two_steps: RunConfig, folder: Path) -> None:
    """The other run has the same architecture and another seed. Its bytes are sound, but its weights are not this
    run's."""
    other = finish(configure(folder, "foreign_other", *CHANGES, ONE_GANG, "steps=2", "seed=1"))
    config = copied(two_steps, folder, "foreign")
    place, foreign = (RunPaths(run.run_dir).checkpoints / "policy" / "v000002" for run in (config, other))
    shutil.rmtree(place)
    shutil.copytree(foreign, place)
    (fault,) = verify_run(config).faults
    assert re.fullmatch(r"checkpoint v2 of the policy: has weights of digest \S+, committed is \S+", fault)

    longer = configure(folder, "foreign", *CHANGES, ONE_GANG, "steps=3")
    assert re.search(r"checkpoint v2 of the policy CANNOT BE USED: .* Back to v1; ", go_on(longer))
    assert verify_run(longer).faults == [fault]
    assert len(digests(longer)) == 6


# ---- written by somebody else -----------------------------------------------------------------------------------


OTHERS_WITH_CODE = ("common.pt", "__0_0.distcp")


class Payload:
    """Code that an attacker would run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def plant(directory: Path, name: str, marker: Path) -> None:
    """Replaces a file of a checkpoint by one that runs a command, and writes the manifest that belongs to it."""
    evil = io.BytesIO()
    pickle.dump(Payload(marker), evil) if name == ".metadata" else torch.save(Payload(marker), evil)
    (directory / name).write_bytes(evil.getvalue())
    document = json.loads((directory / "checkpoint.json").read_text())
    del document["digest"]
    document["files"][name] = asdict(sum_file(directory / name))
    document["digest"] = codec.digest(document)
    (directory / "checkpoint.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", [".metadata", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS_WITH_CODE)])
def test_a_checkpoint_with_code_is_skipped(
    copy: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its CRC-32 and the manifest's digest are right: whoever can write the one can write the other."""
    marker, paths = tmp_path / "marker", RunPaths(copy)
    for role in ("policy", "critic"):
        for version in (1, 2):
            directory = Checkpoints(paths.checkpoints).place(role, version)
            plant(directory, name, marker)
    named = str(Checkpoints(paths.checkpoints).place("policy", 1) / name)
    instead = f"Without the directory {Path(named).parent} the checkpoint before it is used"

    assert main(["export", str(copy), "--version", "1"]) == 0
    said = "".join(capfd.readouterr())
    assert "checkpoint v1 of the policy CANNOT BE USED" in said
    if name != "__0_0.distcp":  # of a shard torch says what it refuses, in words of its own
        assert f"{named} " in said
        assert instead in said
    assert main(["replay", str(copy), "--updates", "1:2"]) == 0
    assert "checkpoint v1 of the policy CANNOT BE USED" in "".join(capfd.readouterr())
    if name != "__0_0.distcp":  # its bytes are what the manifest says: only loading it can tell
        assert main(["check", str(copy)]) == 2
        assert f"checkpoint v1 of the policy: {named} " in capfd.readouterr().out
    assert main(["resume", str(copy), "steps=3"]) == 0
    warned = [str(e.detail) for e in read_events(paths.events) if e.kind is EventKind.WARNED]
    assert sum("of the policy CANNOT BE USED" in detail for detail in warned) == 2, warned
    assert not marker.exists(), "the command of the attacker ran"


def test_a_checkpoint_that_an_older_python_wrote_is_read(copy: Path) -> None:
    """Before 3.11.4, Python pickled a member of an enum by its name. Debian 12 has 3.11.2."""

    class OlderPickler(pickle.Pickler):
        def reducer_override(self, item: object) -> object:
            return (getattr, (type(item), item.name)) if isinstance(item, Enum) else NotImplemented

    directory = Checkpoints(RunPaths(copy).checkpoints).place("policy", 2)
    file, older = directory / ".metadata", io.BytesIO()
    OlderPickler(older).dump(pickle.loads(file.read_bytes()))
    file.write_bytes(older.getvalue())
    assert b"getattr" in older.getvalue()
    assert pickle_fault(directory) is None


@pytest.mark.parametrize("command", [["export"], ["replay", "--updates", "1:2"], ["resume", "steps=3"]])
def test_a_run_that_others_can_change_is_not_computed_with_unless_they_are_trusted(
    copy: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Checkpoints(RunPaths(copy).checkpoints).place("critic", 1)
    directory.chmod(0o757)
    assert main([command[0], str(copy), *command[1:]]) == 2
    said = capsys.readouterr().err
    assert f"{directory} can be written by every user" in said
    assert f"{TRUSTED}={copy}" in said
    assert main(["check", str(copy)]) == 0, "what only looks reads it as data"
    if command[0] == "export":
        monkeypatch.setenv(TRUSTED, f"/nowhere:{copy.parent}")
        assert main([command[0], str(copy), *command[1:]]) == 0

"""A run's directory that somebody else has written into: nothing of it runs in the process that reads it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from dataclasses import asdict
from enum import Enum
from pathlib import Path

import pytest
import torch

from pipeline.cli.main import main
from pipeline.config.paths import TRUSTED, RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import EventKind, read_events
from stages.models.checkpoint_metadata import pickle_fault
from storage import checkpoints
from storage.checkpoints import Checkpoints, sum_file
from tests.support.runs import ONE_GANG, QUIET, configure, finish

pytestmark = pytest.mark.processes

CHANGES = (
    *QUIET, ONE_GANG, "staleness=0", "evaluate.every=0", "checkpoint.every=1", "checkpoint.keep=9", "export.every=0",
    "model.policy.decay=constant", "model.critic.decay=constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    return finish(configure(folder, "foreign_whole", *CHANGES, "steps=2"))


@pytest.fixture
def copy(whole: RunConfig, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.run_dir, tmp_path / "run"))


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
    document["digest"] = checkpoints._digest(document)
    (directory / "checkpoint.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
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

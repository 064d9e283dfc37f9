"""Stored data that was changed, by a bit or by a hand, is found, named and made again, and nothing is trained on it. A
process that dies between a commit and the last of its files leaves no hole."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.cli.answers import read_saved_config
from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import preflight
from pipeline.config.role_models import check_exported
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError, StageFailed
from pipeline.observe.journal import EventKind, read_events
from storage.address import Address
from tests.support.run_results import events_noted, outputs
from tests.support.runs import QUIET, configure, finish, use_runtime

pytestmark = pytest.mark.processes


def test_weights_with_a_flipped_bit_stay_unused(
    folder: Path, overlapped: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops with the version, tensor and file; resumed, the version is published again, and all is as if
    nothing had been."""
    config = configure(folder, "flipped_board", *QUIET)
    with monkeypatch.context() as patch:
        use_runtime(patch, "tests.support.faulty_runtimes:FlippedBoardRuntime")
        with pytest.raises(
            StageFailed, match=r"DamagedWeights: weights v2: \S+ is not what was published \(/\S+\.bin\)"
        ):
            finish(config)
    used = {v for c in open_history(config).ledger.list("generate") for v in c.provenance.weight_versions}
    assert used == {0, 1}
    assert verify_run(config).faults == []
    assert main(["resume", str(config.run_dir)]) == 0
    assert outputs(config) == outputs(overlapped)
    assert verify_run(config).faults == []


def edit(config: RunConfig, address: Address, pattern: str, replacement: str) -> Path:
    """Changes a commit record as a flipped bit may: it is JSON as before."""
    file = config.run_dir / "ledger" / f"{address}.json"
    text, number = re.subn(pattern, replacement, file.read_text(), count=1)
    assert number == 1
    json.loads(text)
    file.write_text(text)
    return file


def test_damaged_and_deleted_commits_are_named_and_made_again(
    folder: Path, overlapped: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a KL controller, a digit of an update's digest, a CRC of a shard that a trainer may need again, and
    one that is not there at all: equal to the bit afterwards, and sound."""
    monkeypatch.setenv("COLUMNS", "300")
    config = finish(configure(folder, "damaged", *QUIET))
    paths = RunPaths(config.run_dir)
    assert verify_run(config).faults == []
    damaged = [
        edit(config, Address("advantage", 1), r'("score_mean": -?\d\.)', r"\g<1>7"),
        edit(config, Address("update_policy", 2), r'("digest": "[^"]*)[^"]"', r'\1z"'),
        edit(config, Address("generate", 0, 1), r'("crc32": )', r"\g<1>1"),
    ]
    deleted = paths.root / "ledger" / f"{Address('evaluate', 2)}.json"
    deleted.unlink()
    faults = verify_run(config).faults
    for file in damaged:
        assert any(fault.startswith(f"{file}: is not what was written") for fault in faults)
    assert f"{Address('evaluate_score', 2)}: was made from {Address('evaluate', 2)}, which has no commit" in faults
    assert main(["check", str(config.run_dir)]) == 2
    assert f"NOT sound: {len(faults)} problems" in capsys.readouterr().out

    assert main(["resume", str(config.run_dir)]) == 0
    warned = [str(e.detail) for e in read_events(paths.events) if e.kind is EventKind.WARNED]
    assert sorted(detail.split(":")[0] for detail in warned) == sorted(map(str, damaged))
    assert len([path for path in (paths.root / "damaged").rglob("*") if path.is_file()]) == len(damaged)
    report = verify_run(config)
    assert report.faults == []
    assert events_noted(report) == [f"{len(damaged)} damaged commit records were set aside in {paths.root}/damaged"]
    assert outputs(config) == outputs(overlapped)


def test_check_claims(
    overlapped: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["check", str(overlapped.run_dir)]) == 0
    out = capsys.readouterr().out
    commits = len(open_history(overlapped).ledger.list())
    for claim, counted in {
        "every commit record is what was written": f"{commits} records",
        "every update is committed once": "4 of the policy, 4 of the critic",
        "every row of every step is the prompt that the schedule says": "88 rows of 4 steps and 3 evaluations",
        "every sampled token is within the staleness bound": "staleness bound 1",
        "goes back to version 0": "policy v4 to v0, critic v4 to v0; 5 publications",
        "every checkpoint is what was saved": "4 checkpoints",
    }.items():
        (line,) = [line for line in out.splitlines() if claim in line]
        assert "yes" in line
        assert counted in line
    assert f"{commits} of {commits} nodes have their commit: all of them" in out


def test_rows_that_are_not_the_schedules_are_named(folder: Path, overlapped: RunConfig) -> None:
    """The same ledger under another seed's schedule: every step has other prompts than it should."""
    config = configure(folder, "overlapped", *QUIET)
    config.seed = 5
    faults = verify_run(config).faults
    assert any(
        re.match(r"generate/step_000001/shard_0000: prompt_index \d+ at row \d+, the schedule says", f) for f in faults
    )
    assert "commits were made with seed 0, the run has 5" in faults


def test_a_death_before_the_rename_leaves_no_hole(
    folder: Path, overlapped: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stageline reads such files where the attempt left them; once its worker is built anew they are where any Zarr
    reader finds them, and at the end nothing is left of any attempt."""
    config = configure(folder, "unsettled", *QUIET)
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:DyingSettlerRuntime")
    pipeline.driver.run.run(config, Console(file=io.StringIO()))
    paths = RunPaths(config.run_dir)
    assert (paths.root / "died").exists()
    assert [e.gang for e in read_events(paths.events) if e.kind is EventKind.GANG_LOST] == ["generate"]
    report = verify_run(config)
    assert (report.faults, events_noted(report)) == ([], [])
    assert not (paths.root / "attempts").exists()
    assert outputs(config) == outputs(overlapped)


@pytest.mark.parametrize("damage", ["flipped", "cut short", "config.json"])
def test_a_damaged_export_is_named(
    folder: Path, overlapped: RunConfig, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """By `check`, by `export`, which would hand it out, and by a run that would start from it. Removed, it is written
    anew from checkpoints."""
    copy = folder / "runs" / f"export_{damage.replace(' ', '_')}"
    shutil.copytree(overlapped.run_dir, copy)
    config = read_saved_config(str(copy))
    directory = RunPaths(config.run_dir).weights(2)
    file = directory / ("config.json" if damage == "config.json" else "model.safetensors")
    whole = file.read_bytes()
    assert verify_run(config).faults == []
    if damage == "flipped":
        file.write_bytes(bytes([*whole[:-100], whole[-100] ^ 16, *whole[-99:]]))
    else:
        file.write_bytes(whole[:-100])
    fault = f"{file}: is not what was exported" if damage == "flipped" else f"{file}: has {len(whole) - 100} bytes of"
    (found,) = verify_run(config).faults
    assert found.startswith(fault)
    for where in ([], ["--to", str(folder / "handed out")]):
        assert main(["export", str(config.run_dir), "--version", "2", *where]) == 2
        assert fault in " ".join(capsys.readouterr().err.split())
    assert not (folder / "handed out").exists()
    with pytest.raises(ConfigError, match=re.escape(f"model.path: given {str(directory)!r}; {fault}")):
        check_exported("model.path", str(directory))
    shutil.rmtree(directory)
    if damage == "flipped":
        assert main(["export", str(config.run_dir), "--version", "2"]) == 0
        assert file.read_bytes() == whole
        assert verify_run(config).faults == []
        check_exported("model.path", str(directory))


def test_a_run_does_not_start_from_a_damaged_export(folder: Path, overlapped: RunConfig) -> None:
    export = folder / "start"
    shutil.copytree(RunPaths(overlapped.run_dir).weights(2), export)
    config = configure(folder, "from_export", *QUIET, f"model.reference_path={export}")
    preflight(config)
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    fault = "model.safetensors: is not what was exported"
    with pytest.raises(ConfigError, match=rf"model\.reference_path: given '\S+start'; \S+{fault}"):
        preflight(config)
    (export / "export.json").unlink()
    preflight(config)  # somebody else's, of which nothing is known

"""`stageline sweep` where Slurm's commands are stand-ins; `tests/slurm` has its own Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.cli.sweep import parse_axes, sweep_points
from pipeline.config.paths import RunPaths
from pipeline.errors import ConfigError
from pipeline.launch.commands import read_record
from tests.support.configs import arguments, write_config
from tests.support.fake_slurm import FakeSlurm

HETEROGENEOUS = (
    "placement.gangs={engines: {}}",
    "placement.roles={generate: engines, score: all, reference: all, policy: all, critic: all}",
    "slurm.gangs={engines: {nodes: 1}}",
    "slurm.job=heterogeneous",
)
"""Each run of a sweep is a job of its own."""


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    write_config(tmp_path)
    return [*arguments(tmp_path), "slurm.gres=null"]


def job_of(folder: Path, run: str) -> str | None:
    record = read_record(RunPaths(folder / "runs" / run).job)
    return None if record is None else record.job_id


def test_what_is_done_or_under_way_is_left_out(
    sources: list[str],
    tmp_path: Path,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["sweep", *sources, "seed=0,1,2"]) == 0
    assert "submitted job 1, an array of 3" in capsys.readouterr().out
    fake_slurm.job_is("1_1", "PENDING")
    monkeypatch.setattr("pipeline.cli.sweep.has_all_steps", lambda config: config.name == "small-seed0")
    assert main(["sweep", *sources, "seed=0,1,2"]) == 0
    out = capsys.readouterr().out
    assert f"left out {tmp_path}/runs/small-seed0: done, 10 of 10 steps\n" in out
    assert f"left out {tmp_path}/runs/small-seed1: job 1_1 is pending\n" in out
    assert "submitted job 2, an array of 1" in out
    assert [job_of(tmp_path, f"small-seed{seed}") for seed in range(3)] == ["1_0", "1_1", "2_0"]
    fake_slurm.job_is("2_0", "RUNNING")
    assert main(["sweep", *sources, "seed=0,1,2"]) == 0
    assert "submitted" not in capsys.readouterr().out


def test_a_run_that_slurm_refuses_keeps_no_other_from_its_job(
    sources: list[str], tmp_path: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *sources, *HETEROGENEOUS, "slurm.driver_cpus=1,2,3"]) == 0
    assert len(re.findall("submitted job", capsys.readouterr().out)) == 3
    sbatch = fake_slurm.folder / "commands/sbatch"
    refusing = 'grep -q "cpus-per-task=3$" "$2" && { echo no >&2; exit 1; }\nfor script'
    sbatch.write_text(sbatch.read_text().replace("for script", refusing))
    assert main(["sweep", *sources, *HETEROGENEOUS, "slurm.driver_cpus=1,2,3"]) == 2
    said = capsys.readouterr()
    assert len(re.findall("submitted job", said.out)) == 2
    assert f"refused {tmp_path}/runs/small-driver_cpus2: slurm: Slurm refuses the job: no" in said.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("tracking.uri=sqlite:///TMP/m.db",), "refused tracking.uri: given 'sqlite:"),
        ((*HETEROGENEOUS, "tracking.uri=sqlite:///TMP/m.db"), "refused tracking.uri: given 'sqlite:"),
        (
            (*HETEROGENEOUS, "tracking.uri=sqlite:///TMP/m.db", "--at-once=1"),
            "refused --at-once: given 1; the runs are a job each",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_submitted(
    sources: list[str],
    tmp_path: Path,
    fake_slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    changes: tuple[str, ...],
    message: str,
) -> None:
    given = [change.replace("TMP", str(tmp_path)) for change in changes]
    assert main(["sweep", *sources, *given, "seed=0,1"]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert fake_slurm.scripts() == []
    assert not (tmp_path / "runs").exists()


def test_settings_with_several_values_are_axes() -> None:
    changes = ["ppo.kl.coef=0.02,0.05,0.1", "steps=3", "model.policy.betas=[0.8, 0.9]", "seed=0,1"]
    fixed, axes = parse_axes(changes)
    assert fixed == ["steps=3", "model.policy.betas=[0.8, 0.9]"]
    assert axes == {"ppo.kl.coef": ["0.02", "0.05", "0.1"], "seed": ["0", "1"]}


def test_commas_in_brackets_and_quotes_part_nothing() -> None:
    changes = ["model.policy.betas=[0.8, 0.9],[0.9, 0.95]", "reward.args='{a: \"x,y\"}'"]
    fixed, axes = parse_axes(changes)
    assert fixed == [changes[1]]
    assert axes == {"model.policy.betas": ["[0.8, 0.9]", "[0.9, 0.95]"]}


def test_every_combination_is_a_run_with_a_name_of_its_own() -> None:
    found = sweep_points({"ppo.kl.coef": ["0.02", "0.1"], "seed": ["0", "1"]}, "tiny")
    assert [point.suffix for point in found] == ["coef0.02-seed0", "coef0.02-seed1", "coef0.1-seed0", "coef0.1-seed1"]
    assert found[1].changes() == ["ppo.kl.coef=0.02", "seed=1"]


def test_keys_with_the_same_end_are_told_apart() -> None:
    found = sweep_points({"model.policy.lr": ["1", "2"], "model.critic.lr": ["3"]}, "tiny")
    assert [point.suffix for point in found] == ["policy.lr1-critic.lr3", "policy.lr2-critic.lr3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=1", "steps=2"], "sweep: nothing differs"),
        (["reward.args.api_key=one,two"], "reward.args.api_key: a run of a sweep is named after what it differs in"),
        (["seed=0,1", "seed=2,3"], "seed: is given twice"),
        (["seed=3", "seed=0,1"], "seed: is given twice"),
        (["seed=0,00"], "seed: given '0,00'; the values of a sweep differ"),
        (["seed=0,1", "name=a,b"], "name: given 'a,b'; the runs of a sweep are in one directory"),
        (["seed=0,1", "runs_dir=x,y"], "runs_dir: given 'x,y'"),
        (["seed=0,1", "tracking.experiment=a,b"], "tracking.experiment: given 'a,b'"),
        (["seed=0,"], "seed: given '0,'; the values of a sweep differ"),
    ],
)
def test_what_makes_no_sweep_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_axes(changes)


def test_names_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sweep: values that differ in marks alone"):
        sweep_points({"a.b": ["[1]", "{1}"]}, "tiny")
    with pytest.raises(ConfigError, match=r"^name: given 'x+'; a run of the sweep would be called .*: at most 100"):
        sweep_points({"seed": ["0", "1"]}, "x" * 97)

"""Refusals before Slurm is asked, and the directories that Slurm is told; `tests/slurm` submits."""

from __future__ import annotations

import fcntl
import stat
import subprocess
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch.commands import job_state, submit
from pipeline.launch.submission import array_script, run_script, submit_array, submit_run
from tests.support.fake_slurm import FakeSlurm
from tests.support.paths import TINY


def of(folder: Path, *changes: str) -> RunConfig:
    return load_config([TINY], [f"runs_dir={folder}", *changes])


def test_of_two_that_submit_a_run_at_once_one_is_refused(tmp_path: Path) -> None:
    """Otherwise there would be two jobs, and `cancel` would know one of them."""
    config = load_config([TINY], [f"runs_dir={tmp_path}"])
    paths = RunPaths(config.run_dir)
    paths.job.mkdir(parents=True)
    with (paths.job / "submitting").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^name: given 'tiny'; .*process.* is submitting .*/tiny now"):
            submit_run(config)
    assert not (paths.job / "run.sbatch").exists()


def test_marks_of_a_directory_mean_nothing_to_sbatch(tmp_path: Path) -> None:
    """sbatch would replace %j in the middle of a path by the job's number, and no such directory exists."""
    folder = tmp_path / "100%j of it"
    script = run_script(load_config([TINY], [f"runs_dir={folder}"]))
    assert f'#SBATCH --output="{tmp_path}/100%%j of it/tiny/job/slurm-%j.out"' in script
    assert f"run='{folder}/tiny'" in script


@pytest.mark.parametrize("mark", ["\\", "\n"])
def test_a_directory_that_sbatch_cannot_be_told_is_refused(tmp_path: Path, mark: str) -> None:
    config = of(tmp_path)
    config.runs_dir = f"{tmp_path}/a{mark}b"
    with pytest.raises(ConfigError, match=r"^runs_dir: given .*Slurm writes no output below"):
        run_script(config)


def test_each_array_names_its_runs_itself(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """A task of the first may start after the second was submitted."""
    folder = tmp_path / "tiny-sweep/job"
    for names in (("a", "b"), ("c", "it's")):
        configs = [load_config([TINY], [f"runs_dir={tmp_path}"]) for _ in names]
        for config, name in zip(configs, names, strict=True):
            config.name = name
        text = array_script(configs, folder)
        assert text is not None
        submit_array(configs, folder, text)
    first, second = fake_slurm.scripts()
    ran = "#SBATCH --job-name=tiny-sweep\n"
    assert ran in first
    for script, expected in ((first, ["a", "b"]), (second, ["c", "it's"])):
        start = script.index("run=$(")
        lines = script[start : script.index("stageline=(", start)]
        for task, name in enumerate(expected):
            done = subprocess.run(
                ["bash", "-c", f'{lines}echo "$run"'],
                env={"SLURM_ARRAY_TASK_ID": str(task)},
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout == f"{tmp_path}/{name}\n"


def test_what_is_refused_leaves_what_was_there(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Otherwise a continued run would use files of a refused submission."""
    job = RunPaths(of(tmp_path).run_dir).job
    fake_slurm.refuse("sbatch: error: no")
    with pytest.raises(ConfigError, match=r"^slurm: Slurm refuses the job: no; asked for: a node with"):
        submit_run(of(tmp_path))
    assert [path.name for path in job.iterdir()] == ["submitting"]
    (fake_slurm.folder / "refuse").unlink()
    submit_run(of(tmp_path))
    kept = {name: (job / name).read_text() for name in ("config.yaml", "run.sbatch", "job.json")}
    fake_slurm.refuse("sbatch: error: no")
    with pytest.raises(ConfigError, match="Slurm refuses the job"):
        submit_run(of(tmp_path, "slurm.partition=nowhere"))
    assert {name: (job / name).read_text() for name in kept} == kept


def test_a_second_job_is_refused_while_nobody_knows_of_the_first(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    config = of(tmp_path)
    job = submit_run(config)
    fake_slurm.job_is(job.job_id, "SPECIAL_EXIT")
    with pytest.raises(ConfigError, match=r"^name: given 'tiny'; of .*/tiny job 1 is special_exit already: `stageline"):
        submit_run(config)
    fake_slurm.answer_nothing()
    with pytest.raises(ConfigError, match=r"^slurm: Slurm does not answer"):
        submit_run(config)
    assert len(fake_slurm.scripts()) == 1


def test_keys_are_in_files_of_this_user_alone(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The job needs them, and starts where nobody can be asked for them."""
    secret = "c4n4ry"
    own = f"reward.args={{characters: aeiou, api_key: {secret}}}"
    config = of(tmp_path / "runs", own, f"slurm.environment=['export MY_TOKEN={secret}']")
    submit_run(config)
    job = RunPaths(config.run_dir).job
    assert secret in fake_slurm.scripts()[0]
    assert load_config([job / "config.yaml"]).reward.args["api_key"] == secret
    holding = {path for path in (tmp_path / "runs").rglob("*") if path.is_file() and secret in path.read_text()}
    assert {(path.name, stat.S_IMODE(path.stat().st_mode)) for path in holding} == {
        ("config.yaml", 0o600),
        ("run.sbatch", 0o600),
    }


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "REVOKED"])
def test_states_after_which_nothing_comes(fake_slurm: FakeSlurm, state: str) -> None:
    fake_slurm.job_is("12", state)
    known = job_state("12")
    assert known.is_over


@pytest.mark.parametrize(
    "state", ["PENDING", "RUNNING", "COMPLETING", "SPECIAL_EXIT", "STOPPED", "RESIZING", "REQUEUED", "REQUEUE_HOLD"]
)
def test_a_job_in_any_other_state_is_under_way(fake_slurm: FakeSlurm, state: str) -> None:
    fake_slurm.job_is("12", state)
    known = job_state("12")
    assert not known.is_over


def test_a_job_is_forgotten_only_where_slurm_says_so(fake_slurm: FakeSlurm) -> None:
    assert job_state("12") is None
    (fake_slurm.folder / "commands/scontrol").write_text("#!/bin/bash\necho Job 12_7 not found\nexit 1\n")
    assert job_state("12_7") is None, "as it is said of an array's task"


def test_a_controller_that_does_not_answer_has_forgotten_nothing(fake_slurm: FakeSlurm) -> None:
    fake_slurm.job_is("12", "RUNNING")
    fake_slurm.answer_nothing()
    with pytest.raises(ConfigError, match=r"^slurm: Slurm does not answer: Unable to contact slurm controller \(conn"):
        job_state("12")


@pytest.mark.parametrize(
    ("complaint", "key", "said"),
    [
        ("sbatch: error: invalid partition specified: p", "slurm.partition", "invalid partition specified: p"),
        ("sbatch: fatal: No memory", "slurm", "No memory"),
        ("sbatch: unrecognized option '--x'", "slurm", "unrecognized option '--x'"),
    ],
)
def test_a_refusal_is_in_the_words_of_slurm(fake_slurm: FakeSlurm, complaint: str, key: str, said: str) -> None:
    fake_slurm.refuse(complaint)
    with pytest.raises(ConfigError) as refused:
        submit(Path("script"))
    assert str(refused.value) == f"{key}: Slurm refuses the job: {said}"

"""What is refused before Slurm is asked, and what it is told of directories; `tests/slurm` submits."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.launch.submission import run_script, submit_run
from tests.support.paths import TINY


def test_of_two_that_submit_a_run_at_once_one_is_refused(tmp_path: Path) -> None:
    """Else there would be two jobs, of which `cancel` knows one."""
    config = load_config([TINY], [f"runs_dir={tmp_path}"])
    paths = RunPaths(config.run_dir)
    paths.job.mkdir(parents=True)
    with (paths.job / "submitting").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^name: given 'tiny'; another process is submitting .*/tiny now"):
            submit_run(config)
    assert not (paths.job / "run.sbatch").exists()


def test_marks_of_a_directory_mean_nothing_to_sbatch(tmp_path: Path) -> None:
    """It would put the job's number in the place of %j in the middle of a path, where no such directory is."""
    folder = tmp_path / "100%j of it"
    script = run_script(load_config([TINY], [f"runs_dir={folder}"]))
    assert f'#SBATCH --output="{tmp_path}/100%%j of it/tiny/job/slurm-%j.out"' in script
    assert f"run='{folder}/tiny'" in script

"""The sbatch script: as a person reads it, as a shell parses it. `tests/slurm` runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline.config.loading import load_config
from pipeline.errors import ConfigError
from pipeline.launch.script import TEMPLATE, ScriptValues, render
from tests.support.paths import TINY

SCRIPTS = Path(__file__).parent / "scripts"
PLACE = ScriptValues(
    title="The run tiny of Stageline.",
    name="tiny",
    run="/shared/runs/tiny",
    folder=Path("/home/me/stageline"),
    output=Path("/shared/runs/tiny/job/slurm-%j.out"),
)
FORMS = {
    "plain": (
        "placement.gangs.train.workers=2",
        "slurm.gangs={train: {nodes: 2}, generate: {nodes: 1}, score: {beside: generate}}",
        "slurm.command=stageline",
        "slurm.gres=null",
    ),
    "heterogeneous": (
        "placement.gangs.train={workers: 4, threads: 8}",
        "placement.gangs.generate={workers: 8, threads: 2}",
        "slurm.gangs={train: {nodes: 2, sbatch: ['--constraint=\"h100&nvlink\"', --mem=0]}, generate: {nodes: 1}}",
        "slurm.account=rlhf",
        "slurm.partition=gpu",
        "slurm.time_limit=1-12:00:00",
        "slurm.gres=gpu:h100",
        "slurm.environment=['module load cuda/12.4 || exit 2', 'source .venv/bin/activate', 'export NCCL_DEBUG=WARN']",
        "slurm.sbatch=[--qos=long]",
        "slurm.command='apptainer exec --nv /shared/stageline.sif stageline'",
    ),
}
"""Form -> changes of tiny.yaml."""


@pytest.mark.parametrize("form", FORMS)
def test_the_script_is_what_is_kept(form: str) -> None:
    """A change of the template shows here as the script that a cluster would get."""
    assert render(load_config([TINY], FORMS[form]), PLACE) == (SCRIPTS / f"{form}.sbatch").read_text("utf8")


@pytest.mark.parametrize("form", FORMS)
def test_a_shell_can_read_it(form: str) -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPTS / f"{form}.sbatch")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_of_a_site_is_in_the_template() -> None:
    """Options of sbatch, modules and paths come from the config."""
    lines = TEMPLATE.read_text("utf8").splitlines()
    assert [line for line in lines if line.startswith("#SBATCH") or "module" in line.partition("#")[0]] == []


def test_a_sites_own_template_must_have_every_word(tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch"
    with pytest.raises(ConfigError, match=r"^slurm\.template: given .*own\.sbatch'; cannot be read"):
        render(load_config([TINY], [f"slurm.template={own}"]), PLACE)
    own.write_text(TEMPLATE.read_text("utf8").replace("@WORKERS@", "@WORKRES@"))
    config = load_config([TINY], [f"slurm.template={own}"])
    with pytest.raises(ConfigError, match=r"^slurm\.template: .*lacks WORKERS .*has WORKRES that mean nothing"):
        render(config, PLACE)
    own.write_text(TEMPLATE.read_text("utf8").replace("#!/bin/bash\n", "#!/bin/bash\n# ours\n"))
    assert render(config, PLACE).startswith("#!/bin/bash\n# ours\n")

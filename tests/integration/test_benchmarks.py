"""Every benchmark starts in its full form: its arms, names, configs and columns, with one step or a few rows of each.

`--quick` takes other paths through a script than a measurement does, so it hides what a measurement would fail at. Here
a script runs as it is measured, in a copy of the repository's folders that it reads, in which a model of four small
blocks stands in the place of the demo's. Figures mean nothing, and are not looked at. Of arms that take the same lines
of a script one is run; `tests/unit/benchmarks/test_arms.py` validates the configs of all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.small_model import small_model
from tests.support.paths import MOVIE_REVIEWS, ROOT, SMOLLM2

pytestmark = [pytest.mark.processes, pytest.mark.smollm2]


@dataclass(frozen=True)
class Cut:
    """Settings that make a script short: arguments, and lines of Python that replace names of its module `m`."""

    arguments: str = ""
    lines: str = ""


FROZEN = 1
LAST_WORKLOADS = f"{{k: [c.replace('=28', '={FROZEN}') for c in v] for k, v in [*m.WORKLOADS.items()][-2:]}}"
ONE_REPEAT = "best = m.best_seconds; m.best_seconds = lambda work: best(work, 1)"
FEW_PARAMETERS = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
CUTS = {
    # float32: transformers' bfloat16, in the arm `naive`, takes minutes on a CPU without instructions for it
    "ablation": Cut("--no-peer --steps 2 --dtypes float32 --arms naive refit overlap plan"),
    "device_sharing": Cut("--steps 2"),
    "generation": Cut(lines=f"whole = m.workload; m.workload = lambda *_: whole(2, 16_000, 16); {ONE_REPEAT}"),
    "judge": Cut("--steps 4", "m.LATENCIES_S = (0.01,); m.CONFIG = m.CONFIG.replace(': 96', ': 8')"),
    "memory": Cut("--updates 1 --dtypes bfloat16 --threads 1", "m.SAMPLED = (64,); m.ROWS, m.MICRO_ROWS = 4, 2"),
    "migration": Cut(lines="m.LENGTHS, m.TAIL, m.THREE = (32,), ((2, 4), (2, 8)), ((2, 4), (8, 12))"),
    "object_store": Cut("--steps 2", "del m.ARMS['S3, 0 ms']"),
    # the first workload is the demo's config without changes
    "overlap": Cut("--steps 3", f"m.ARMS = m.ARMS[:1]; m.WORKLOADS = {LAST_WORKLOADS}"),
    "pages": Cut("--steps 2", "m.ARMS = (m.NONE, m.OPEN)"),
    "pipeline_decode": Cut(lines="m.NUM_ROWS = (2,)"),
    "planning": Cut("--runs tiny --steps 4", "m.WORKLOADS['tiny'] = m.first_variants(m.WORKLOADS['tiny'], 2)"),
    "ppo_step": Cut(
        "--no-peer --steps 1 --threads 1 --arms",
        "m.ROWS, m.WARM_UP = 4, 1; sys.argv += [m.ARMS[0].name, m.ARMS[-1].name]",
    ),
    "predicted_memory": Cut("--heaps returned --only", f"sys.argv += [*m.CASES][:1]; m.SIZES |= {FEW_PARAMETERS}"),
    "publish": Cut(lines=f"m.SHAPES['0.5B'] = {FEW_PARAMETERS}; m.LAYOUTS = dict(list(m.LAYOUTS.items())[:2])"),
    "refit": Cut(),
    "sandbox": Cut(lines="m.TASK = m.TASK.replace('size=64', 'size=8')"),
    # as many rows on 8 devices under strong scaling as under weak, so that one run is both
    "scale": Cut("--steps 10 --devices 8 --step-s 1", "m.STRONG_ROWS = 8 * m.WEAK_ROWS"),
    "speculation": Cut("--rows 1 --modes sampled --new 4 --train 0.2 --train-rows 6"),
    "store": Cut(lines="m.SEQ = 320"),
    "update": Cut("--rows 2 --threads 1"),
}
ELSEWHERE = {
    "decode_gpu": "needs a CUDA device; without one its --quick runs on a CPU",
    "slurm_scale": "needs the Slurm cluster that tests/slurm makes",
    "naive_ppo": "is a part of ablation",
}


def test_every_script_is_here() -> None:
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py") if "def main()" in file.read_text("utf8")}
    assert scripts == CUTS.keys() | ELSEWHERE.keys()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the folders that scripts read."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("benchmarks", "conf", "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "assets").mkdir()
    (folder / "assets" / MOVIE_REVIEWS.name).symlink_to(MOVIE_REVIEWS.resolve())
    small_model(folder / "assets" / SMOLLM2.name, SMOLLM2, blocks=4)
    demo = {"frozen_blocks: 24": f"frozen_blocks: {FROZEN}", "{rows: 32,": "{rows: 8,", "held_out: 96": "held_out: 8"}
    replace_in(folder / "conf/run/demo.yaml", demo)
    replace_in(folder / "benchmarks/ablation.yaml", {"{rows: 16": "{rows: 4", "new_tokens: 96": "new_tokens: 8"})
    replace_in(folder / "benchmarks/ppo_step.yaml", {"{rows: 16,": "{rows: 4,"})
    # its workers, whose module is not `m`, look at it
    replace_in(folder / "benchmarks/refit.py", {"UPDATES_S = 5.0": "UPDATES_S = 0.1", "256, 64\n": "256, 16\n"})
    return folder


def replace_in(file: Path, changes: dict[str, str]) -> None:
    """Replace texts of a file, each of which must be in it once."""
    text = file.read_text("utf8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} in {file.name}"
        text = text.replace(old, new)
    file.write_text(text, "utf8")


@pytest.mark.parametrize("script", CUTS)
def test_a_benchmark_runs_in_its_full_form(script: str, copy: Path, tmp_path: Path) -> None:
    cut, figures = CUTS[script], tmp_path / "figures.json"
    code = f"import sys, importlib; m = importlib.import_module('benchmarks.{script}'); {cut.lines or 'pass'}; m.main()"
    command = [sys.executable, "-c", code, "--repeats", "1", "--json", str(figures), *cut.arguments.split()]
    environment = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(figures.read_text("utf8"))["figures"]

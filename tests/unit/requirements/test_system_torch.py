"""The torch that an interpreter has already, as `make install TORCH=system` takes or refuses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("version", "taken"),
    [("2.11.0", True), ("2.13.1+cu130", True), ("2.10.0", False), ("2.9.1+cpu", False), ("2.14.0a0+git1", False)],
)
def test_a_torch_of_another_version_is_refused(tmp_path: Path, version: str, taken: bool) -> None:
    (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
    script, project = ROOT / "requirements/system_torch.py", ROOT / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, str(script), str(project)], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == (0 if taken else 1)
    assert (f"has torch {version}, Stageline needs torch>=2.11,<2.14" in done.stderr) is not taken


def test_make_asks_it() -> None:
    dry = ["make", "--dry-run", "--always-make", "install", "TORCH=system", "PYTHON=python3"]
    commands = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python requirements/system_torch.py pyproject.toml" in commands
